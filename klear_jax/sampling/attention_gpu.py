# SPDX-License-Identifier: Apache-2.0
"""Attention of one new token a slot over pages on a GPU: a Pallas kernel through Triton.

It follows `jax.experimental.pallas.ops.gpu.paged_attention`, and differs from it where that one
does not fit: it takes the pages of all layers and heads in one pool (layer l's page i is page
`l * pages + i` of the flattened pool, so nothing is sliced or copied), it lets no stale number past
a slot's length into a product (0 * NaN), it keeps a part's result divided by its own sum, and its
results say over which mesh axes they differ, as `shard_map` demands.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from klear_jax.model.config import ModelConfig
from klear_jax.sampling.cache import Backend, PageMap, Pools

BLOCK_BYTES = 32 * 1024
"""Keys scored at a time by one program (as many values follow): two stages of both fit into the
shared memory of every GPU since the A100."""

PART_TOKENS = 4096
"""Tokens of a slot walked by one program. The parts of a long slot run side by side, and each
writes one row a head, so shorter parts cost memory traffic."""

SMALLEST_DOT = 16
"""Triton's products have at least so many rows, columns and terms."""

MASKED = -1e30
"""Score of a cell that is not there: finite, so that a slot without any is free of NaN."""


def blocks(cfg: ModelConfig, page: int) -> dict:
    """A head's tokens lie in a row, so that a page of a head is one piece of memory.

    Raises:
        ValueError: a size that Triton cannot do.
    """
    for name, size in (("EngineConfig.page", page), ("head_dim", cfg.head_dim)):
        if size < SMALLEST_DOT or size & (size - 1):
            raise ValueError(
                f"the GPU's paged attention kernel needs a power of two from {SMALLEST_DOT} on for "
                f'{name}, not {size}; change it or set EngineConfig.backend="jax"'
            )
    page_bytes = page * cfg.head_dim * jnp.dtype(cfg.dtype).itemsize
    if page_bytes > BLOCK_BYTES:
        raise ValueError(
            f"the GPU's paged attention kernel has room for {BLOCK_BYTES} bytes of a head's keys, "
            f"and EngineConfig.page {page} takes {page_bytes}; choose a smaller page or set "
            'EngineConfig.backend="jax"'
        )
    shape, axes = (cfg.kv_heads, page, cfg.head_dim), ("kv_heads", None, None)
    return {"k": (shape, axes), "v": (shape, axes)}


def chunk(page: int) -> int:
    return 1


def as_pages(k: Float[Array, "n p k e"], v: Float[Array, "n p k e"], page: int) -> Pools:
    _, _, heads, e = k.shape
    return tuple(x.reshape(-1, page, heads, e).transpose(0, 2, 1, 3) for x in (k, v))


def write(pools: Pools, layer, pages, offsets, k, v) -> Pools:
    return tuple(
        pool.at[layer, pages, :, offsets].set(x, mode="drop")
        for pool, x in zip(pools, (k, v), strict=True)
    )


def _kernel(q_ref, k_ref, v_ref, table_ref, length_ref, mixed_ref, total_ref, peak_ref, *, step):
    """One part of one slot's tokens for one KV head, `step` pages at a time.

    Reads q [rows, e], the pools [pages, page, e] of the head, the part's pages and the slot's
    length. Writes the part's own softmax [rows, e], the sum of its exponentials and their peak.
    Exponentials are to base 2, for which a GPU has an instruction.
    """
    page, e = k_ref.shape[1:]
    part_pages = table_ref.shape[0]
    first = pl.program_id(2) * part_pages
    length = length_ref[0]
    last = jnp.minimum(pl.cdiv(length, page), first + part_pages)
    q = q_ref[...]
    scale = math.log2(math.e) * e**-0.5

    def body(i, carry):
        peak, total, mixed = carry
        numbers = table_ref[pl.ds(i * step, step)]
        keys = k_ref[numbers].reshape(step * page, e)
        values = v_ref[numbers].reshape(step * page, e)
        seen = (first + i * step) * page + jnp.arange(step * page) < length
        scores = jnp.where(seen[None], plgpu.dot(q, keys.T) * scale, MASKED)
        higher = jnp.maximum(peak, scores.max(axis=1))
        shrink = jnp.exp2(peak - higher)
        weights = jnp.where(seen[None], jnp.exp2(scores - higher[:, None]), 0.0)
        values = jnp.where(seen[:, None], values, 0)
        part = plgpu.dot(weights.astype(values.dtype), values)
        return higher, total * shrink + weights.sum(axis=1), mixed * shrink[:, None] + part

    rows = q.shape[0]
    start = (jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows), jnp.zeros((rows, e)))
    trips = pl.cdiv(jnp.maximum(last - first, 0), step)
    peak, total, mixed = jax.lax.fori_loop(0, trips, body, start)
    mixed_ref[...] = (mixed / jnp.maximum(total, 1e-30)[:, None]).astype(mixed_ref.dtype)
    total_ref[...], peak_ref[...] = total, peak


def attend(
    pools: Pools,
    layer: Int[Array, ""],
    q: Float[Array, "s h e"],
    pages: PageMap,
    lengths: Int[Array, " s"],
    *,
    interpret: bool = False,
) -> Float[Array, "s h e"]:
    """`interpret` runs the kernel as plain JAX, for tests without a GPU."""
    k_pool, v_pool = pools
    s, h, e = q.shape
    _, pool_pages, kv_heads, page, _ = k_pool.shape
    group = h // kv_heads
    rows = max(pl.next_power_of_2(group), SMALLEST_DOT)
    step, part_pages = _cut(pages.table.shape[1], page, e * k_pool.dtype.itemsize)
    table = _in_parts(pages.table, part_pages, pool_pages)
    holds = pages.table[:, 0] < pool_pages
    queries = q.reshape(s, kv_heads, group, e)
    mixed, total, peak = _run_kernel(
        jnp.pad(queries, ((0, 0), (0, 0), (0, rows - group), (0, 0))),
        k_pool.reshape(-1, kv_heads, page, e),
        v_pool.reshape(-1, kv_heads, page, e),
        layer * pool_pages + table,
        jnp.where(holds, lengths, 0)[:, None],
        step=step,
        interpret=interpret,
    )
    merged = _merge(mixed[..., :group, :], total[..., :group], peak[..., :group])
    return merged.reshape(s, h, e).astype(q.dtype)


def _cut(slot_pages: int, page: int, token_bytes: int) -> tuple[int, int]:
    """Pages scored at a time, and pages walked by one program: a multiple of that."""
    part_pages = min(max(PART_TOKENS // page, 1), pl.next_power_of_2(slot_pages))
    return min(max(BLOCK_BYTES // (page * token_bytes), 1), part_pages), part_pages


def _in_parts(
    table: Int[Array | np.ndarray, "s slot_pages"], part_pages: int, pool_pages: int
) -> Int[Array, "s parts part_pages"]:
    """The table cut into equal parts, with a page that exists where a slot has none."""
    s, slot_pages = table.shape
    filled = jnp.pad(table, ((0, 0), (0, -slot_pages % part_pages)))
    return jnp.minimum(filled, pool_pages - 1).reshape(s, -1, part_pages)


def _run_kernel(
    q: Float[Array, "s k rows e"],
    k_pages: Float[Array, "pages k page e"],
    v_pages: Float[Array, "pages k page e"],
    table: Int[Array | np.ndarray, "s parts part_pages"],
    lengths: Int[Array, "s 1"],
    *,
    step: int,
    interpret: bool,
) -> tuple[Array, Array, Array]:
    """Mixed values [parts, s, k, rows, e], sums and peaks [parts, s, k, rows] of each part."""
    s, kv_heads, rows, e = q.shape
    parts, part_pages = table.shape[1:]
    pool = pl.BlockSpec((k_pages.shape[0], None, *k_pages.shape[2:]), lambda s, k, p: (0, k, 0, 0))
    sums = pl.BlockSpec((None, None, None, rows), lambda s, k, p: (p, s, k, 0))
    differs = jax.typeof(q).manual_axis_type

    def out(dtype, *last):
        shape = (parts, s, kv_heads, rows, *last)
        return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=differs)

    call = pl.pallas_call(
        functools.partial(_kernel, step=step),
        grid=(s, kv_heads, parts),
        in_specs=[
            pl.BlockSpec((None, None, rows, e), lambda s, k, p: (s, k, 0, 0)),
            pool,
            pool,
            pl.BlockSpec((None, None, part_pages), lambda s, k, p: (s, p, 0)),
            pl.BlockSpec((None, 1), lambda s, k, p: (s, 0)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, rows, e), lambda s, k, p: (p, s, k, 0, 0)),
            sums,
            sums,
        ],
        out_shape=[out(q.dtype, e), out(jnp.float32), out(jnp.float32)],
        # As the library's kernel.
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=2),
        interpret=interpret,
        name="paged_decode_attention",
    )
    return call(q, k_pages, v_pages, table, lengths)


def _merge(
    mixed: Float[Array, "parts s k q e"],
    total: Float[Array, "parts s k q"],
    peak: Float[Array, "parts s k q"],
) -> Float[Array, "s k q e"]:
    """The softmax over all parts; 0 for a slot without a token."""
    share = total * jnp.exp2(peak - peak.max(axis=0))
    share = share / jnp.maximum(share.sum(axis=0), 1e-30)
    return jnp.einsum("pskq,pskqe->skqe", share, mixed.astype(jnp.float32))


GPU = Backend("gpu", blocks, chunk, as_pages, write, attend)
