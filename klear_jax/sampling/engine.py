# SPDX-License-Identifier: Apache-2.0
"""The sampler's three verbs on the device, after JetStream: prefill, insert, generate.

All three are pure functions of a state that is passed in and out. `prefill` runs a prompt once, all
but its last token; `insert` copies it into any number of slots; `generate` decodes many steps in
one dispatch, every slot at its own position, and stops a slot on the device. The first decode step
of a slot eats the last prompt token, so there is one place where tokens are drawn.

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
from klear_jax.model import layers, qwen3
from klear_jax.model.config import ModelConfig
from klear_jax.model.params import Params
from klear_jax.sampling import cache as cache_lib
from klear_jax.sampling.cache import PagedCache
from klear_jax.sampling.draw import Truncation, draw

SAMPLE = mesh_lib.SAMPLE


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes of the decode engine, and what ends or truncates a draw."""

    slots: int = 64
    """Sequences decoded at a time."""
    length: int = 256
    """Most tokens of a prompt and its completion together."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a completion (they stay part of it)."""
    page: int = 16
    """Tokens in a page of the cache."""
    pages: int | None = None
    """Pages in the pool; by default every slot can be full at the same time."""
    steps: int = 16
    """Decode steps in one dispatch."""
    prefill_rows: int = 8
    """Prompts in one prefill."""
    narrowest: int | None = None
    """When nothing waits any more and at most half of the slots are going, decode half as many, and
    so on down to this; each width is compiled once. None: always all slots."""
    truncation: Truncation = Truncation()

    def __post_init__(self):
        small = {k: getattr(self, k) for k in ("slots", "length", "page", "steps", "prefill_rows")}
        if min(small.values()) < 1:
            raise ValueError(f"engine sizes must be at least 1, not {small}")
        if self.narrowest is not None and not 1 <= self.narrowest <= self.slots:
            raise ValueError(
                f"narrowest {self.narrowest} must lie in 1..{self.slots} (slots); None keeps all"
            )
        if self.pages is not None and self.pages < self.slot_pages:
            raise ValueError(
                f"{self.pages} pages of {self.page} tokens cannot hold one sequence of "
                f"{self.length}; give at least {self.slot_pages}"
            )

    @property
    def slot_pages(self) -> int:
        """Pages of one full slot."""
        return self.pages_for(self.length)

    def pages_for(self, length: int) -> int:
        """Pages of a sequence; its last token is never fed, so it needs no place in the cache."""
        return max(-(-(length - 1) // self.page), 1)

    def width_for(self, going: int, width: int) -> int:
        """Slots to decode when `going` of `width` are left and nothing waits."""
        while self.narrowest and max(2 * going, 2 * self.narrowest) <= width:
            width //= 2
        return width

    @property
    def pool_pages(self) -> int:
        return self.slots * self.slot_pages if self.pages is None else self.pages


@struct.dataclass
class Prefix:
    """Prompts that `prefill` has run: keys and values of all but the last token."""

    k: Float[Array, "l n p k e"]
    v: Float[Array, "l n p k e"]


@struct.dataclass
class DecodeState:
    """Everything `generate` carries; one entry of each vector for a slot."""

    cache: PagedCache
    table: Int[Array, "s slot_pages"]
    """Page ids of a slot in order; the id one past the pool means none."""
    tokens: Int[Array, " s"]
    """The token to be fed next (drawn last, or the last of the prompt)."""
    positions: Int[Array, " s"]
    """Its position, which is also the number of tokens in the cache."""
    budgets: Int[Array, " s"]
    """Tokens that may still be drawn."""
    sample_ids: UInt32[Array, " s"]
    temperatures: Float[Array, " s"]
    live: Bool[Array, " s"]


@struct.dataclass
class Insertion:
    """Which prompts go into which slots; entries with a slot number past the end are ignored.

    Made on the host.
    """

    slots: Int[np.ndarray, " s"]
    rows: Int[np.ndarray, " s"]
    """Row of the prefix."""
    table: Int[np.ndarray, "s slot_pages"]
    tokens: Int[np.ndarray, " s"]
    """Last token of the prompt."""
    positions: Int[np.ndarray, " s"]
    """Tokens of the prompt less one."""
    budgets: Int[np.ndarray, " s"]
    sample_ids: UInt32[np.ndarray, " s"]
    temperatures: Float[np.ndarray, " s"]


@struct.dataclass
class Emitted:
    """What one dispatch drew: row i holds step i; -1 where a slot drew nothing."""

    tokens: Int[Array, "steps s"]
    logprobs: Float[Array, "steps s"]
    live: Bool[Array, " s"]
    """Slots that are still going."""
    steps: Int[Array, ""]
    """Steps that were run."""


@functools.partial(jax.jit, static_argnames=("cfg", "engine"))
def init_state(cfg: ModelConfig, engine: EngineConfig) -> DecodeState:
    """A state whose slots are all free."""
    s = engine.slots
    return DecodeState(
        cache=cache_lib.init_cache(cfg, pages=engine.pool_pages, page=engine.page),
        table=jnp.full((s, engine.slot_pages), engine.pool_pages, jnp.int32),
        tokens=jnp.zeros(s, jnp.int32),
        positions=jnp.zeros(s, jnp.int32),
        budgets=jnp.zeros(s, jnp.int32),
        sample_ids=jnp.zeros(s, jnp.uint32),
        temperatures=jnp.ones(s, jnp.float32),
        live=jnp.zeros(s, bool),
    )


@functools.partial(jax.jit, static_argnames="cfg")
def prefill(
    params: Params, tokens: Int[Array, "n p"], lengths: Int[Array, " n"], *, cfg: ModelConfig
) -> Prefix:
    """Run prompts padded on the right to p tokens (a whole number of pages)."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    segments = (positions < lengths[:, None]).astype(jnp.int32)
    _, prefix = qwen3.run_blocks(
        params, tokens, positions, segments,
        cfg=cfg, keep=lambda hidden, k, v: Prefix(k, v), rules=SAMPLE,
    )  # fmt: skip
    return prefix


@functools.partial(jax.jit, donate_argnames="state")
def insert(state: DecodeState, prefix: Prefix, new: Insertion) -> DecodeState:
    """Start a completion of a prefilled prompt in each of the given slots."""
    s, page = state.tokens.shape[0], state.cache.page
    used = (new.slots < s)[:, None]
    destinations = new.table[:, : prefix.k.shape[2] // page]
    destinations = jnp.where(used, destinations, state.cache.pages)
    rows = jnp.asarray(new.rows)
    cache = cache_lib.write_prompts(state.cache, prefix.k, prefix.v, rows, destinations)

    def put(name):
        return getattr(state, name).at[new.slots].set(getattr(new, name), mode="drop")

    names = ("table", "tokens", "positions", "budgets", "sample_ids", "temperatures")
    live = state.live.at[new.slots].set(True, mode="drop")
    return dataclasses.replace(state, cache=cache, live=live, **{name: put(name) for name in names})


def narrow(state: DecodeState, slots: Int[np.ndarray, " w"]) -> DecodeState:
    """Only these slots, in this order; the cache stays as it is."""
    names = [field.name for field in dataclasses.fields(state) if field.name != "cache"]
    return dataclasses.replace(state, **_pick({n: getattr(state, n) for n in names}, slots))


@jax.jit
def _pick(vectors: dict[str, Array], slots: Int[Array, " w"]) -> dict[str, Array]:
    return {name: vector[slots] for name, vector in vectors.items()}


@functools.partial(jax.jit, static_argnames=("cfg", "engine"), donate_argnames="state")
def generate(
    params: Params,
    state: DecodeState,
    seed: Int[Array, ""],
    refill: Int[Array, ""],
    *,
    cfg: ModelConfig,
    engine: EngineConfig,
) -> tuple[DecodeState, Emitted]:
    """Decode up to `engine.steps` steps; fewer when all slots are done or `refill` became free."""
    stop_ids = jnp.asarray(engine.stop_ids or (-1,), jnp.int32)
    key = jax.random.key(seed)
    head = mesh_lib.constrain(qwen3.unembed(params).astype(cfg.dtype), None, "vocab")
    started = state.live.sum()

    def unfinished(carry):
        step, state, _, _ = carry
        free = started - state.live.sum()
        return (step < engine.steps) & state.live.any() & (free < refill)

    def step(carry):
        number, state, tokens, logprobs = carry
        logits, cache = decode_step(params, head, state, cfg=cfg)
        keys = jax.vmap(lambda i, p: jax.random.fold_in(jax.random.fold_in(key, i), p))(
            state.sample_ids, state.positions + 1
        )
        token, logprob = draw(
            logits, keys, state.temperatures,
            live_vocab=cfg.live_vocab, truncation=engine.truncation,
        )  # fmt: skip
        live = state.live
        budgets = state.budgets - live
        ended = (token[:, None] == stop_ids).any(axis=-1) | (budgets <= 0)
        tokens = tokens.at[number].set(jnp.where(live, token, -1))
        logprobs = logprobs.at[number].set(jnp.where(live, logprob, 0.0))
        state = dataclasses.replace(
            state,
            cache=cache,
            tokens=jnp.where(live, token, state.tokens),
            positions=state.positions + live,
            budgets=budgets,
            live=live & ~ended,
        )
        return number + 1, state, tokens, logprobs

    shape = (engine.steps, state.tokens.shape[0])
    empty = (jnp.zeros((), jnp.int32), state, jnp.full(shape, -1, jnp.int32), jnp.zeros(shape))
    steps, state, tokens, logprobs = jax.lax.while_loop(unfinished, step, empty)
    return state, Emitted(tokens, logprobs, state.live, steps)


def decode_step(
    params: Params, head: Float[Array, "d v"], state: DecodeState, *, cfg: ModelConfig
) -> tuple[Float[Array, "s v"], PagedCache]:
    """Feed every slot's token; returns float32 logits and the cache with the new entries."""
    hidden = qwen3.embed(params, state.tokens[:, None], cfg=cfg, rules=SAMPLE)
    angles = layers.rope_angles(
        state.positions[:, None], head_dim=cfg.head_dim, theta=cfg.rope_theta
    )

    def body(carry, inputs):
        hidden, cache = carry
        layer, weights = inputs
        updated = {}

        def attention(q, k, v):
            mixed, updated["cache"] = cache_lib.attend_and_write(
                cache, q, k, v,
                layer=layer, table=state.table, positions=state.positions, live=state.live,
            )  # fmt: skip
            return mixed

        hidden, _, _ = qwen3.block(hidden, weights, angles, attention, cfg=cfg, rules=SAMPLE)
        return (hidden, updated["cache"]), None

    every = jnp.arange(cfg.layers)
    (hidden, cache), _ = jax.lax.scan(body, (hidden, state.cache), (every, params.blocks))
    hidden = layers.rms_norm(hidden[:, 0], params.final_norm, eps=cfg.norm_eps)
    logits = mesh_lib.einsum(
        "sd,dv->sv", hidden, head, out=(None, "vocab"), rules=SAMPLE, dtype=jnp.float32
    )
    return mesh_lib.constrain(logits, None, None, rules=SAMPLE), cache
