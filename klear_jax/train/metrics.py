# SPDX-License-Identifier: Apache-2.0
"""Metrics that add up exactly over micro-batches and devices, and where a run writes them."""

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array


@struct.dataclass
class Metrics:
    """Parts of metrics; `merge` adds two micro-batches, `summarise` divides once at the end."""

    sums: dict[str, Array] = struct.field(default_factory=dict)
    """Reported as they are."""
    means: dict[str, tuple[Array, Array]] = struct.field(default_factory=dict)
    """(sum, count) pairs; a mean over nothing is reported as NaN."""
    maxima: dict[str, Array] = struct.field(default_factory=dict)

    def merge(self, other: "Metrics") -> "Metrics":
        return Metrics(
            sums=jax.tree.map(jnp.add, self.sums, other.sums),
            means=jax.tree.map(jnp.add, self.means, other.means),
            maxima=jax.tree.map(jnp.maximum, self.maxima, other.maxima),
        )

    def summarise(self) -> dict[str, Array]:
        """Name -> value."""
        means = {k: total / jnp.where(n > 0, n, jnp.nan) for k, (total, n) in self.means.items()}
        return {**self.sums, **means, **self.maxima}


def zeros_like(shapes: Metrics) -> Metrics:
    """The neutral element of `merge` for metrics of these shapes."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    low = jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), shapes.maxima)
    return dataclasses.replace(zeros, maxima=low)


class RunLog:
    """Writes one run's metrics to `metrics.jsonl` and to TensorBoard event files.

    Lines are written whole and flushed, so a killed run leaves at most one torn last line.
    """

    def __init__(self, folder: Path):
        from tensorboardX import SummaryWriter  # half a second to import

        folder.mkdir(parents=True, exist_ok=True)
        # Open for the life of the log; closed by __exit__.
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._events = SummaryWriter(str(folder / "tensorboard"), flush_secs=30)
        self._start = time.monotonic()

    def write(self, phase: str, step: int, values: dict[str, Any]) -> dict[str, Any]:
        """Append one line; returns the record as plain Python values (NaN becomes null)."""
        record = {"phase": phase, "step": step, "time": round(time.monotonic() - self._start, 3)}
        record |= {name: _plain(value) for name, value in values.items()}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for name, value in record.items():
            if name not in ("phase", "step") and isinstance(value, int | float):
                self._events.add_scalar(f"{phase}/{name}", value, step)
        return record

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._events.close()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, str | bool) or value is None:
        return value
    value = value if isinstance(value, list) else np.asarray(value).tolist()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if math.isfinite(value) else None
