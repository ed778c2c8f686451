# SPDX-License-Identifier: Apache-2.0
"""The layers of Qwen3 as pure functions that know no config object."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from klear_jax.core import mesh as mesh_lib

QUERY_BLOCK = 512
"""Queries scored at a time: longer rows are walked in blocks, so no [t, t] array is made."""


def rms_norm(x: Float[Array, "... d"], scale: Float[Array, " d"], *, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * scale.  Numerics: float32 inside, as in the released weights."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * inverse).astype(x.dtype) * scale.astype(x.dtype)


def rope_angles(positions: Int[Array, "b t"], *, head_dim: int, theta: float) -> Array:
    """Rotation angle of each position and pair, `position * theta^(-2i / head_dim)`, radians."""
    # float32: in bfloat16 the positions 256 and 257 are the same number.
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    return positions[..., None].astype(jnp.float32) * frequencies


def rope(x: Float[Array, "b t h e"], angles: Float[Array, "b t half"]) -> Array:
    """Rotate the pairs (x[i], x[i + e/2]) of every head ("rotate half")."""
    cos = jnp.cos(angles)[..., None, :]
    sin = jnp.sin(angles)[..., None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def attend(
    q: Float[Array, "b t h e"],
    k: Float[Array, "b u k e"],
    v: Float[Array, "b u k e"],
    q_positions: Int[Array, "b t"],
    q_segments: Int[Array, "b t"],
    k_positions: Int[Array, "b u"],
    k_segments: Int[Array, "b u"],
) -> Float[Array, "b t h e"]:
    """Causal attention inside each segment, on one device's piece of batch, queries and heads.

    A query sees the keys of its own segment whose position is not larger. Query heads share KV
    heads in consecutive groups. Scores are kept for `QUERY_BLOCK` queries at a time and made again
    in the backward pass.
    """
    b, t, h, e = q.shape
    grouped = q.reshape(b, t, k.shape[2], h // k.shape[2], e)

    def block(queries, positions, segments):
        scores = jnp.einsum("btkqe,bske->bkqts", queries, k, preferred_element_type=jnp.float32)
        visible = (segments[:, :, None] == k_segments[:, None, :]) & (
            positions[:, :, None] >= k_positions[:, None, :]
        )
        # float32 softmax; a finite low value keeps a row without any visible key free of NaN.
        scores = jnp.where(visible[:, None, None], scores * e**-0.5, -1e30)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return jnp.einsum("bkqts,bske->btkqe", weights, v)

    parts = (grouped, q_positions, q_segments)
    whole = t // QUERY_BLOCK * QUERY_BLOCK
    if t <= QUERY_BLOCK:
        return block(*parts).reshape(b, t, h, e)

    def blocks(x):
        return jnp.moveaxis(x[:, :whole].reshape(b, -1, QUERY_BLOCK, *x.shape[2:]), 1, 0)

    one = jax.checkpoint(block)
    out = jax.lax.map(lambda x: one(*x), tuple(blocks(x) for x in parts))
    out = jnp.moveaxis(out, 0, 1).reshape(b, whole, h, e)
    if whole == t:
        return out
    rest = one(*(x[:, whole:] for x in parts)).reshape(b, t - whole, h, e)
    return jnp.concatenate([out, rest], axis=1)


def packed_attention(
    q: Float[Array, "b t h e"],
    k: Float[Array, "b t k e"],
    v: Float[Array, "b t k e"],
    positions: Int[Array, "b t"],
    segments: Int[Array, "b t"],
    rules: mesh_lib.Rules = mesh_lib.TRAIN,
) -> Float[Array, "b t h e"]:
    """`attend` over packed rows on the whole mesh: queries may be cut along the row, keys are
    not."""
    query, key = ("batch", "seq", "heads", None), ("batch", None, "kv_heads", None)
    run = mesh_lib.sharded(
        attend,
        inputs=(query, key, key, query[:2], query[:2], key[:2], key[:2]),
        outputs=query,
        rules=rules,
    )
    return run(q, k, v, positions, segments, positions, segments)
