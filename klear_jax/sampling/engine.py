# SPDX-License-Identifier: Apache-2.0
"""The sampler's three verbs on the device, after JetStream: prefill, insert, generate.

All three are pure functions of a state that is passed in and out. `prefill` runs packed prompts
once, all but their last tokens; `insert` copies their pages into any number of slots; `generate`
decodes many steps in one dispatch, every slot at its own position, and stops a slot on the device.
The first decode step of a slot eats the last prompt token, so there is one place where tokens are
drawn.

The random key of a token is `fold_in(fold_in(key(seed), sample_id), position)`: a completion
depends on these and on the weights, not on its slot, its neighbours or the order of arrival.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from klear_jax.core import mesh as mesh_lib
from klear_jax.core.compiled import platform_jit
from klear_jax.model import layers, qwen3
from klear_jax.model.config import ModelConfig
from klear_jax.model.params import Params
from klear_jax.sampling import cache as cache_lib
from klear_jax.sampling.backends import BACKENDS
from klear_jax.sampling.cache import Backend, PageMap, Pools
from klear_jax.sampling.config import EngineConfig
from klear_jax.sampling.draw import draw

SAMPLE = mesh_lib.SAMPLE

LARGE_TABLE = 2**23
"""Entries of an output matrix that a CPU's caches do not hold."""

FEW_ROWS = 2
"""Up to here such a matrix is better read once for each row."""


@struct.dataclass
class DecodeState:
    """Everything `generate` carries; one entry of each vector for a slot."""

    pools: Pools
    tokens: Int[Array, " s"]
    """The token to be fed next (drawn last, or the last of the prompt)."""
    positions: Int[Array, " s"]
    """Its position, which is also the number of tokens in the cache."""
    budgets: Int[Array, " s"]
    """Tokens that may still be drawn."""
    sample_ids: UInt32[Array, " s"]
    temperatures: Float[Array, " s"]
    live: Bool[Array, " s"]
    seen: Bool[Array, "s v"] | None
    """Tokens that a slot already has; kept for a repetition penalty only."""


@struct.dataclass
class Insertion:
    """New sequences for free slots, and which pages of one prefix they need. Made on the host."""

    fresh: Bool[np.ndarray, " s"]
    """Slots that are filled; the entries of all others are ignored."""
    tokens: Int[np.ndarray, " s"]
    """Last token of the prompt."""
    positions: Int[np.ndarray, " s"]
    """Tokens of the prompt less one."""
    budgets: Int[np.ndarray, " s"]
    sample_ids: UInt32[np.ndarray, " s"]
    temperatures: Float[np.ndarray, " s"]
    seen: Bool[np.ndarray, "s v"] | None
    copies: "Copies"


@struct.dataclass
class Copies:
    """Pages to be copied on each piece: the first `counts` entries of a row."""

    sources: Int[np.ndarray, "pieces most"]
    destinations: Int[np.ndarray, "pieces most"]
    counts: Int[np.ndarray, " pieces"]


@struct.dataclass
class Emitted:
    """What one dispatch drew: row i holds step i; -1 where a slot drew nothing."""

    tokens: Int[Array | np.ndarray, "steps s"]
    logprobs: Float[Array | np.ndarray, "steps s"]
    drawn_logprobs: Float[Array | np.ndarray, "steps s"] | None
    live: Bool[Array | np.ndarray, " s"]
    """Slots that are still going."""
    steps: Int[Array, ""]
    """Steps that were run."""


def backend_of(engine: EngineConfig) -> Backend:
    return BACKENDS[engine.backend or "jax"]


def pages_of_piece(engine: EngineConfig, pieces: int) -> int:
    """Pages of one piece: those asked for, rounded up to what the backend walks at a time."""
    chunk = backend_of(engine).chunk(engine.page)
    return -(-engine.pool_pages // pieces // chunk) * chunk


@functools.partial(jax.jit, static_argnames=("cfg", "engine"))
def init_state(cfg: ModelConfig, engine: EngineConfig) -> DecodeState:
    """A state whose slots are all free."""
    s, pieces = engine.slots, mesh_lib.pieces_of("batch", SAMPLE)
    pages = pieces * pages_of_piece(engine, pieces)
    penal = engine.repetition_penalty != 1

    def vector(fill, dtype):
        return mesh_lib.constrain(jnp.full(s, fill, dtype), "batch", rules=SAMPLE)

    return DecodeState(
        pools=cache_lib.init_pools(cfg, pages=pages, page=engine.page, backend=backend_of(engine)),
        tokens=vector(0, jnp.int32),
        positions=vector(0, jnp.int32),
        budgets=vector(0, jnp.int32),
        sample_ids=vector(0, jnp.uint32),
        temperatures=vector(1, jnp.float32),
        live=vector(False, bool),
        seen=_cut(jnp.zeros((s, cfg.vocab), bool), "vocab") if penal else None,
    )


def _cut(x: Array, *axes: str | None) -> Array:
    """An array of slots, cut as slots are."""
    return mesh_lib.constrain(x, "batch", *axes, rules=SAMPLE)


@platform_jit(static_argnames=("cfg", "engine"))
def prefill(
    params: Params,
    tokens: Int[Array, "n p"],
    positions: Int[Array, "n p"],
    segments: Int[Array, "n p"],
    *,
    cfg: ModelConfig,
    engine: EngineConfig,
) -> Pools:
    """Run packed rows of whole pages; their keys and values as pages [layers, pages, *block]."""

    backend = backend_of(engine)
    # A prompt goes to slots on any piece, so every piece gets all pages.
    whole = (None, None, "kv_heads", None)
    axes = tuple((None, *a[2:]) for a in cache_lib.pool_axes(cfg, engine.page, backend))
    as_pages = mesh_lib.sharded(
        lambda k, v: backend.as_pages(k, v, engine.page),
        inputs=(whole, whole), outputs=axes, rules=SAMPLE,
    )  # fmt: skip

    def keep(hidden, k, v):
        return as_pages(k, v)

    rows = (_cut(x, None) for x in (tokens, positions, segments))
    return qwen3.run_blocks(params, *rows, cfg=cfg, keep=keep, rules=SAMPLE)[1]


@platform_jit(static_argnames=("cfg", "engine"), donate_argnames="state")
def insert(
    state: DecodeState, prefix: Pools, new: Insertion, *, cfg: ModelConfig, engine: EngineConfig
) -> DecodeState:
    """Start a completion of a prefilled prompt in each of the given slots."""
    axes = cache_lib.pool_axes(cfg, engine.page, backend_of(engine))
    copies = new.copies
    pools = cache_lib.copy_pages(
        state.pools, prefix, copies.sources, copies.destinations, copies.counts, axes=axes
    )
    fresh = _cut(jnp.asarray(new.fresh))

    def put(name):
        return jnp.where(fresh, _cut(jnp.asarray(getattr(new, name))), getattr(state, name))

    names = ("tokens", "positions", "budgets", "sample_ids", "temperatures")
    seen = state.seen
    if seen is not None:
        seen = jnp.where(fresh[:, None], _cut(jnp.asarray(new.seen), "vocab"), seen)
    return dataclasses.replace(
        state, pools=pools, live=state.live | fresh, seen=seen, **{n: put(n) for n in names}
    )


@platform_jit(static_argnames=("cfg", "engine"), donate_argnames="state")
def move_pages(
    state: DecodeState, copies: Copies, *, cfg: ModelConfig, engine: EngineConfig
) -> DecodeState:
    """Move pages inside the pools (to pages that are free), to close holes."""
    axes = cache_lib.pool_axes(cfg, engine.page, backend_of(engine))
    pools = cache_lib.move_pages(
        state.pools, copies.sources, copies.destinations, copies.counts, axes=axes
    )
    return dataclasses.replace(state, pools=pools)


@functools.partial(jax.jit, donate_argnames="state")
def halt(state: DecodeState, slots: Bool[np.ndarray, " s"]) -> DecodeState:
    """Stop these slots."""
    return dataclasses.replace(state, live=state.live & ~_cut(jnp.asarray(slots)))


def narrow(state: DecodeState, slots: Int[np.ndarray, "pieces w"]) -> DecodeState:
    """Only these slots, numbered on each piece, in this order; the pages stay as they are."""
    names = [f.name for f in dataclasses.fields(state) if f.name != "pools"]
    vectors = {name: getattr(state, name) for name in names}
    vectors = {name: x for name, x in vectors.items() if x is not None}
    return dataclasses.replace(state, **_pick(vectors, slots))


@jax.jit
def _pick(vectors: dict[str, Array], slots: Int[Array, "pieces w"]) -> dict[str, Array]:
    def one(x):
        axes = ("batch", *(["vocab"] if x.ndim == 2 else []))
        run = mesh_lib.sharded(
            lambda x, slots: x[slots[0]], inputs=(axes, ("batch", None)), outputs=axes, rules=SAMPLE
        )
        return run(x, slots)

    return {name: one(x) for name, x in vectors.items()}


@platform_jit(static_argnames=("cfg", "engine"), donate_argnames="state")
def generate(
    params: Params,
    state: DecodeState,
    pages: PageMap,
    seed: Int[Array, ""],
    refill: Int[Array, ""],
    *,
    cfg: ModelConfig,
    engine: EngineConfig,
) -> tuple[DecodeState, Emitted]:
    """Decode up to `engine.steps` steps; fewer when all slots are done or `refill` became free.

    Every live slot must have pages for as many more tokens.
    """
    stop_ids = jnp.asarray(engine.stop_ids or (-1,), jnp.int32)
    key = jax.random.key(seed)
    # As it is stored: a transposed table would be written out anew in each dispatch.
    if params.unembed is None:
        head = mesh_lib.constrain(params.embed.astype(cfg.dtype), "vocab", None)
    else:
        head = mesh_lib.constrain(params.unembed.astype(cfg.dtype), None, "vocab")
    pages = jax.tree.map(jnp.asarray, pages)
    started = state.live.sum()
    shape = (engine.steps, state.tokens.shape[0])

    def unfinished(carry):
        number, state, _ = carry
        free = started - state.live.sum()
        return (number < engine.steps) & state.live.any() & (free < refill)

    def step(carry):
        number, state, emitted = carry
        logits, pools = decode_step(params, head, state, pages, cfg=cfg, engine=engine)
        keys = jax.vmap(lambda i, p: jax.random.fold_in(jax.random.fold_in(key, i), p))(
            state.sample_ids, state.positions + 1
        )
        drawn = draw(
            logits, keys, state.temperatures, live_vocab=cfg.live_vocab,
            truncation=engine.truncation, repetition_penalty=engine.repetition_penalty,
            seen=state.seen, rules=SAMPLE,
        )  # fmt: skip
        live = state.live
        record = [jnp.where(live, drawn.tokens, -1), drawn.logprobs, drawn.drawn_logprobs]
        emitted = [
            old if new is None else jax.lax.dynamic_update_index_in_dim(old, new, number, 0)
            for old, new in zip(emitted, record, strict=True)
        ]
        budgets = state.budgets - live
        ended = (drawn.tokens[:, None] == stop_ids).any(axis=-1) | (budgets <= 0)
        state = dataclasses.replace(
            state,
            pools=pools,
            tokens=jnp.where(live, drawn.tokens, state.tokens),
            positions=state.positions + live,
            budgets=budgets,
            live=live & ~ended,
            seen=None if state.seen is None else _mark(state.seen, drawn.tokens),
        )
        return number + 1, state, emitted

    def empty(fill):
        return mesh_lib.constrain(fill, None, "batch", rules=SAMPLE)

    emitted = [
        empty(jnp.full(shape, -1, jnp.int32)),
        empty(jnp.zeros(shape)),
        empty(jnp.zeros(shape)) if engine.truncated else None,
    ]
    steps, state, (tokens, logprobs, drawn_logprobs) = jax.lax.while_loop(
        unfinished, step, (jnp.zeros((), jnp.int32), state, emitted)
    )
    return state, Emitted(tokens, logprobs, drawn_logprobs, state.live, steps)


def _mark(seen: Bool[Array, "s v"], tokens: Int[Array, " s"]) -> Bool[Array, "s v"]:
    return seen | (jnp.arange(seen.shape[1]) == tokens[:, None])


def decode_step(
    params: Params,
    head: Float[Array, "d v"] | Float[Array, "v d"],
    state: DecodeState,
    pages: PageMap,
    *,
    cfg: ModelConfig,
    engine: EngineConfig,
) -> tuple[Float[Array, "s v"], Pools]:
    """Feed every slot's token; returns float32 logits, cut over the vocabulary, and the pools with
    the new entries."""
    hidden = qwen3.embed(params, state.tokens[:, None], cfg=cfg, rules=SAMPLE)
    angles = layers.rope_angles(
        state.positions[:, None], head_dim=cfg.head_dim, theta=cfg.rope_theta
    )

    def body(carry, inputs):
        hidden, pools = carry
        layer, weights = inputs
        updated = {}

        def attention(q, k, v):
            mixed, updated["pools"] = cache_lib.attend_and_write(
                pools, q, k, v, layer=layer, pages=pages,
                positions=state.positions, live=state.live, cfg=cfg, page=engine.page,
                backend=backend_of(engine),
            )  # fmt: skip
            return mixed

        hidden, _, _ = qwen3.block(hidden, weights, angles, attention, cfg=cfg, rules=SAMPLE)
        return (hidden, updated["pools"]), None

    every = jnp.arange(cfg.layers)
    (hidden, pools), _ = jax.lax.scan(body, (hidden, state.pools), (every, params.blocks))
    hidden = layers.rms_norm(hidden[:, 0], params.final_norm, eps=cfg.norm_eps)
    return _logits(hidden, head, tied=params.unembed is None), pools


def _logits(hidden: Float[Array, "s d"], head: Array, *, tied: bool) -> Float[Array, "s v"]:
    def product(equation: str, hidden: Array) -> Array:
        return mesh_lib.einsum(
            equation, hidden, head, out=("batch", "vocab"), rules=SAMPLE, dtype=jnp.float32
        )

    if tied:
        return product("sd,vd->sv", hidden)
    plain = functools.partial(product, "sd,dv->sv")
    if head.size < LARGE_TABLE:
        return plain(hidden)

    for_cpu = mesh_lib.sharded(
        _large_product, inputs=(("batch", None), (None, "vocab")), outputs=("batch", "vocab"),
        rules=SAMPLE,
    )  # fmt: skip
    return jax.lax.platform_dependent(
        hidden, cpu=lambda hidden: for_cpu(hidden, head), default=plain
    )


def _large_product(hidden: Float[Array, "s d"], head: Float[Array, "d v"]) -> Float[Array, "s v"]:
    """A few rows by a large table on a CPU. XLA hands the plain product to a library that repacks
    the whole table; it leaves these forms to others, which take half to two thirds of the time."""
    if hidden.shape[0] <= FEW_ROWS:
        rows = [jnp.matmul(row, head, preferred_element_type=jnp.float32) for row in hidden]
        return jnp.stack(rows)
    turned = jax.lax.optimization_barrier(hidden.T)
    return jnp.einsum("ds,dv->sv", turned, head, preferred_element_type=jnp.float32)
