# SPDX-License-Identifier: Apache-2.0
"""The parameter pytree: each weight with its shape, logical axes and initializer in one place.

Every leaf of `Blocks` is stacked on a leading layer axis, which `qwen3.forward` scans over. The
same tree serves trainer, sampler and checkpoint.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float

from klear_jax.core import mesh as mesh_lib
from klear_jax.model.config import ModelConfig


def _weight(axes: str, init: Literal["normal", "ones"] = "normal") -> Any:
    """A leaf with these logical axes (see `core.mesh.Rules`) and initializer."""
    return struct.field(metadata={"axes": tuple(axes.split()), "init": init})


def _group() -> Any:
    """A part of the tree that has leaves of its own."""
    return struct.field()


@struct.dataclass
class Attention:
    wq: Float[Array, "l d h e"] = _weight("layers embed heads head_dim")
    wk: Float[Array, "l d k e"] = _weight("layers embed kv_heads head_dim")
    wv: Float[Array, "l d k e"] = _weight("layers embed kv_heads head_dim")
    wo: Float[Array, "l h e d"] = _weight("layers heads head_dim embed")
    q_norm: Float[Array, "l e"] = _weight("layers head_dim", "ones")
    k_norm: Float[Array, "l e"] = _weight("layers head_dim", "ones")


@struct.dataclass
class Mlp:
    gate: Float[Array, "l d f"] = _weight("layers embed ffn")
    up: Float[Array, "l d f"] = _weight("layers embed ffn")
    down: Float[Array, "l f d"] = _weight("layers ffn embed")


@struct.dataclass
class Blocks:
    attn_norm: Float[Array, "l d"] = _weight("layers width", "ones")
    attn: Attention = _group()
    mlp_norm: Float[Array, "l d"] = _weight("layers width", "ones")
    mlp: Mlp = _group()


@struct.dataclass
class Params:
    embed: Float[Array, "v d"] = _weight("vocab embed")
    blocks: Blocks = _group()
    final_norm: Float[Array, " d"] = _weight("width", "ones")
    unembed: Float[Array, "d v"] | None = _weight("embed vocab")
    """None where the output matrix is the embedding table."""


@dataclasses.dataclass(frozen=True)
class WeightInfo:
    """Shape, logical axes and initializer of one leaf (itself a leaf of the tree of `describe`)."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Literal["normal", "ones"]


def describe(cfg: ModelConfig) -> Params:
    """A `Params` tree whose leaves are `WeightInfo`."""
    sizes = cfg.axis_sizes | {"width": cfg.d_model}

    def build(cls):
        leaves = {}
        for field in dataclasses.fields(cls):
            if "axes" not in field.metadata:
                leaves[field.name] = build(field.type)
            elif field.name == "unembed" and cfg.tied:
                leaves[field.name] = None
            else:
                axes = field.metadata["axes"]
                shape = tuple(sizes[axis] for axis in axes)
                leaves[field.name] = WeightInfo(shape, axes, field.metadata["init"])
        return cls(**leaves)

    return build(Params)


def shardings(cfg: ModelConfig, mesh: Mesh, rules: mesh_lib.Rules = mesh_lib.TRAIN) -> Params:
    """A `Params` tree of `NamedSharding`.

    Raises:
        ValueError: the mesh does not divide a width of the model.
    """
    mesh_lib.check_divides(mesh, cfg.axis_sizes_cut, rules)
    return jax.tree.map(lambda w: mesh_lib.sharding(mesh, *w.axes, rules=rules), describe(cfg))


def abstract(cfg: ModelConfig, mesh: Mesh | None = None, dtype: Any = jnp.float32) -> Params:
    """A `Params` tree of `ShapeDtypeStruct`, with shardings where a mesh is given."""
    shapes = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, dtype), describe(cfg))
    if mesh is None:
        return shapes
    return jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
        shapes, shardings(cfg, mesh),
    )  # fmt: skip


def init(cfg: ModelConfig, seed: int, mesh: Mesh | None = None) -> Params:
    """Draw float32 parameters: normal with standard deviation `cfg.init_range`, norms one.

    The values depend on `seed` and the config alone, not on the mesh. The matrices that write into
    the residual stream are scaled down by sqrt(2 * layers), as in GPT-2, so that depth does not
    grow the stream.
    """
    infos, tree = jax.tree.flatten(describe(cfg))
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(describe(cfg))]
    targets = jax.tree.leaves(shardings(cfg, mesh)) if mesh is not None else [None] * len(infos)

    leaves = []
    for number, (info, path, target) in enumerate(zip(infos, paths, targets, strict=True)):
        residual = path.endswith(("wo", "down"))
        scale = cfg.init_range / ((2 * cfg.layers) ** 0.5 if residual else 1.0)
        key = jax.random.fold_in(jax.random.key(seed), number)
        leaves.append(_drawer(info, target)(key, scale))
    return jax.tree.unflatten(tree, leaves)


@functools.cache
def _drawer(info: WeightInfo, sharding: Any) -> Callable[[jax.Array, float], jax.Array]:
    """The compiled draw of one leaf; leaves of one shape and layout share it."""

    def draw(key, scale):
        if info.init == "ones":
            return jnp.ones(info.shape, jnp.float32, device=sharding)
        return scale * jax.random.normal(key, info.shape, jnp.float32, out_sharding=sharding)

    return jax.jit(draw, out_shardings=sharding)
