# SPDX-License-Identifier: Apache-2.0
"""Reads the files of one run into plain values, forgiving what a killed run leaves behind.

A torn or damaged line is counted and skipped, a missing file gives an empty value, and whatever is
not a finite number becomes NaN, which plots as a gap. Only a folder that has no usable metrics at
all is an error. Read `read_run` first.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

Record: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Curve:
    """One metric over steps, ascending; a step whose value is missing holds NaN."""

    steps: np.ndarray
    values: np.ndarray

    @property
    def finite(self) -> np.ndarray:
        """The values that are numbers, in order of steps."""
        return self.values[np.isfinite(self.values)]

    @property
    def first(self) -> float:
        """The earliest recorded value."""
        return float(self.finite[0])

    @property
    def last(self) -> float:
        """The latest recorded value."""
        return float(self.finite[-1])


@dataclass(frozen=True)
class Run:
    """All that a report knows of a run; `phases` maps "sft", "rl", "eval" to rows by step."""

    path: Path
    info: Record
    phases: Mapping[str, tuple[Record, ...]]
    completions: tuple[Record, ...] = ()
    damaged_lines: int = 0

    def rows(self, phase: str) -> tuple[Record, ...]:
        """The records of a phase, one per step, empty when the run had no such phase."""
        return self.phases.get(phase, ())

    def curve(self, phase: str, key: str) -> Curve | None:
        """The metric `key` over the steps of `phase`, or None when it holds no finite number."""
        rows = self.rows(phase)
        values = np.array([number(row.get(key)) for row in rows], dtype=np.float64)
        if not np.isfinite(values).any():
            return None
        return Curve(np.array([row["step"] for row in rows], dtype=np.float64), values)

    def keys(self, phase: str, prefix: str) -> list[str]:
        """Metric names of `phase` that start with `prefix`, in order of first appearance."""
        found = {key: None for row in self.rows(phase) for key in row if key.startswith(prefix)}
        return list(found)

    @property
    def config(self) -> Record:
        """The resolved configuration, nested as the run wrote it."""
        config = self.info.get("config")
        return config if isinstance(config, dict) else {}

    def setting(self, *endings: str) -> Any:
        """The first configuration value whose dotted name ends with one of `endings`, in turn."""
        flat = flatten(self.config)
        for ending in endings:
            for name, value in flat.items():
                if name == ending or name.endswith("." + ending):
                    return value
        return None

    @property
    def variant(self) -> str:
        """The clipping variant, such as "gppo"; "" when the configuration names none."""
        value = self.setting("clip.variant", "variant")
        return value if isinstance(value, str) else ""

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """The clip bounds as ratios, such as (0.8, 1.28); NaN for one that is not configured."""
        return 1.0 - number(self.setting("clip.low")), 1.0 + number(self.setting("clip.high"))


def number(value: object) -> float:
    """The value as a float, or NaN when it is not a finite number (None, text, infinity, bool)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        result = float(value)
    except OverflowError:
        return math.nan
    return result if math.isfinite(result) else math.nan


def flatten(tree: Record, prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level of dotted names: {"clip": {"low": 1}} gives {"clip.low": 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def read_run(run_dir: Path) -> Run:
    """Read a run's folder.

    Raises:
        FileNotFoundError: the folder, or its metrics.jsonl, does not exist.
        ValueError: metrics.jsonl holds no record with a phase and a step.
    """
    if not run_dir.is_dir():
        raise FileNotFoundError(f"{run_dir}: no such folder; give the folder that a run wrote")
    metrics = run_dir / "metrics.jsonl"
    if not metrics.is_file():
        raise FileNotFoundError(f"{run_dir}: holds no metrics.jsonl, so there is nothing to report")
    records, damaged = _read_lines(metrics)
    phases = _by_phase(records)
    if not phases:
        raise ValueError(
            f"{metrics}: holds no record with a phase and a step, so there is nothing to report"
        )
    completions: list[Record] = []
    if (run_dir / "completions.jsonl").is_file():
        completions, more_damaged = _read_lines(run_dir / "completions.jsonl")
        damaged += more_damaged
    return Run(run_dir, _read_object(run_dir / "config.json"), phases, tuple(completions), damaged)


def read_sft_start(run: Run) -> Run | None:
    """The run that made the starting weights (`sft_run` in config.json), or None."""
    given = run.info.get("sft_run")
    if not isinstance(given, str) or not given:
        return None
    # A relative path was written by a process whose working directory may have been another than
    # ours.
    for candidate in (Path(given), run.path / given):
        try:
            return read_run(candidate)
        except (OSError, ValueError):
            continue
    return None


def _by_phase(records: list[Record]) -> dict[str, tuple[Record, ...]]:
    """Group by phase and order by step; a resumed run repeats steps, and its later word stands."""
    latest: dict[str, dict[int, Record]] = {}
    for record in records:
        phase, step = record.get("phase"), number(record.get("step"))
        if isinstance(phase, str) and not math.isnan(step):
            latest.setdefault(phase, {})[int(step)] = {**record, "step": int(step)}
    return {phase: tuple(rows[step] for step in sorted(rows)) for phase, rows in latest.items()}


def _read_lines(path: Path) -> tuple[list[Record], int]:
    """The JSON objects of a file, one a line, and the count of lines that could not be read."""
    records: list[Record] = []
    damaged = 0
    for line in _lines(path):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            damaged += 1
            continue
        if isinstance(value, dict):
            records.append(value)
        else:
            damaged += 1
    return records, damaged


def _lines(path: Path) -> Iterator[str]:
    # Not str.splitlines: it would also split at characters that are legal inside a JSON string.
    for line in path.read_bytes().split(b"\n"):
        text = line.decode("utf-8", errors="replace").strip()
        if text:
            yield text


def _read_object(path: Path) -> Record:
    try:
        value = json.loads(path.read_bytes().decode("utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
