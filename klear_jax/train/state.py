# SPDX-License-Identifier: Apache-2.0
"""What an optimizer step reads and writes."""

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Int

from klear_jax.core import mesh as mesh_lib
from klear_jax.model import params as params_lib
from klear_jax.model.config import ModelConfig
from klear_jax.model.params import Params


@struct.dataclass
class TrainState:
    """Arrays only; the optimizer itself is closed over by the step."""

    params: Params
    """float32 masters."""
    opt_state: optax.OptState
    updates: Int[Array, ""]
    """Optimizer updates applied."""
    skipped: Int[Array, ""]
    """Updates left out because the loss or the gradient was not finite."""


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """A fresh state around `params`; moments are laid out as the parameters are."""
    return _fresh(params, jax.jit(optimizer.init)(params))


def _fresh(params: Params, opt_state: optax.OptState) -> TrainState:
    zero = jnp.zeros((), jnp.int32)
    return TrainState(params=params, opt_state=opt_state, updates=zero, skipped=zero + 0)


def abstract_state(
    cfg: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh | None
) -> TrainState:
    """Shapes, types and shardings of a state of this model on this mesh; nothing is allocated."""
    params = params_lib.abstract(cfg, mesh)
    state = jax.eval_shape(lambda p: _fresh(p, optimizer.init(p)), params)
    if mesh is None:
        return state
    whole = mesh_lib.sharding(mesh)
    layout = params_lib.shardings(cfg, mesh)

    def with_sharding(leaf, sharding):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def moments(leaf):
        # A moment tree has the structure of Params; every other leaf is a scalar.
        if isinstance(leaf, Params):
            return jax.tree.map(with_sharding, leaf, layout)
        return with_sharding(leaf, whole)

    return jax.tree.map(moments, state, is_leaf=lambda x: isinstance(x, Params))
