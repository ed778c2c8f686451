# SPDX-License-Identifier: Apache-2.0
"""Where and how a run samples: its meshes and its decode engine."""

import math

import jax
from configs import Decoding, GppoRun
from inputs import start_devices
from jax.sharding import Mesh
from session import UsageError, usage_errors

from klear_jax.core import mesh as mesh_lib
from klear_jax.core.mesh import MeshSpec, make_mesh
from klear_jax.data.tokenizer import Tokenizer
from klear_jax.model import params as params_lib
from klear_jax.model.config import ModelConfig
from klear_jax.sampling.config import EngineConfig
from klear_jax.sampling.draw import Truncation


def start_meshes(run: GppoRun) -> tuple[Mesh, Mesh | None]:
    """Set up devices; the training mesh, and that of rollouts where it is another.

    Raises:
        UsageError: the meshes fit the devices neither one by one nor together.
    """
    start_devices(run)
    devices = jax.devices()
    with usage_errors():
        spec = MeshSpec.parse(run.mesh)
        if run.rollout_mesh is None:
            return make_mesh(spec), None
        rollouts = MeshSpec.parse(run.rollout_mesh)
        if -1 not in spec.sizes:
            first = math.prod(spec.sizes)
            if first < len(devices):
                # Halves: the trainer has the first devices and the sampler the others.
                rest = make_mesh(rollouts, devices[first:])
                return make_mesh(spec, devices[:first]), rest
        return make_mesh(spec), make_mesh(rollouts)


def engine_of(
    run: Decoding,
    cfg: ModelConfig,
    mesh: Mesh,
    tokenizer: Tokenizer,
    *,
    length: int,
    prompts: int,
    truncation: Truncation = Truncation(),
) -> EngineConfig:
    """The decode engine of a run on `mesh`.

    Args:
        length: most tokens of a prompt and its completion together.
        prompts: that are sampled at a time.

    Raises:
        UsageError: the mesh does not cut slots, pages or model, or one sequence cannot fit.
    """
    pages = None if run.cache_tokens is None else run.cache_tokens // run.page
    pieces = mesh_lib.axis_size(mesh, "batch", mesh_lib.SAMPLE)
    with usage_errors():
        params_lib.shardings(cfg, mesh)
        engine = EngineConfig(
            slots=run.slots,
            length=length,
            stop_ids=tokenizer.stop_ids,
            page=run.page,
            pages=pages,
            prefill_rows=min(32, prompts),
            narrowest=run.narrowest,
            truncation=truncation,
        )
        engine.check_cut(pieces)
    if engine.slot_pages > engine.pool_pages // pieces:
        raise UsageError(
            f"cache_tokens {run.cache_tokens} gives each of {pieces} groups of devices "
            f"{engine.pool_pages // pieces} pages of {run.page} tokens, and the longest sequence, "
            f"{length} tokens, needs {engine.slot_pages}; raise it, or lower max_tokens"
        )
    return engine
