# SPDX-License-Identifier: Apache-2.0
"""A rollout as a value, and as one file: to freeze it, or to resume a run that sampled ahead."""

import dataclasses
import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from klear_jax.core import mesh as mesh_lib
from klear_jax.core.batch import RolloutBatch
from klear_jax.rl.minibatch import MiniBatch


@dataclasses.dataclass(frozen=True)
class Rollout:
    """What was sampled for one step, ready to be trained on."""

    number: int
    """The step that it is for, from 0."""
    position: int
    """Batches of problems that had been drawn when it was complete."""
    minibatches: tuple[MiniBatch, ...]
    """With the log-probs of the policy that sampled."""
    values: dict[str, Any]
    """Metrics of the sampling."""


def save_rollout(path: Path, rollout: Rollout, about: dict[str, Any]) -> None:
    """Write a rollout to an .npz file in one piece; `about` is plain JSON about the run."""
    arrays: dict[str, Any] = {
        f"{number}/{field.name}": np.asarray(getattr(minibatch.batch, field.name))
        for number, minibatch in enumerate(rollout.minibatches)
        for field in dataclasses.fields(RolloutBatch)
    }
    record = {
        "number": rollout.number,
        "position": rollout.position,
        "values": {k: np.asarray(v).item() for k, v in rollout.values.items()},
        "minibatches": [[m.microbatches, m.padding_share] for m in rollout.minibatches],
        "about": about,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez_compressed(file, record=np.array(json.dumps(record)), **arrays)
    os.replace(part, path)


def load_rollout(path: Path, mesh: Mesh | None = None) -> tuple[Rollout, dict[str, Any]]:
    """Read what `save_rollout` wrote, placed on the mesh if one is given.

    Raises:
        ValueError: the file is no saved rollout, or one of another version.
        OSError: it cannot be read.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        record = json.loads(str(arrays.pop("record")))
        minibatches = []
        for number, (microbatches, padding) in enumerate(record["minibatches"]):
            fields = dataclasses.fields(RolloutBatch)
            batch = RolloutBatch(**{f.name: arrays[f"{number}/{f.name}"] for f in fields})
            if mesh is not None:
                batch = mesh_lib.place(batch, mesh, None, "batch", "seq")
            else:
                batch = jax.tree.map(jax.numpy.asarray, batch)
            minibatches.append(MiniBatch(batch, microbatches, padding))
        rollout = Rollout(
            record["number"], record["position"], tuple(minibatches), record["values"]
        )
        return rollout, record["about"]
    except (KeyError, TypeError, ValueError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(
            f"{path} is no rollout that this version wrote ({type(error).__name__}: {error}); make "
            "one with run_gppo.py --save-rollouts"
        ) from error
