# SPDX-License-Identifier: Apache-2.0
"""A progress line with the figures that matter; plain lines where the output is no terminal."""

import time
from collections.abc import Sequence
from typing import Any

import rich.console
import rich.progress

SHORT = {
    "reward": "reward", "heldout": "held-out", "entropy": "entropy", "loss": "loss",
    "grad_norm": "|g|", "clip": "clipped", "tokens_per_second": "tok/s",
}  # fmt: skip


class Progress:
    """Shows `done of total`, chosen metrics and the time left."""

    def __init__(self, title: str, total: int, first: int = 0):
        self._console = rich.console.Console()
        self._title, self._total, self._first = title, total, first
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("{task.fields[figures]}"),
            rich.progress.TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=total, completed=first, figures="")
        self._last, self._tokens = time.monotonic(), 0

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def count(self, tokens: int) -> None:
        """Add to the tokens that `rate` speaks of."""
        self._tokens += tokens

    def rate(self) -> float:
        """Tokens a second since the last call."""
        now = time.monotonic()
        tokens, elapsed = self._tokens, now - self._last
        self._last, self._tokens = now, 0
        return tokens / max(elapsed, 1e-9)

    def show(self, done: int, record: dict[str, Any], names: Sequence[str]) -> None:
        """Update the line with the named metrics of a log record."""
        figures = "  ".join(f"{SHORT.get(n, n)} {_short(record.get(n))}" for n in names)
        self._bar.update(self._task, completed=done, figures=figures)
        if not self._console.is_terminal:
            print(f"{self._title} {done}/{self._total}  {figures}", flush=True)

    def note(self, text: str) -> None:
        """A line above the bar that stays."""
        if self._console.is_terminal:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, flush=True)


def _short(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
