# SPDX-License-Identifier: Apache-2.0
"""The paged key/value cache, and attention of one new token a slot over it."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from klear_jax.core import mesh as mesh_lib
from klear_jax.model.config import ModelConfig

PAGES = (None, None, None, "kv_heads", None)
"""Logical axes of a page pool `[l, pages, page, k, e]`."""


@struct.dataclass
class PagedCache:
    """Pools of pages; which pages a slot owns, and in which order, is in a page table.

    A page id equal to the number of pages is no page: writes to it are dropped.
    """

    k: Float[Array, "l pages page k e"]
    v: Float[Array, "l pages page k e"]

    @property
    def pages(self) -> int:
        return self.k.shape[1]

    @property
    def page(self) -> int:
        """Tokens in a page."""
        return self.k.shape[2]


def init_cache(cfg: ModelConfig, *, pages: int, page: int) -> PagedCache:
    """Empty pools in the compute type, KV heads cut over the mesh."""
    shape = (cfg.layers, pages, page, cfg.kv_heads, cfg.head_dim)

    def zeros():
        pool = jnp.zeros(shape, cfg.dtype)
        return mesh_lib.constrain(pool, *PAGES, rules=mesh_lib.SAMPLE)

    return jax.jit(lambda: PagedCache(zeros(), zeros()))()


def write_prompts(
    cache: PagedCache,
    k: Float[Array, "l n p k e"],
    v: Float[Array, "l n p k e"],
    rows: Int[Array, " s"],
    destinations: Int[Array, "s prompt_pages"],
) -> PagedCache:
    """Copy the keys and values of prompt `rows[i]` to the pages `destinations[i]`."""

    def copy(pool, prompt, rows, destinations):
        l, _, p, heads, e = prompt.shape
        page = pool.shape[2]
        chosen = prompt[:, rows].reshape(l, rows.shape[0], p // page, page, heads, e)
        return pool.at[:, destinations].set(chosen, mode="drop")

    run = mesh_lib.sharded(
        copy, inputs=(PAGES, PAGES, (None,), (None, None)), outputs=PAGES, rules=mesh_lib.SAMPLE
    )
    return PagedCache(run(cache.k, k, rows, destinations), run(cache.v, v, rows, destinations))


def attend_and_write(
    cache: PagedCache,
    q: Float[Array, "s one h e"],
    k: Float[Array, "s one k e"],
    v: Float[Array, "s one k e"],
    *,
    layer: Int[Array, ""],
    table: Int[Array, "s slot_pages"],
    positions: Int[Array, " s"],
    live: Bool[Array, " s"],
) -> tuple[Float[Array, "s one h e"], PagedCache]:
    """Store each slot's new key and value at its position, then attend to all up to there.

    A slot that is not live writes nowhere; what it reads is of no use to anybody.
    """
    heads, kv_heads = (None, None, "heads", None), (None, None, "kv_heads", None)
    run = mesh_lib.sharded(
        _attend_and_write,
        inputs=(PAGES, PAGES, heads, kv_heads, kv_heads, (), (None, None), (None,), (None,)),
        outputs=(heads, PAGES, PAGES),
        rules=mesh_lib.SAMPLE,
    )
    mixed, k_pool, v_pool = run(cache.k, cache.v, q, k, v, layer, table, positions, live)
    return mixed, PagedCache(k_pool, v_pool)


def _attend_and_write(k_pool, v_pool, q, k, v, layer, table, positions, live):
    s, _, h, e = q.shape
    pages, page, kv_heads = k_pool.shape[1:4]
    own = jnp.take_along_axis(table, (positions // page)[:, None], axis=1)[:, 0]
    own = jnp.where(live, own, pages)
    offset = positions % page
    k_pool = k_pool.at[layer, own, offset].set(k[:, 0], mode="drop")
    v_pool = v_pool.at[layer, own, offset].set(v[:, 0], mode="drop")

    keys = k_pool[layer, table].reshape(s, -1, kv_heads, e)
    values = v_pool[layer, table].reshape(s, -1, kv_heads, e)
    grouped = q.reshape(s, kv_heads, h // kv_heads, e)
    scores = jnp.einsum("skqe,scke->skqc", grouped, keys, preferred_element_type=jnp.float32)
    seen = jnp.arange(keys.shape[1]) <= positions[:, None]
    scores = jnp.where(seen[:, None, None], scores * e**-0.5, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    mixed = jnp.einsum("skqc,scke->skqe", weights, values)
    return mixed.reshape(s, 1, h, e), k_pool, v_pool
