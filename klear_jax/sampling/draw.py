# SPDX-License-Identifier: Apache-2.0
"""Drawing one token for each slot, with its log-probability."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

BLOCK = 128
"""Tokens in a block of the two-level draw."""


@dataclasses.dataclass(frozen=True)
class Truncation:
    """Which tokens may be drawn. The temperature is a number of each request instead."""

    top_k: int | None = None
    """Only the k most likely tokens."""
    top_p: float = 1.0
    """Only the smallest set of most likely tokens that holds this much probability."""

    def __post_init__(self):
        if not 0 < self.top_p <= 1 or (self.top_k is not None and self.top_k < 1):
            raise ValueError(
                f"top_p {self.top_p} must lie in (0, 1] and top_k {self.top_k} be >= 1"
            )


def draw(
    logits: Float[Array, "s v"],
    keys: Key[Array, " s"],
    temperatures: Float[Array, " s"],
    *,
    live_vocab: int,
    truncation: Truncation,
) -> tuple[Int[Array, " s"], Float[Array, " s"]]:
    """A token for each slot and its log-probability in nats.

    Temperature 0 takes the most likely token. The log-probability is that of the whole live
    vocabulary at the sampling temperature (at 1 for a greedy slot), which is what the trainer
    recomputes; a truncation changes which token is drawn and not this number. A token at or above
    `live_vocab` has probability 0.
    """
    greedy = temperatures <= 0
    scaled = logits.astype(jnp.float32) / jnp.where(greedy, 1.0, temperatures)[:, None]
    scaled = jnp.where(jnp.arange(logits.shape[-1]) < live_vocab, scaled, -jnp.inf)
    logprobs = jax.nn.log_softmax(scaled, axis=-1)
    weights = jnp.exp(logprobs)
    weights = jnp.where(allowed(scaled, truncation), weights, 0.0)
    drawn = jnp.where(greedy, jnp.argmax(scaled, axis=-1), inverse_cdf(weights, keys))
    drawn = drawn.astype(jnp.int32)
    return drawn, jnp.take_along_axis(logprobs, drawn[:, None], axis=-1)[:, 0]


def allowed(logits: Float[Array, "s v"], truncation: Truncation) -> Bool[Array, "s v"]:
    """Which tokens the truncation leaves; top-p is taken after top-k, on what is left of it.

    Thresholds are logits and are compared with logits. Numbers that come out of exp and log may be
    computed twice by the compiler, with other rounding, and then the token at the edge, with
    top_k = 1 the only one, falls out.
    """
    keep = jnp.isfinite(logits)
    if truncation.top_k is not None and truncation.top_k < logits.shape[-1]:
        keep &= logits >= jax.lax.top_k(logits, truncation.top_k)[0][:, -1:]
    if truncation.top_p < 1:
        ordered = jnp.sort(jnp.where(keep, logits, -jnp.inf), axis=-1, descending=True)
        probabilities = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        # The least likely token still needed to reach top_p; ties with it stay in.
        edge = jnp.where(before < truncation.top_p, ordered, jnp.inf).min(axis=-1, keepdims=True)
        keep &= logits >= edge
    return keep


def inverse_cdf(weights: Float[Array, "s v"], keys: Key[Array, " s"]) -> Int[Array, " s"]:
    """An index in proportion to its weight; never one of weight 0.

    First a block of `BLOCK` neighbours by its sum, then a token inside it, each with a uniform of
    its own: one float32 uniform has 2^23 values and would never reach most of a large vocabulary.
    """
    s, v = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -v % BLOCK))).reshape(s, -1, BLOCK)
    uniforms = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
    block = _first_above(blocks.sum(axis=-1), uniforms[:, 0])
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * BLOCK + _first_above(inside, uniforms[:, 1])


def _first_above(weights: Float[Array, "s n"], uniforms: Float[Array, " s"]) -> Int[Array, " s"]:
    """First index of positive weight whose running sum exceeds uniform * total."""
    running = jnp.cumsum(weights, axis=-1)
    # A parallel cumsum of more than a few hundred numbers is not monotone in float32 and moves by
    # a rounding error where a weight is 0, so only positive weights may be chosen.
    positive = weights > 0
    total = jnp.where(positive, running, 0.0).max(axis=-1)
    # Rounding may lift uniform * total to the total itself, which no running sum exceeds.
    target = jnp.minimum(uniforms * total, jnp.nextafter(total, jnp.zeros_like(total)))
    return jnp.argmax(positive & (running > target[:, None]), axis=-1)
