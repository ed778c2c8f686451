# SPDX-License-Identifier: Apache-2.0
"""The paged key/value cache, and attention of one new token a slot over it."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from klear_jax.core import mesh as mesh_lib
from klear_jax.model.config import ModelConfig

PAGES = (None, None, "kv_heads", None, None)
"""Logical axes of a page pool, whose page has one block for each KV head."""


@struct.dataclass
class PagedCache:
    """Pools of pages; which pages a slot owns, and in which order, is in a page table.

    A page id equal to the number of pages is no page: writes to it are dropped. Both pools are laid
    out as the two products of attention read them, so nothing is transposed on the way.
    """

    k: Float[Array, "l pages k e page"]
    v: Float[Array, "l pages k page e"]

    @property
    def pages(self) -> int:
        return self.k.shape[1]

    @property
    def page(self) -> int:
        """Tokens in a page."""
        return self.k.shape[-1]


def init_cache(cfg: ModelConfig, *, pages: int, page: int) -> PagedCache:
    """Empty pools in the compute type, KV heads cut over the mesh."""
    block = (cfg.layers, pages, cfg.kv_heads)

    def zeros(*sizes):
        pool = jnp.zeros((*block, *sizes), cfg.dtype)
        return mesh_lib.constrain(pool, *PAGES, rules=mesh_lib.SAMPLE)

    return PagedCache(zeros(cfg.head_dim, page), zeros(page, cfg.head_dim))


def write_prompts(
    cache: PagedCache,
    k: Float[Array, "l n p k e"],
    v: Float[Array, "l n p k e"],
    rows: Int[Array, " s"],
    destinations: Int[Array, "s prompt_pages"],
) -> PagedCache:
    """Copy the keys and values of prompt `rows[i]` to the pages `destinations[i]`."""

    def copy(k_pool, v_pool, k, v, rows, destinations):
        l, _, p, heads, e = k.shape
        page = v_pool.shape[3]

        def blocks(prompt):
            return prompt[:, rows].reshape(l, rows.shape[0], p // page, page, heads, e)

        k_blocks = blocks(k).transpose(0, 1, 2, 4, 5, 3)
        v_blocks = blocks(v).transpose(0, 1, 2, 4, 3, 5)
        return (
            k_pool.at[:, destinations].set(k_blocks, mode="drop"),
            v_pool.at[:, destinations].set(v_blocks, mode="drop"),
        )

    prompt = (None, None, None, "kv_heads", None)
    run = mesh_lib.sharded(
        copy,
        inputs=(PAGES, PAGES, prompt, prompt, (None,), (None, None)),
        outputs=(PAGES, PAGES),
        rules=mesh_lib.SAMPLE,
    )
    return PagedCache(*run(cache.k, cache.v, k, v, rows, destinations))


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
    pages, kv_heads, page = k_pool.shape[1], k_pool.shape[2], k_pool.shape[4]
    own = jnp.take_along_axis(table, (positions // page)[:, None], axis=1)[:, 0]
    own = jnp.where(live, own, pages)
    offset = positions % page
    k_pool = k_pool.at[layer, own, :, :, offset].set(k[:, 0], mode="drop")
    v_pool = v_pool.at[layer, own, :, offset].set(v[:, 0], mode="drop")

    keys, values = k_pool[layer, table], v_pool[layer, table]
    grouped = q.reshape(s, kv_heads, h // kv_heads, e)
    # One product for each page and head: queries are repeated so that pages stay where they are.
    paged = jnp.broadcast_to(grouped[:, None], (s, table.shape[1], *grouped.shape[1:]))
    scores = jnp.einsum("spkqe,spkec->spkqc", paged, keys, preferred_element_type=jnp.float32)
    cells = jnp.arange(table.shape[1] * page).reshape(-1, page)
    seen = cells <= positions[:, None, None]
    scores = jnp.where(seen[:, :, None, None], scores * e**-0.5, -1e30)
    weights = jax.nn.softmax(scores, axis=(1, 4)).astype(values.dtype)
    mixed = jnp.einsum("spkqc,spkce->spkqe", weights, values).sum(axis=1)
    return mixed.reshape(s, 1, h, e), k_pool, v_pool
