# SPDX-License-Identifier: Apache-2.0
"""The paged key/value cache: pools of pages on the devices, and which slot owns which page.

Slots and pages are cut over the same devices, so a slot's pages lie beside it and attention needs
no collective. Page and slot numbers in a `PageMap` count from 0 on each piece.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from klear_jax.core import mesh as mesh_lib
from klear_jax.model.config import ModelConfig

SAMPLE = mesh_lib.SAMPLE
Pools = tuple[Array, ...]
"""Arrays [layers, pages, *block]: what a block holds is up to the backend."""


@dataclasses.dataclass(frozen=True)
class Backend:
    """How one platform lays pages out, and its attention over them.

    `write` and `attend` work on one piece of slots and pages; they are called inside `shard_map`.
    """

    name: str
    blocks: Callable[[ModelConfig, int], dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]]
    """(config, tokens in a page) -> shape and logical axes of a page's block in each pool."""
    chunk: Callable[[int], int]
    """Tokens in a page -> what the pages of a piece must be a multiple of."""
    as_pages: Callable[[Array, Array, int], Pools]
    """Keys and values [n, p, k, e] of rows of whole pages -> blocks [n * p / page, *block]."""
    write: Callable[[Pools, Array, Array, Array, Array, Array], Pools]
    """(pools, layer, page of each slot, offset in it, k [s, k, e], v) -> pools. A page number past
    the end writes nowhere."""
    attend: Callable[[Pools, Array, Array, "PageMap", Array], Array]
    """(pools, layer, q [s, h, e], map, lengths [s]) -> mixed values [s, h, e]. What a slot without
    a page gives is of no use to anybody, and finite."""


@struct.dataclass
class PageMap:
    """Who owns which page; made on the host before each dispatch."""

    table: Int[Array | np.ndarray, "s slot_pages"]
    """Page numbers of a slot in order; one past the last page means none."""
    owners: Int[Array | np.ndarray, " pages"]
    """Slot of each page; one past the last slot means free."""
    starts: Int[Array | np.ndarray, " pages"]
    """Position of the first token of each page."""
    used: Int[Array | np.ndarray, " pieces"]
    """On each piece, all pages from this number on are free."""


MAP_AXES = (("batch", None), ("batch",), ("batch",), ("batch",))
"""Logical axes of the fields of a `PageMap`, in their order."""


def pool_axes(cfg: ModelConfig, page: int, backend: Backend) -> tuple[tuple[str | None, ...], ...]:
    """Logical axes of each pool: pages are cut as slots are."""
    return tuple((None, "batch", *axes) for _, axes in backend.blocks(cfg, page).values())


def init_pools(cfg: ModelConfig, *, pages: int, page: int, backend: Backend) -> Pools:
    """Empty pools in the compute type."""
    return tuple(
        mesh_lib.constrain(
            jnp.zeros((cfg.layers, pages, *shape), cfg.dtype), None, "batch", *axes, rules=SAMPLE
        )
        for shape, axes in backend.blocks(cfg, page).values()
    )


def attend_and_write(
    pools: Pools,
    q: Float[Array, "s one h e"],
    k: Float[Array, "s one k e"],
    v: Float[Array, "s one k e"],
    *,
    layer: Int[Array, ""],
    pages: PageMap,
    positions: Int[Array, " s"],
    live: Array,
    cfg: ModelConfig,
    page: int,
    backend: Backend,
) -> tuple[Float[Array, "s one h e"], Pools]:
    """Store each slot's new key and value at its position, then attend to all up to there.

    A slot that is not live writes nowhere.
    """

    def body(q, k, v, layer, positions, live, *rest):
        pages, pools = PageMap(*rest[: len(MAP_AXES)]), rest[len(MAP_AXES) :]
        own = jnp.take_along_axis(pages.table, (positions // page)[:, None], axis=1)[:, 0]
        own = jnp.where(live, own, pages.owners.shape[0])
        pools = backend.write(pools, layer, own, positions % page, k[:, 0], v[:, 0])
        mixed = backend.attend(pools, layer, q[:, 0], pages, positions + 1)
        return (mixed[:, None], *pools)

    heads, kv_heads = ("batch", None, "heads", None), ("batch", None, "kv_heads", None)
    axes = pool_axes(cfg, page, backend)
    run = mesh_lib.sharded(
        body,
        inputs=(heads, kv_heads, kv_heads, (), ("batch",), ("batch",), *MAP_AXES, *axes),
        outputs=(heads, *axes),
        rules=SAMPLE,
    )
    fields = (pages.table, pages.owners, pages.starts, pages.used)
    mixed, *pools_out = run(q, k, v, layer, positions, live, *fields, *pools)
    return mixed, tuple(pools_out)


def copy_pages(
    pools: Pools,
    prefix: Pools,
    sources: Int[Array | np.ndarray, "pieces most"],
    destinations: Int[Array | np.ndarray, "pieces most"],
    counts: Int[Array | np.ndarray, " pieces"],
    *,
    axes: tuple[tuple[str | None, ...], ...],
) -> Pools:
    """Copy page `sources[piece, i]` of a prefix to page `destinations[piece, i]` of that piece, for
    the first `counts[piece]` entries: the work is that of the pages copied."""

    def body(sources, destinations, counts, *both):
        pools, prefix = both[: len(axes)], both[len(axes) :]

        def copy(i, pools):
            places = (sources[0, i], destinations[0, i])
            return tuple(_copy(*pair, *places) for pair in zip(pools, prefix, strict=True))

        return jax.lax.fori_loop(0, counts[0], copy, pools)

    whole = tuple((None, None, *a[2:]) for a in axes)
    lists = ("batch", None)
    run = mesh_lib.sharded(
        body, inputs=(lists, lists, ("batch",), *axes, *whole), outputs=axes, rules=SAMPLE
    )
    return run(sources, destinations, counts, *pools, *prefix)


def move_pages(
    pools: Pools,
    sources: Int[Array | np.ndarray, "pieces most"],
    destinations: Int[Array | np.ndarray, "pieces most"],
    counts: Int[Array | np.ndarray, " pieces"],
    *,
    axes: tuple[tuple[str | None, ...], ...],
) -> Pools:
    """`copy_pages` inside the pools; no destination may be the source of a later entry."""

    def body(sources, destinations, counts, *pools):
        def copy(i, pools):
            return tuple(_copy(pool, pool, sources[0, i], destinations[0, i]) for pool in pools)

        return jax.lax.fori_loop(0, counts[0], copy, pools)

    lists = ("batch", None)
    run = mesh_lib.sharded(
        body, inputs=(lists, lists, ("batch",), *axes), outputs=axes, rules=SAMPLE
    )
    return run(sources, destinations, counts, *pools)


def _copy(pool: Array, source: Array, from_page: Array, to_page: Array) -> Array:
    """`pool` with one page of all layers taken from `source`."""
    taken = jax.lax.dynamic_slice_in_dim(source, from_page, 1, axis=1)
    return jax.lax.dynamic_update_slice_in_dim(pool, taken, to_page, axis=1)
