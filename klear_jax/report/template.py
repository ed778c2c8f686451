# SPDX-License-Identifier: Apache-2.0
"""The page's HTML and CSS as a jinja2 template; it holds no logic beyond leaving out what is empty.

Kept as Python text so that an installed package needs no data files. The content policy in
its head lets a browser load nothing from elsewhere and run no script, whatever text says.
"""

STYLE = """
:root { --ink: #22262c; --soft: #5c636e; --line: #e3e6ea; --paper: #ffffff; --ground: #f6f7f9;
  --blue: #0072b2; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial,
  sans-serif; }
main { max-width: 1100px; margin: 0 auto; padding: 36px 24px 64px; }
h1 { font-size: 27px; line-height: 1.25; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 19px; margin: 0 0 4px; }
p { margin: 0 0 10px; max-width: 78ch; }
a { color: var(--blue); text-decoration: none; }
a:hover { text-decoration: underline; }
nav { margin: 14px 0 26px; color: var(--soft); font-size: 14px; }
nav a { margin-right: 16px; white-space: nowrap; }
section { margin: 0 0 40px; }
section > p { color: var(--soft); }
.subtitle, .small { color: var(--soft); font-size: 13px; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(260px, 1fr)); gap: 12px;
  margin: 14px 0 18px; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 10px;
  padding: 12px 16px 11px; }
.card .label { color: var(--soft); font-size: 13px; }
.card .value { font-size: 23px; font-weight: 600; line-height: 1.35;
  font-variant-numeric: tabular-nums; }
.card .detail { color: var(--soft); font-size: 12.5px; }
.grid { display: grid; grid-template-columns: 1fr 1fr; gap: 16px; margin: 14px 0; }
figure { margin: 0; background: var(--paper); border: 1px solid var(--line); border-radius: 10px;
  padding: 12px 12px 10px; }
figure.wide { grid-column: 1 / -1; }
figure img { display: block; width: 100%; height: auto; }
figcaption { color: var(--soft); font-size: 13px; line-height: 1.45; padding: 6px 6px 2px; }
.scroll { overflow-x: auto; background: var(--paper); border: 1px solid var(--line);
  border-radius: 10px; margin: 14px 0; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: 8px 14px;
  border-top: 1px solid var(--line); }
thead th { border-top: 0; color: var(--soft); font-weight: 600; font-size: 13px; }
table.cells td:nth-child(n+3), table.cells th:nth-child(n+3),
table.numbers td + td, table.numbers th + th { text-align: right;
  font-variant-numeric: tabular-nums; }
table.facts td:first-child { width: 240px; color: var(--soft); }
table.facts td { overflow-wrap: anywhere; }
table.texts { min-width: 760px; table-layout: fixed; }
table.texts th:first-child { width: 25%; }
table.texts p { margin: 2px 0 4px; }
pre { margin: 0; font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono",
  monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.tag { color: #7a3e68; background: #f7edf4; border-radius: 3px; }
.mark { color: #a3a9b2; }
.badge { display: inline-block; padding: 0 7px; border-radius: 9px; background: #eceef1;
  color: var(--ink); }
.badge.good { background: #d9f0e8; color: #00563f; }
.badge.bad { background: #fbe3d6; color: #8c3d00; }
details { background: var(--paper); border: 1px solid var(--line); border-radius: 10px;
  padding: 10px 16px; }
summary { cursor: pointer; color: var(--blue); }
details pre { margin-top: 10px; }
footer { color: var(--soft); font-size: 13px; border-top: 1px solid var(--line);
  padding-top: 14px; }
@media (max-width: 760px) { .grid { grid-template-columns: 1fr; }
  main { padding: 22px 14px 40px; } }
@media print { body { background: white; } figure, .card { break-inside: avoid; } }
"""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>{{ style }}</style>
</head>
<body>
<main>
<header>
<h1>{{ title }}</h1>
<p class="subtitle">{{ subtitle }}</p>
</header>
<nav>{% for section in sections %}
<a href="#{{ section.anchor }}">{{ section.title }}</a>
{% endfor %}</nav>
{% for section in sections %}
<section id="{{ section.anchor }}">
<h2>{{ section.title }}</h2>
{% if section.intro %}<p>{{ section.intro }}</p>{% endif %}
{% if section.cards %}<div class="cards">
{% for card in section.cards %}<div class="card"><div class="label">{{ card.label }}</div>
<div class="value">{{ card.value }}</div><div class="detail">{{ card.detail }}</div></div>
{% endfor %}</div>{% endif %}
{% if section.figures %}<div class="grid">
{% for picture in section.figures %}<figure{% if picture.wide %} class="wide"{% endif %}>
<img alt="{{ picture.alt }}" width="744" height="420" src="{{ picture.data_uri }}">
{% if picture.caption %}<figcaption>{{ picture.caption }}</figcaption>{% endif %}
</figure>
{% endfor %}</div>{% endif %}
{% if section.table %}<div class="scroll"><table class="{{ section.table.kind }}">
{% if section.table.header %}<thead><tr>
{% for cell in section.table.header %}<th>{{ cell }}</th>{% endfor %}</tr></thead>
{% endif %}<tbody>
{% for row in section.table.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>{% endif %}
{% if section.fold %}<details><summary>{{ section.fold[0] }}</summary>
<pre>{{ section.fold[1] }}</pre></details>{% endif %}
</section>
{% endfor %}
<footer>{% for line in notes %}<p>{{ line }}</p>{% endfor %}</footer>
</main>
</body>
</html>
"""
