# SPDX-License-Identifier: Apache-2.0
"""Completions of the same problems before and after training, as a table of escaped text.

A response is untrusted: a model writes it, and a tiny or a hostile model writes anything.
Everything passes `visible_text`, which escapes HTML and spells out characters that would not show
or would reorder the text.
"""

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from markupsafe import Markup, escape

from klear_jax.report.records import Table
from klear_jax.report.runfiles import Record, number

SHOWN_CHARACTERS = 1200
"""Longest text shown of one response, in characters; the rest is counted, not shown."""


@dataclass(frozen=True)
class Pair:
    """A problem's completions at the first and last step; `after` is None if they are one."""

    before: Record
    after: Record | None


def pairs(completions: Iterable[Record], limit: int = 8) -> tuple[list[Pair], int, int]:
    """Up to `limit` problems recorded at both ends, with the first and the last step.

    Problems are taken in the order of the file, tasks in turn: never by how well they went. A
    problem sampled several times in a step shows its first sample.
    """
    by_step: dict[int, dict[str, Record]] = {}
    for record in completions:
        step = number(record.get("step"))
        if step == step and isinstance(record.get("response"), str):
            by_step.setdefault(int(step), {}).setdefault(str(record.get("problem_id")), record)
    if not by_step:
        return [], 0, 0
    first, last = min(by_step), max(by_step)
    start, end = by_step[first], by_step[last]
    chosen = _tasks_in_turn([name for name in start if name in end], start, limit)
    if first == last:
        return [Pair(start[name], None) for name in chosen], first, last
    return [Pair(start[name], end[name]) for name in chosen], first, last


def pairs_table(shown: Iterable[Pair], first: int, last: int) -> Table:
    """The pairs side by side: problem, before, after."""
    header = ("Problem", f"Step {first}")
    if first == last:
        rows = tuple((_problem(pair.before), _response(pair.before)) for pair in shown)
        return Table(header, rows, kind="texts")
    rows = tuple(
        (_problem(pair.before), _response(pair.before), _response(pair.after or {}))
        for pair in shown
    )
    return Table((*header, f"Step {last}"), rows, kind="texts")


def visible_text(text: str, limit: int = SHOWN_CHARACTERS) -> Markup:
    """Text as safe HTML: line ends and tags like <think> marked, the invisible spelt out."""
    parts: list[Markup] = []
    for piece in re.split(r"(<[/|]?[A-Za-z_|]{1,24}>|\n)", text[:limit]):
        if piece == "\n":
            parts.append(Markup('<span class="mark">\u21b5</span>\n'))
        elif piece.startswith("<") and piece.endswith(">"):
            parts.append(Markup('<span class="tag">{}</span>').format(piece))
        else:
            parts.append(escape("".join(_spelt(c) for c in piece)))
    if len(text) > limit:
        parts.append(
            Markup('<span class="mark"> … {} more characters</span>').format(len(text) - limit)
        )
    return Markup("").join(parts)


def _spelt(character: str) -> str:
    # Cc: control; Cf: format, which holds the marks that turn the direction of text around; Cs:
    # lone surrogates, which cannot be written as UTF-8; Co: private use.
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co"):
        return f"\\u{ord(character):04x}"
    return character


def _tasks_in_turn(names: list[str], records: dict[str, Record], limit: int) -> list[str]:
    by_task: dict[str, list[str]] = {}
    for name in names:
        by_task.setdefault(_task(name, records[name]), []).append(name)
    chosen: list[str] = []
    for place in range(max((len(group) for group in by_task.values()), default=0)):
        chosen += [group[place] for group in by_task.values() if place < len(group)]
    kept = set(chosen[:limit])
    return [name for group in by_task.values() for name in group if name in kept]


def _task(problem_id: str, record: Record) -> str:
    """The record's task, or else the word that its problem id starts with: "sum" of "sum-12"."""
    task = record.get("task")
    if isinstance(task, str):
        return task
    word = re.match(r"[A-Za-z]+", problem_id)
    return word.group() if word else ""


def _problem(record: Record) -> Markup:
    return Markup('<pre>{}</pre><p class="small">answer: <b>{}</b><br>{}</p>').format(
        visible_text(str(record.get("question", ""))),
        visible_text(str(record.get("answer", "")), 200),
        visible_text(str(record.get("problem_id", "")), 80),
    )


def _response(record: Record) -> Markup:
    correct = record.get("correct")
    badge = ("", "not graded")
    if isinstance(correct, bool):
        badge = ("good", "✓ correct") if correct else ("bad", "✗ wrong")
    notes = [f"reward {reward:g}"] if (reward := number(record.get("reward"))) == reward else []
    if (tokens := number(record.get("tokens"))) == tokens:
        notes.append(f"{tokens:.0f} tokens")
    if record.get("stop") == "length":
        notes.append("cut off at the length limit")
    if correct is not True and record.get("reason"):
        notes.append(str(record["reason"])[:120])
    return Markup('<p class="small"><span class="badge {}">{}</span> {}</p><pre>{}</pre>').format(
        *badge, visible_text(" · ".join(notes), 300), visible_text(str(record.get("response", "")))
    )
