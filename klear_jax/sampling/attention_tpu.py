# SPDX-License-Identifier: Apache-2.0
"""Attention of one new token a slot over pages on a TPU: JAX's ragged paged attention kernel.

The kernel (`jax.experimental.pallas.ops.tpu.ragged_paged_attention`) walks each slot's list of
pages and stops at its length. It reads a pool [pages, page, 2k, e] of one layer; ours holds all
layers, and layer l's page i is page `l * pages + i` of the flattened pool, so nothing is sliced or
copied.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as library
from jaxtyping import Array, Float, Int

from klear_jax.model.config import ModelConfig
from klear_jax.sampling.cache import Backend, PageMap, Pools

HEAD_DIM = 128
"""The one head width that Mosaic compiles the kernel for: a row of the vector registers."""

BLOCK_TOKENS = 512
"""Tokens in one of the two buffers that the kernel fills in turn; a slot's last block is read whole
(on average half of it for nothing). 4 MiB of a core's memory at 8 KV heads in bfloat16."""

BLOCK_PAGES = 16
"""Most pages in a buffer: each is a copy of its own with its address in a scalar register, and a
core has 32 of these."""

TABLE_BYTES = 960 * 1024
"""Most bytes of the page table: it lies in a core's scalar memory of 1 MiB, with rows padded to 128
numbers."""


def blocks(cfg: ModelConfig, page: int) -> dict:
    """One pool: a token's key and value of each KV head in turn, as the kernel wants them.

    Raises:
        ValueError: a head width that the kernel cannot do.
    """
    if cfg.head_dim != HEAD_DIM:
        raise ValueError(
            f"the TPU's paged attention kernel needs heads of width {HEAD_DIM}, not "
            f'{cfg.head_dim}; set EngineConfig.backend="jax"'
        )
    return {"kv": ((page, 2 * cfg.kv_heads, cfg.head_dim), (None, "kv_heads", None))}


def chunk(page: int) -> int:
    return 1


def as_pages(k: Float[Array, "n p k e"], v: Float[Array, "n p k e"], page: int) -> Pools:
    return (_interleave(k, v).reshape(-1, page, 2 * k.shape[-2], k.shape[-1]),)


def write(pools: Pools, layer, pages, offsets, k, v) -> Pools:
    return (pools[0].at[layer, pages, offsets].set(_interleave(k, v), mode="drop"),)


def _interleave(k: Float[Array, "*n k e"], v: Float[Array, "*n k e"]) -> Float[Array, "*n 2*k e"]:
    """The key of a head, then its value, then those of the next head."""
    return jnp.stack([k, v], axis=-2).reshape(*k.shape[:-2], 2 * k.shape[-2], k.shape[-1])


def decode_kernel(
    q: Float[Array, "s h e"],
    kv_pages: Float[Array, "pages page rows e"],
    kv_lens: Int[Array, " s"],
    page_indices: Int[Array, "s slot_pages"],
    cu_q_lens: Int[Array, " s+1"],
    num_seqs: Int[Array, " 1"],
    *,
    sm_scale: float,
) -> Float[Array, "s h e"]:
    """The library's kernel with the signature of the library's `ragged_paged_attention`, one query
    in a block (the kernel computes a block's queries for each sequence in it, so more would be
    thrown away), and a result that says over which mesh axes it differs, as `shard_map` demands.
    """
    _, h, e = q.shape
    _, page, kv_rows, _ = kv_pages.shape
    group = h // (kv_rows // 2)
    heads, rows = library.get_min_heads_per_blk(h, kv_rows, q.dtype, kv_pages.dtype)
    block = min(max(BLOCK_TOKENS // page, 1), BLOCK_PAGES, page_indices.shape[1])
    queries = pl.BlockSpec((1, heads, e), lambda head, slot, *_: (slot, head, 0))
    sums = pltpu.VMEM((rows // 2, group, 128), jnp.float32)
    scratch = [
        pltpu.VMEM((2, block, page, rows, e), kv_pages.dtype),
        pltpu.SemaphoreType.DMA((2,)),
        sums,
        sums,
        pltpu.VMEM((1, heads, e), jnp.float32),
    ]
    sequence_and_buffer = jnp.zeros(2, jnp.int32)
    scalars = (kv_lens, page_indices, cu_q_lens, sequence_and_buffer, num_seqs)
    call = pl.pallas_call(
        functools.partial(library.ragged_paged_attention_kernel, sm_scale=sm_scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            in_specs=[queries, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=queries,
            grid=(h // heads, q.shape[0]),
            scratch_shapes=scratch,
        ),
        # Each program fetches the first block of the next one.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        out_shape=jax.ShapeDtypeStruct(
            q.shape, q.dtype, manual_axis_type=jax.typeof(q).manual_axis_type
        ),
        name="ragged_paged_attention_kernel",
    )
    return call(*scalars, q, kv_pages)


def attend(
    pools: Pools,
    layer: Int[Array, ""],
    q: Float[Array, "s h e"],
    pages: PageMap,
    lengths: Int[Array, " s"],
    *,
    kernel: Callable[..., Array] = decode_kernel,
) -> Float[Array, "s h e"]:
    """`kernel` has the signature of the library's `ragged_paged_attention`."""
    (pool,) = pools
    _, pool_pages, page, rows, e = pool.shape
    s, slot_pages = pages.table.shape
    _check(s, slot_pages, rows, pool.dtype)
    holds = (pages.table[:, 0] < pool_pages) & (lengths > 0)
    # A slot of length 0 would leave a fetch of the kernel unawaited: it reads one token.
    lengths = jnp.where(holds, jnp.minimum(lengths, slot_pages * page), 1)
    mixed = kernel(
        q,
        pool.reshape(-1, page, rows, e),
        lengths,
        layer * pool_pages + jnp.minimum(pages.table, pool_pages - 1),
        jnp.arange(s + 1, dtype=jnp.int32),
        jnp.full(1, s, jnp.int32),
        sm_scale=e**-0.5,
    )
    return jnp.where(holds[:, None, None], mixed, 0)


def _check(slots: int, slot_pages: int, rows: int, dtype: jnp.dtype) -> None:
    """Refuse what the kernel cannot do on one device.

    Raises:
        ValueError: says what to change.
    """
    table = slots * -(-slot_pages // 128) * 128 * 4
    if table > TABLE_BYTES:
        raise ValueError(
            f"a table of {slots} slots a device with {slot_pages} pages each takes {table} bytes, "
            f"and the TPU's paged attention kernel has room for {TABLE_BYTES}; use fewer slots, "
            'larger pages (EngineConfig.page), or EngineConfig.backend="jax"'
        )
    # As the kernel's own check; it names neither the setting nor the way out.
    words = rows * jnp.dtype(dtype).itemsize // 4
    if not (words in (1, 2, 4) or (words and words % 8 == 0)):
        raise ValueError(
            f"the TPU's paged attention kernel cannot tile {rows // 2} KV heads a device in "
            f"{jnp.dtype(dtype)}; cut the heads into 1, 2, 4 or a multiple of 8 a device with the "
            'mesh, or set EngineConfig.backend="jax"'
        )


TPU = Backend("tpu", blocks, chunk, as_pages, write, attend)
