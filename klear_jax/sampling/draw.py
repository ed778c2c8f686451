# SPDX-License-Identifier: Apache-2.0
"""Drawing one token for each slot, with its log-probability.

The vocabulary may be cut over the mesh and stays so: what crosses between devices is a number a
slot, and one a slot and block. Read `draw`, then `_draw_piece`.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from klear_jax.core import mesh as mesh_lib

SMALL_VOCAB = 8192
"""Up to here a device can as well hold the whole vocabulary while it draws."""

GROUP = 32
"""Blocks in a group of the three-level draw."""


@dataclasses.dataclass(frozen=True)
class Truncation:
    """Which tokens may be drawn. The temperature is a number of each request instead."""

    top_k: int | None = None
    """Only the k most likely tokens."""
    top_p: float = 1.0
    """Only the smallest set of most likely tokens that holds this much of the probability that
    top-k leaves."""
    min_p: float = 0.0
    """Only tokens at least this many times as likely as the most likely one."""

    def __post_init__(self):
        if not 0 < self.top_p <= 1 or (self.top_k is not None and self.top_k < 1):
            raise ValueError(
                f"top_p {self.top_p} must lie in (0, 1] and top_k {self.top_k} be >= 1"
            )
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p {self.min_p} must lie in [0, 1); 0 is off")

    @property
    def on(self) -> bool:
        """Whether any token is left out."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0


class Drawn(NamedTuple):
    """One token a slot."""

    tokens: Int[Array, " s"]
    logprobs: Float[Array, " s"]
    """Nats, over the whole live vocabulary at the sampling temperature (at 1 for a greedy slot);
    neither truncation nor penalty is in it. The trainer recomputes the same number."""
    drawn_logprobs: Float[Array, " s"] | None
    """Nats, under the distribution after penalty and truncation; None where neither is on. A greedy
    slot has its token's probability there at temperature 1."""


def draw(
    logits: Float[Array, "s v"],
    keys: Key[Array, " s"],
    temperatures: Float[Array, " s"],
    *,
    live_vocab: int,
    truncation: Truncation = Truncation(),
    repetition_penalty: float = 1.0,
    seen: Bool[Array, "s v"] | None = None,
    rules: mesh_lib.Rules = mesh_lib.SAMPLE,
) -> Drawn:
    """Draw a token for each slot.

    Temperature 0 takes the most likely token, the first of several. A token at or above
    `live_vocab` has probability 0. With a repetition penalty the logits of `seen` tokens are
    divided by it where they are positive and multiplied where negative (Keskar et al. 2019).
    """
    if (repetition_penalty != 1) != (seen is not None):
        raise ValueError(
            f"repetition_penalty {repetition_penalty} other than 1 and `seen` go together"
        )
    vocab = logits.shape[-1]
    block = block_size(vocab)
    cut = "vocab" if (vocab // mesh_lib.pieces_of("vocab", rules)) % block == 0 else None
    body = functools.partial(
        _draw_piece, block=block, live_vocab=live_vocab, truncation=truncation,
        penalty=repetition_penalty, axis=mesh_lib.mesh_axis(cut, rules) if cut else None,
    )  # fmt: skip
    changed = truncation.on or seen is not None
    slots, rows = ("batch",), ("batch", cut)
    extra = () if seen is None else (seen,)
    run = mesh_lib.sharded(
        body,
        inputs=(rows, slots, slots, *[rows for _ in extra]),
        outputs=(slots,) * (3 if changed else 2),
        rules=rules,
    )
    tokens, logprobs, *drawn_logprobs = run(logits, keys, temperatures, *extra)
    return Drawn(tokens, logprobs, drawn_logprobs[0] if changed else None)


def block_size(vocab: int) -> int:
    """Tokens in a block of the draw.

    It depends on the vocabulary alone, so that a token does not depend on the mesh, and divides an
    eighth of a large vocabulary, so that blocks are whole on up to eight devices.
    """
    if vocab > SMALL_VOCAB and vocab % 8 == 0:
        fitting = math.gcd(vocab // 8, 128)
        if fitting >= 16:
            return fitting
    return 128


def _draw_piece(
    logits, keys, temperatures, seen=None, *, block, live_vocab, truncation, penalty, axis
):  # fmt: skip
    """`draw` on one device's slots and piece of the vocabulary."""
    piece = _Piece(axis, block, logits.shape[-1])
    greedy = temperatures <= 0
    scale = 1.0 / jnp.where(greedy, 1.0, temperatures)[:, None]

    def plain(logits, seen, ids):
        return jnp.where(ids < live_vocab, logits.astype(jnp.float32) * scale, -jnp.inf)

    def penalised(logits, seen, ids):
        logits = logits.astype(jnp.float32)
        other = jnp.where(logits > 0, logits / penalty, logits * penalty)
        return plain(jnp.where(seen, other, logits), seen, ids)

    def relative(score):
        """Weights relative to the largest, which is 1; the largest score, and that of each block"""
        scores = score(logits, seen, piece.ids)
        peaks = piece.blocks(scores, -jnp.inf).max(axis=-1)
        top = piece.most(peaks.max(axis=-1))
        return jnp.exp(scores - top[:, None]), top, peaks

    score = plain
    weights, top, peaks = relative(plain)
    sums = piece.gather(piece.blocks(weights, 0.0).sum(axis=-1))
    log_total = jnp.log(piece.same(sums.sum(axis=-1)))
    shown_top = top
    if seen is not None:
        score = penalised
        weights, shown_top, peaks = relative(penalised)
    if truncation.on:
        # Compared with one another further on: they must not be computed twice, with other
        # rounding, or the token at the edge falls out.
        weights = jax.lax.optimization_barrier(weights)
        weights = jnp.where(weights >= _edge(weights, truncation, piece), weights, 0.0)
    changed = truncation.on or seen is not None
    if changed:
        sums = piece.gather(piece.blocks(weights, 0.0).sum(axis=-1))

    uniforms = jax.vmap(lambda key: jax.random.uniform(key, (3,)))(keys)
    best = _first_of_largest(piece.gather(peaks))
    number = jnp.where(greedy, best, _block_above(sums, uniforms[:, :2]))
    # From here on one block of each slot; scores are made again of its logits alone.
    row = functools.partial(piece.row, number=number)
    places = (row(logits, fill=0.0), None if seen is None else row(seen, fill=False), row(None))
    inside = jnp.where(
        greedy,
        jnp.argmax(score(*places), axis=-1),
        _first_above(row(weights, fill=0.0), uniforms[:, 2]),
    )
    tokens = piece.tell(number, places[2], inside)
    logprobs = piece.tell(number, plain(*places), inside) - top - log_total
    if not changed:
        return tokens, logprobs
    chosen = piece.tell(number, score(*places), inside)
    return tokens, logprobs, chosen - shown_top - jnp.log(piece.same(sums.sum(axis=-1)))


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A device's piece of the vocabulary, and what it has to ask the other pieces."""

    axis: str | None
    """Mesh axis over which the vocabulary is cut; None where a device has all of it."""
    block: int
    size: int

    @property
    def first(self) -> Array | int:
        return 0 if self.axis is None else jax.lax.axis_index(self.axis) * self.size

    @property
    def ids(self) -> Array:
        return self.first + jnp.arange(self.size)

    def blocks(self, x: Shaped[Array, "s v"], fill: float | bool) -> Shaped[Array, "s n block"]:
        padded = jnp.pad(x, ((0, 0), (0, -self.size % self.block)), constant_values=fill)
        return padded.reshape(x.shape[0], -1, self.block)

    def most(self, x: Array) -> Array:
        return x if self.axis is None else jax.lax.pmax(x, self.axis)

    def total(self, x: Array) -> Array:
        return x if self.axis is None else jax.lax.psum(x, self.axis)

    def same(self, x: Array) -> Array:
        """`x`, which is equal on all pieces, as a value that is known to be."""
        return self.most(x)

    def gather(self, x: Float[Array, "s n"]) -> Float[Array, "s all"]:
        """The blocks of all pieces, in the order of the vocabulary: sums over them do not depend
        on how it is cut."""
        return x if self.axis is None else jax.lax.all_gather(x, self.axis, axis=1, tiled=True)

    def _own(self, number: Int[Array, " s"]) -> tuple[Array, Array]:
        """Block numbers on this piece, and whether they lie in it."""
        count = -(-self.size // self.block)
        local = number - self.first // self.block
        return jnp.clip(local, 0, count - 1), (local >= 0) & (local < count)

    def row(self, x: Array | None, *, number: Int[Array, " s"], fill: float | bool = 0.0) -> Array:
        """Block `number` of each slot, of `x` or of the token ids; where it is not on this piece,
        some other block."""
        local, _ = self._own(number)
        if x is None:
            return self.first + local[:, None] * self.block + jnp.arange(self.block)
        return jnp.take_along_axis(self.blocks(x, fill), local[:, None, None], axis=1)[:, 0]

    def tell(self, number: Array, row: Shaped[Array, "s block"], inside: Array) -> Array:
        """An entry of a block, told to all pieces by the one that has it."""
        entry = jnp.take_along_axis(row, inside[:, None], axis=1)[:, 0]
        return self.total(jnp.where(self._own(number)[1], entry, 0))


def _edge(weights: Float[Array, "s v"], truncation: Truncation, piece: _Piece) -> Array:
    """Smallest weight that stays, [s, 1]; weights are relative to the largest, which is 1.

    Ties with it stay. Positive floats are ordered as their bits are, so the edge is found exactly
    by bisecting an integer, with one sum over the vocabulary a step and no sort.
    """
    edge = jnp.full((weights.shape[0],), truncation.min_p, jnp.float32)
    kept = weights
    vocab = weights.shape[-1]
    if truncation.top_k is not None:
        by_count = _largest_edge(weights, 1.0, float(truncation.top_k), 0.0, piece)
        edge = jnp.maximum(edge, by_count)
        kept = jnp.where(weights >= by_count[:, None], weights, 0.0)
    if truncation.top_p < 1:
        goal = truncation.top_p * piece.total(kept.sum(axis=-1))
        # All tokens below (1 - top_p) / vocab together hold less than 1 - top_p.
        pieces = 1 if piece.axis is None else jax.lax.axis_size(piece.axis)
        lowest = (1 - truncation.top_p) / (vocab * pieces) / 2
        edge = jnp.maximum(edge, _largest_edge(kept, kept, goal, lowest, piece))
    return edge[:, None]


def _largest_edge(weights, amounts, goal, lowest: float, piece: _Piece) -> Float[Array, " s"]:
    """The largest number such that `amounts` of the weights from it up sum to `goal` or more; where
    all together do not, `lowest` or less."""
    low, high = (int(np.float32(x).view(np.int32)) for x in (lowest, 1.0))

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low + 1) // 2
        edge = jax.lax.bitcast_convert_type(middle, jnp.float32)[:, None]
        amount = piece.total(jnp.where(weights >= edge, amounts, 0.0).sum(axis=-1))
        enough = amount >= goal
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    slots = jnp.zeros_like(piece.most(weights[:, 0]), jnp.int32)
    start = (slots + low, slots + high)
    steps = (high - low).bit_length()
    found, _ = jax.lax.fori_loop(0, steps, halve, start)
    return jax.lax.bitcast_convert_type(found, jnp.float32)


def inverse_cdf(weights: Float[Array, "s v"], keys: Key[Array, " s"]) -> Int[Array, " s"]:
    """An index in proportion to its weight; never one of weight 0.

    First a group of `GROUP` blocks by its sum, then a block of it, then a token of that, each with
    a uniform of its own: one float32 uniform has 2^23 values and would never reach most of a large
    vocabulary.
    """
    piece = _Piece(None, block_size(weights.shape[-1]), weights.shape[-1])
    uniforms = jax.vmap(lambda key: jax.random.uniform(key, (3,)))(keys)
    number = _block_above(piece.blocks(weights, 0.0).sum(axis=-1), uniforms[:, :2])
    inside = _first_above(piece.row(weights, number=number), uniforms[:, 2])
    return number * piece.block + inside


def _groups(x: Float[Array, "s n"], fill: float) -> Float[Array, "s groups group"]:
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % GROUP)), constant_values=fill)
    return padded.reshape(x.shape[0], -1, GROUP)


def _in_group(groups: Float[Array, "s groups group"], number: Int[Array, " s"]) -> Array:
    return jnp.take_along_axis(groups, number[:, None, None], axis=1)[:, 0]


def _block_above(sums: Float[Array, "s n"], uniforms: Float[Array, "s two"]) -> Int[Array, " s"]:
    """A block in proportion to its sum, by its group."""
    groups = _groups(sums, 0.0)
    number = _first_above(groups.sum(axis=-1), uniforms[:, 0])
    return number * GROUP + _first_above(_in_group(groups, number), uniforms[:, 1])


def _first_of_largest(peaks: Float[Array, "s n"]) -> Int[Array, " s"]:
    """The first block with the largest entry, by its group."""
    groups = _groups(peaks, -jnp.inf)
    number = jnp.argmax(groups.max(axis=-1), axis=-1)
    return number * GROUP + jnp.argmax(_in_group(groups, number), axis=-1)


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
