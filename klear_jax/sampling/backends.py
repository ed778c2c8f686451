# SPDX-License-Identifier: Apache-2.0
"""Which attention over pages runs where."""

from klear_jax.core import mesh as mesh_lib
from klear_jax.model.config import ModelConfig
from klear_jax.sampling.attention import JAX
from klear_jax.sampling.attention_gpu import GPU
from klear_jax.sampling.attention_tpu import TPU
from klear_jax.sampling.cache import Backend

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (JAX, TPU, GPU)}


def choose(name: str | None, cfg: ModelConfig, page: int) -> Backend:
    """The backend of this name; None: the kernel of the platform in use where it can serve the
    model, and plain JAX elsewhere.

    Raises:
        ValueError: the named backend cannot serve the model.
    """
    if name is not None:
        BACKENDS[name].blocks(cfg, page)
        return BACKENDS[name]
    backend = BACKENDS.get(mesh_lib.platform(), JAX)
    try:
        backend.blocks(cfg, page)
    except ValueError:
        # A width that the kernel was not made for, such as that of the tiny model.
        return JAX
    return backend
