# SPDX-License-Identifier: Apache-2.0
"""Checkpoints by orbax: parameters, optimizer state and a JSON record, saved as one step.

The record says which model and which run a checkpoint belongs to; it is compared before any weight
is read. A save goes to a temporary folder that is renamed when complete, so a full disk or a killed
process leaves the earlier checkpoints whole.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from klear_jax.model import params as params_lib
from klear_jax.model.config import ModelConfig
from klear_jax.model.params import Params
from klear_jax.train.state import TrainState

FOLDER = "checkpoints"
"""Name of the checkpoint folder inside a run."""

COMPUTE_FIELDS = ("dtype", "remat", "max_positions")
"""Fields of `ModelConfig` that change how a model is used and not what its weights are. (Qwen3 base
models name fewer positions than the released ones.)"""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used here; the text says why and what to do."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, run: Path, *, keep: int = 2):
        self.folder = (run / FOLDER).absolute()
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, create=True, enable_async_checkpointing=False
            ),
        )

    def latest(self) -> int | None:
        """The last complete step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, record: dict[str, Any]) -> None:
        """Write a checkpoint of `step`; `record` is plain JSON.

        Raises:
            CheckpointError: it could not be written; earlier ones are as they were.
        """
        progress = {
            "opt_state": state.opt_state,
            "updates": state.updates,
            "skipped": state.skipped,
        }
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(state.params),
                    progress=ocp.args.StandardSave(progress),
                    record=ocp.args.JsonSave(record),
                ),
            )
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"cannot write checkpoint {step} to {self.folder}: {error}; free disk space or "
                f"check the folder, then go on with --resume from step {self.latest()}"
            ) from error

    def record(self, step: int) -> dict[str, Any]:
        """The JSON record of a step."""
        restored = self._manager.restore(
            step, args=ocp.args.Composite(record=ocp.args.JsonRestore())
        )
        return restored["record"]

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """Read the state of a step into the given shapes and shardings (another mesh is fine)."""
        progress = {
            "opt_state": abstract.opt_state,
            "updates": abstract.updates,
            "skipped": abstract.skipped,
        }
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(abstract.params),
                progress=ocp.args.StandardRestore(progress),
            ),
        )
        return TrainState(params=restored["params"], **restored["progress"])

    def restore_params(self, step: int, abstract: Params) -> Params:
        """Read the parameters of a step alone."""
        restored = self._manager.restore(
            step, args=ocp.args.Composite(params=ocp.args.StandardRestore(abstract))
        )
        return restored["params"]

    def close(self) -> None:
        self._manager.close()


def model_record(cfg: ModelConfig) -> dict[str, Any]:
    """The fields that say what a model is."""
    fields = dataclasses.asdict(cfg)
    return {name: value for name, value in fields.items() if name not in COMPUTE_FIELDS}


def check_same(saved: dict[str, Any], given: dict[str, Any], *, what: str) -> None:
    """Refuse a checkpoint whose record differs.

    Raises:
        CheckpointError: lists each field with the saved and the given value.
    """
    names = [n for n in saved.keys() | given.keys() if saved.get(n) != given.get(n)]
    if names:
        lines = [f"{n}: checkpoint {saved.get(n)!r}, here {given.get(n)!r}" for n in sorted(names)]
        raise CheckpointError(f"{what}: " + "; ".join(lines))


def restore_or_init(
    saves: Checkpoints,
    record: dict[str, Any],
    abstract: TrainState,
    make: Callable[[], TrainState],
) -> tuple[TrainState, int]:
    """The last checkpoint's state and its step, or a state made by `make` and 0.

    Raises:
        CheckpointError: the checkpoint's record differs from `record` (`COMPUTE_FIELDS` apart).
    """
    step = saves.latest()
    if step is None:
        return make(), 0

    def identity(record):
        return record | {"model": model_record(ModelConfig(**record["model"]))}

    what = f"{saves.folder} belongs to another run or model"
    check_same(identity(saves.record(step)), identity(record), what=what)
    return saves.restore(step, abstract), step


def saved_model(run: Path) -> ModelConfig:
    """The config of the model in a run's last checkpoint; no weight is read.

    Raises:
        CheckpointError: the folder holds no checkpoint.
    """
    checkpoints, step = _last(run)
    cfg = ModelConfig(**checkpoints.record(step)["model"])
    checkpoints.close()
    return cfg


def _last(run: Path) -> tuple[Checkpoints, int]:
    if not (run / FOLDER).is_dir():
        raise CheckpointError(
            f"{run} holds no checkpoint (no folder {FOLDER}/); give the --out folder of a run, "
            "or a folder with config.json and safetensors"
        )
    checkpoints = Checkpoints(run)
    step = checkpoints.latest()
    if step is None:
        raise CheckpointError(f"{checkpoints.folder} holds no complete checkpoint")
    return checkpoints, step


def load_params(path: Path, *, mesh: Mesh | None = None) -> tuple[Params, ModelConfig]:
    """Parameters and config of the last checkpoint of a run folder.

    Raises:
        CheckpointError: the folder holds no checkpoint.
    """
    checkpoints, step = _last(Path(path))
    cfg = ModelConfig(**checkpoints.record(step)["model"])
    abstract = params_lib.abstract(cfg, mesh)
    if mesh is None:
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), abstract
        )
    params = checkpoints.restore_params(step, abstract)
    checkpoints.close()
    return params, cfg
