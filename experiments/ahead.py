# SPDX-License-Identifier: Apache-2.0
"""What a run had drawn and sampled ahead of its checkpoint, kept beside it so that it resumes."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from jax.sharding import Mesh
from session import UsageError, usage_errors, write_json

from klear_jax.rl.rollout_file import Rollout, load_rollout, save_rollout

KEPT = 3
"""Steps of which it is kept; one more than checkpoints, for a save that is cut off."""


def save_ahead(folder: Path, step: int, position: int, ahead: Sequence[Rollout]) -> None:
    """Write it before the checkpoint of the same step. A run that is not ahead writes nothing."""
    if position == step and not ahead:
        return
    here = folder / "ahead" / f"{step:06d}"
    here.mkdir(parents=True, exist_ok=True)
    for number, rollout in enumerate(ahead):
        save_rollout(here / f"{number}.npz", rollout, {})
    write_json(here / "position.json", {"position": position, "rollouts": len(ahead)})
    for old in sorted(here.parent.iterdir())[:-KEPT]:
        shutil.rmtree(old)


def load_ahead(folder: Path, step: int, mesh: Mesh) -> tuple[int, list[Rollout]]:
    """Batches of problems drawn before `step` was done, and the rollouts that wait.

    Raises:
        UsageError: it was written, and cannot be read.
    """
    here = folder / "ahead" / f"{step:06d}"
    if not here.is_dir():
        return step, []
    try:
        record = json.loads((here / "position.json").read_text(encoding="utf-8"))
        position, count = int(record["position"]), int(record["rollouts"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{here}/position.json cannot be read ({error})") from error
    with usage_errors():
        return position, [load_rollout(here / f"{n}.npz", mesh)[0] for n in range(count)]
