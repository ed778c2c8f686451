# SPDX-License-Identifier: Apache-2.0
"""Writes `report.html`, one self-contained page about a run of any kind, and its figures.

`write_report` is the function to call and to read first. The page embeds everything it shows: it
can be mailed, or opened years later without a network.
"""

import os
from pathlib import Path

from klear_jax.report import figures, plots
from klear_jax.report.plots import Panel
from klear_jax.report.records import Picture, Section
from klear_jax.report.runfiles import Run, read_run, read_sft_start
from klear_jax.report.sections import build_sections
from klear_jax.report.template import PAGE, STYLE


def write_report(run_dir: Path, *, title: str | None = None) -> Path:
    """Write `report.html` and `figures/*.png` into a run's folder, from the files found there.

    Returns the page's path. Earlier pages and figures of the same names are replaced, each in one
    rename, so that a reader never sees half a file. `title` is the page's heading; by default it
    names the kind of run and its preset.

    Raises:
        FileNotFoundError: the folder, or its metrics.jsonl, does not exist.
        ValueError: metrics.jsonl holds no usable record.
    """
    run = read_run(run_dir)
    sft = run if run.rows("sft") else read_sft_start(run)
    folder = run_dir / "figures"
    folder.mkdir(exist_ok=True)

    def draw(name: str, panel: Panel, caption: str) -> Picture:
        png = plots.png_bytes(plots.single(panel))
        replace(folder / f"{name}.png", png)
        return Picture(name, png, alt=f"Plot: {panel.title}", caption=caption)

    sections, missing = build_sections(run, sft, draw)
    if run.rows("rl"):
        panels = [panel for make in figures.SUMMARY if (panel := make(run)) is not None]
        if panels:
            replace(folder / "summary.png", plots.png_bytes(plots.grid(panels)))
    page = render(title or _title(run), _subtitle(run), sections, _notes(run, missing))
    path = run_dir / "report.html"
    # A lone surrogate, which JSON text can carry into here, has no UTF-8 form.
    replace(path, page.encode("utf-8", errors="replace"))
    return path


def render(title: str, subtitle: str, sections: list[Section], notes: list[str]) -> str:
    """The page as HTML. All text is escaped; only `Markup` passes as it is."""
    from jinja2 import Environment
    from markupsafe import Markup

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(PAGE).render(
        title=title, subtitle=subtitle, sections=sections, notes=notes, style=Markup(STYLE)
    )


def _title(run: Run) -> str:
    kinds = {"rl": f"{(run.variant or 'RL').upper()} run", "sft": "Supervised fine-tuning"}
    kind = next((name for phase, name in kinds.items() if run.rows(phase)), "Evaluation")
    preset = run.info.get("preset")
    return f"{kind}: {preset}" if preset else f"{kind}: {run.path.resolve().name}"


def _subtitle(run: Run) -> str:
    created, revision = run.info.get("created"), run.info.get("git_revision")
    parts = [
        "klear_jax",
        f"started {created}" if created else "",
        f"revision {str(revision)[:12]}" if revision else "",
        f"folder {run.path.resolve().name}",
    ]
    return " · ".join(part for part in parts if part)


def _notes(run: Run, missing: list[str]) -> list[str]:
    notes = ["Made by klear_jax.report from config.json, metrics.jsonl and completions.jsonl."]
    if missing:
        notes.append(f"Left out, because the run's files do not hold it: {', '.join(missing)}.")
    if run.damaged_lines:
        lines = "1 line" if run.damaged_lines == 1 else f"{run.damaged_lines} lines"
        notes.append(f"{lines} of the run's files could not be read and were skipped.")
    return notes


def replace(path: Path, content: bytes) -> None:
    """Write a file in one rename, so that a reader never sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
