# SPDX-License-Identifier: Apache-2.0
"""Attention of one new token a slot over pages, in plain JAX: all platforms, and the oracle of the
kernels.

It walks *physical* pages up to the last one in use, `CHUNK_TOKENS` at a time: the pool is read once
and in order, nothing is gathered, and the cost follows the tokens that are there and not the length
a slot could grow to. Each chunk's partial softmax is merged into that of the slot that owns the
page, as in flash attention.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from klear_jax.core import mesh as mesh_lib
from klear_jax.model.config import ModelConfig
from klear_jax.sampling.cache import Backend, PageMap, Pools

CHUNK_TOKENS = 1024
"""Tokens scored at a time: their keys and values should fit into a core's own cache."""

MASKED = -1e30
"""Score of a cell that is not there: finite, so that a slot without any is free of NaN."""


def blocks(cfg: ModelConfig, page: int) -> dict:
    """Keys are kept with the token last and values with the head's width last, as the two products
    read them, so nothing is transposed on the way."""
    k, e = cfg.kv_heads, cfg.head_dim
    axes = ("kv_heads", None, None)
    return {"k": ((k, e, page), axes), "v": ((k, page, e), axes)}


def chunk(page: int) -> int:
    return max(CHUNK_TOKENS // page, 1)


def as_pages(k: Float[Array, "n p k e"], v: Float[Array, "n p k e"], page: int) -> Pools:
    _, _, heads, e = k.shape
    paged_k, paged_v = (x.reshape(-1, page, heads, e) for x in (k, v))
    return paged_k.transpose(0, 2, 3, 1), paged_v.transpose(0, 2, 1, 3)


def write(pools: Pools, layer, pages, offsets, k, v) -> Pools:
    k_pool, v_pool = pools
    k_pool = k_pool.at[layer, pages, :, :, offsets].set(k, mode="drop")
    return k_pool, v_pool.at[layer, pages, :, offsets].set(v, mode="drop")


def attend(
    pools: Pools,
    layer: Int[Array, ""],
    q: Float[Array, "s h e"],
    pages: PageMap,
    lengths: Int[Array, " s"],
) -> Float[Array, "s h e"]:
    k_pool, v_pool = pools
    s, h, e = q.shape
    kv_heads, page = k_pool.shape[2], k_pool.shape[4]
    step = chunk(page)
    queries = q.reshape(s, kv_heads, h // kv_heads, e)
    running = queries.shape[:3]

    def body(number, carry):
        highest, total, mixed = carry
        first = number * step

        def here(array):
            return jax.lax.dynamic_slice_in_dim(array, first, step)

        def cells(pool):
            return jax.lax.dynamic_slice(pool, (layer, first, 0, 0, 0), (1, step, *pool.shape[2:]))[
                0
            ]

        owners, starts = here(pages.owners), here(pages.starts)
        # A free page reads some slot's query; what it gives is masked and then dropped.
        slots = jnp.minimum(owners, s - 1)
        scores = jnp.einsum(
            "pkqe,pkec->pkqc", queries[slots], cells(k_pool), preferred_element_type=jnp.float32
        )
        places = starts[:, None] + jnp.arange(page)
        there = (places < lengths[slots][:, None]) & (owners < s)[:, None]
        seen = there[:, None, None]
        scores = jnp.where(seen, scores * e**-0.5, MASKED)
        peak = highest.at[owners].max(scores.max(axis=-1), mode="drop")
        shrink = jnp.exp(highest - peak)
        weights = jnp.where(seen, jnp.exp(scores - peak[slots][..., None]), 0.0)
        # A weight of 0 does not drop a NaN that an earlier owner of the page left.
        values = jnp.where(there[:, None, :, None], cells(v_pool), 0)
        part = jnp.einsum(
            "pkqc,pkce->pkqe", weights.astype(v_pool.dtype), values,
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        total = (total * shrink).at[owners].add(weights.sum(axis=-1), mode="drop")
        mixed = (mixed * shrink[..., None]).at[owners].add(part, mode="drop")
        return peak, total, mixed

    start = (jnp.full(running, MASKED), jnp.zeros(running), jnp.zeros(queries.shape))
    start = tuple(
        mesh_lib.differs_over(x, "batch", "kv_heads", rules=mesh_lib.SAMPLE) for x in start
    )
    chunks = -(-pages.used[0] // step)
    _, total, mixed = jax.lax.fori_loop(0, chunks, body, start)
    return (mixed / jnp.maximum(total, 1e-30)[..., None]).reshape(s, h, e).astype(q.dtype)


JAX = Backend("jax", blocks, chunk, as_pages, write, attend)
