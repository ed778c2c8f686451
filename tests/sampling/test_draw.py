# SPDX-License-Identifier: Apache-2.0
"""Drawing a token: truncations against numpy, frequencies, and what may never be drawn."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from klear_jax.core import mesh as mesh_lib
from klear_jax.core.mesh import MeshSpec, make_mesh
from klear_jax.sampling.draw import (
    Truncation,
    _edge,
    _first_above,
    _Piece,
    block_size,
    draw,
    inverse_cdf,
)

SLOTS, VOCAB, LIVE = 8, 300, 290


def keys(count, seed=0):
    return jax.random.split(jax.random.key(seed), count)


def softmax(x):
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


COUNT = 4000
"""Rows of every draw: operations are compiled once."""


def draw_many(logits, temperature, truncation=None, live=LIVE):
    """`COUNT` tokens of one row of logits, and the log-probability of each."""
    row = np.full(VOCAB, -np.inf)
    row[: len(logits)] = logits
    tokens, logprobs, _ = draw(
        jnp.broadcast_to(jnp.asarray(row, jnp.float32), (COUNT, VOCAB)), keys(COUNT),
        jnp.full(COUNT, temperature, jnp.float32),
        live_vocab=live, truncation=truncation or Truncation(),
    )  # fmt: skip
    assert tokens.dtype == jnp.int32
    return np.asarray(tokens), np.asarray(logprobs)


def chi_square(counts, probabilities):
    """In standard deviations above its mean; |.| < 4 for a fair draw. Rare cells are pooled."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    assert counts[probabilities == 0].sum() == 0
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 1e-9:
        counts, expected = counts[:-1], expected[:-1]
    freedom = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


def test_temperatures_are_each_slots_own():
    """0 takes the most likely live token; log-probs are at the slot's temperature, at 1 if 0."""
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=3, size=(SLOTS, VOCAB)).astype(np.float32)
    logits[:, LIVE:] = 100.0
    temperatures = np.array([0, 0.5, 1, 2, 0, 1e-3, 30, 1], np.float32)
    repeats = COUNT // SLOTS
    tokens, logprobs, _ = draw(
        jnp.asarray(np.repeat(logits, repeats, axis=0)), keys(COUNT),
        jnp.asarray(np.repeat(temperatures, repeats)), live_vocab=LIVE, truncation=Truncation(),
    )  # fmt: skip
    tokens = np.asarray(tokens).reshape(SLOTS, repeats)
    best = logits[:, :LIVE].argmax(axis=1)
    assert (tokens[[0, 4, 5]] == best[[0, 4, 5], None]).all()
    assert all(len(set(row.tolist())) > 2 for row in tokens[[1, 2, 3, 6, 7]])
    scaled = logits[:, :LIVE] / np.where(temperatures == 0, 1, temperatures)[:, None]
    scaled = scaled.astype(np.float64) - scaled.max(axis=1, keepdims=True)
    expected = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    expected = np.take_along_axis(expected, tokens, axis=1).ravel()
    np.testing.assert_allclose(logprobs, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_frequencies_follow_the_temperature(temperature):
    logits = np.random.default_rng(1).normal(scale=1.5, size=VOCAB)
    tokens, _ = draw_many(logits, temperature)
    probabilities = np.append(softmax(logits[:LIVE] / temperature), np.zeros(VOCAB - LIVE))
    assert abs(chi_square(np.bincount(tokens, minlength=VOCAB), probabilities)) < 4


def numpy_kept(probabilities, truncation):
    """Float64: the k most likely, of those the smallest most likely set of mass top_p, and of those
    what is at least min_p times as likely as the first. Ties with the last one stay each time."""
    p = np.asarray(probabilities, np.float64)
    kept = p > 0
    if truncation.top_k is not None:
        kept &= p >= np.sort(p)[::-1][min(truncation.top_k, p.size) - 1]
    if truncation.top_p < 1:
        order = np.argsort(-np.where(kept, p, 0), kind="stable")
        mass = np.cumsum(np.where(kept, p, 0)[order])
        last = order[min(np.searchsorted(mass / mass[-1], truncation.top_p), p.size - 1)]
        kept &= p >= p[last]
    return kept & (p >= truncation.min_p * p.max())


def kept_by(logits, truncation):
    weights = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
    piece = _Piece(None, block_size(logits.shape[1]), logits.shape[1])
    return np.asarray((weights >= _edge(weights, truncation, piece)) & (weights > 0))


CASES = [
    Truncation(top_k, top_p, min_p)
    for top_k in (1, 2, 7, 289, 5000, None)
    for top_p in (1e-6, 0.3, 0.95, 1.0)
    for min_p in (0.0, 0.1)
]


@pytest.mark.parametrize("truncation", CASES, ids=str)
def test_what_is_kept_equals_numpy(truncation):
    logits = np.random.default_rng(2).normal(scale=2, size=(SLOTS, LIVE)).astype(np.float32)
    # Ties, also at an edge.
    logits[:, 5:9] = logits[:, 4:5]
    expected = [numpy_kept(row, truncation) for row in softmax(logits.astype(np.float64))]
    np.testing.assert_array_equal(kept_by(jnp.asarray(logits), truncation), expected)


@pytest.mark.parametrize("truncation", [Truncation(50), Truncation(None, 0.95), Truncation(9, 0.5)])
def test_what_is_kept_of_a_large_vocabulary(truncation):
    logits = np.random.default_rng(3).normal(scale=4, size=(3, 151_936)).astype(np.float32)
    kept = kept_by(jnp.asarray(logits), truncation)
    for row, got in zip(softmax(logits.astype(np.float64)), kept, strict=True):
        expected = numpy_kept(row, truncation)
        # A float32 sum over so many may put the edge one token further.
        assert abs(int(expected.sum()) - int(got.sum())) <= 1
        assert (expected != got).sum() <= 1


def numpy_penalised(logits, seen, penalty):
    """As the processor of HF transformers does."""
    return np.where(seen, np.where(logits < 0, logits * penalty, logits / penalty), logits)


@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.7])
@pytest.mark.parametrize("truncation", [Truncation(), Truncation(40, 0.9, 0.02)], ids=str)
def test_logprobs_of_the_draw_equal_numpy(penalty, truncation):
    """Under penalty, temperature and truncation; the trainer's feel the temperature alone."""
    rng = np.random.default_rng(7)
    count = 400
    logits = rng.normal(scale=2, size=(count, VOCAB)).astype(np.float32)
    seen = rng.random((count, VOCAB)) < 0.3
    temperatures = rng.choice([0.0, 0.6, 1.0, 1.4], count).astype(np.float32)
    changed = penalty != 1 or truncation.on
    tokens, logprobs, of_draw = draw(
        jnp.asarray(logits), keys(count), jnp.asarray(temperatures), live_vocab=LIVE,
        truncation=truncation, repetition_penalty=penalty,
        seen=jnp.asarray(seen) if penalty != 1 else None,
    )  # fmt: skip
    assert (of_draw is not None) == changed
    scale = np.where(temperatures == 0, 1, temperatures)[:, None].astype(np.float64)
    plain = logits[:, :LIVE].astype(np.float64)
    shown = numpy_penalised(plain, seen[:, :LIVE], penalty)
    at = (np.arange(count), np.asarray(tokens))
    np.testing.assert_allclose(logprobs, np.log(softmax(plain / scale))[at], atol=1e-5)
    greedy = temperatures == 0
    np.testing.assert_array_equal(np.asarray(tokens)[greedy], shown[greedy].argmax(axis=1))
    if changed:
        whole = softmax(shown / scale)
        kept = np.array([numpy_kept(row, truncation) for row in whole])
        assert kept[at].all()
        expected = np.log(whole[at] / np.where(kept, whole, 0).sum(axis=1))
        np.testing.assert_allclose(of_draw, expected, atol=1e-5)


def test_penalty_and_what_was_seen_go_together():
    logits = jnp.zeros((1, 4))
    for penalty, seen in ((1.0, jnp.zeros((1, 4), bool)), (1.2, None)):
        with pytest.raises(ValueError, match="go together"):
            draw(logits, keys(1), jnp.ones(1), live_vocab=4, repetition_penalty=penalty, seen=seen)


def test_a_slot_that_is_not_a_number_disturbs_no_other():
    logits = np.random.default_rng(8).normal(size=(4, VOCAB)).astype(np.float32)
    bad = logits.copy()
    bad[1] = np.nan
    bad[2, 7] = np.inf
    for truncation in (Truncation(), Truncation(5, 0.9)):
        one, two = (
            draw(jnp.asarray(x), keys(4), jnp.ones(4), live_vocab=LIVE, truncation=truncation)
            for x in (logits, bad)
        )
        for a, b in zip(one[:2], two[:2], strict=True):
            assert np.asarray(a)[[0, 3]].tolist() == np.asarray(b)[[0, 3]].tolist()


def test_ties_and_narrow_types():
    """All tokens alike; greedy takes the first; bfloat16 logits are widened first."""
    flat = jnp.zeros((COUNT, VOCAB), jnp.bfloat16)
    tokens, logprobs, _ = draw(flat, keys(COUNT), jnp.ones(COUNT), live_vocab=LIVE)
    np.testing.assert_allclose(logprobs, -np.log(LIVE), rtol=1e-6)
    assert np.unique(tokens).size > 280
    tokens, _, _ = draw(flat, keys(COUNT), jnp.zeros(COUNT), live_vocab=LIVE)
    assert (np.asarray(tokens) == 0).all()


@pytest.mark.parametrize("vocab", [264, pytest.param(8200, marks=pytest.mark.slow), 151_936])
def test_a_cut_vocabulary_draws_the_same(vocab):
    """Tokens are equal on every mesh; blocks are whole on up to eight devices or held by each."""
    rng = np.random.default_rng(9)
    logits = rng.normal(scale=3, size=(8, vocab)).astype(np.float32)
    seen = rng.random((8, vocab)) < 0.1
    temperatures = np.array([0, 1, 1, 0.7, 1, 1.3, 1, 0], np.float32)

    def run(truncation, penalty):
        return jax.jit(
            lambda *a: draw(
                *a[:3], live_vocab=vocab - 3, truncation=truncation, repetition_penalty=penalty,
                seen=a[3] if penalty != 1 else None,
            )
        )(logits, keys(8), temperatures, seen)  # fmt: skip

    for truncation, penalty in ((Truncation(), 1.0), (Truncation(20, 0.9, 0.01), 1.2)):
        alone = run(truncation, penalty)
        for mesh in ("tensor:4", "data:2,tensor:2"):
            spec = MeshSpec.parse(mesh)
            size = int(np.prod(spec.sizes))
            with jax.set_mesh(make_mesh(spec, jax.devices()[:size])):
                cut = run(truncation, penalty)
            np.testing.assert_array_equal(alone.tokens, cut.tokens)
            np.testing.assert_allclose(alone.logprobs, cut.logprobs, atol=1e-5)
            if truncation.on:
                np.testing.assert_allclose(alone.drawn_logprobs, cut.drawn_logprobs, atol=1e-5)


def test_a_cut_vocabulary_stays_cut():
    """What crosses between devices is blocks' sums and numbers a slot: no logits."""
    vocab, slots = 151_936, 4
    with jax.set_mesh(make_mesh(MeshSpec.parse("tensor:4"), jax.devices()[:4])) as _:
        layout = mesh_lib.SAMPLE.spec("batch", "vocab")

        def run(logits, keys, temperatures):
            logits = jax.sharding.reshard(logits, layout)
            return draw(logits, keys, temperatures, live_vocab=vocab, truncation=Truncation(9, 0.9))

        mesh = jax.sharding.get_mesh()
        sharding = jax.sharding.NamedSharding(mesh, layout)
        shape = jax.ShapeDtypeStruct((slots, vocab), jnp.float32, sharding=sharding)
        text = jax.jit(run).lower(shape, keys(slots), jnp.ones(slots)).compile().as_text()
    moved = [
        int(np.prod([int(n) for n in sizes.split(",") if n]))
        for sizes in re.findall(r"= \w+\[([\d,]*)\][^=]*? all-(?:gather|reduce)\(", text)
    ]
    assert len(moved) >= 3
    assert max(moved) == slots * vocab // block_size(vocab)


@pytest.mark.parametrize(
    "truncation",
    [Truncation(1), Truncation(3), Truncation(20), Truncation(None, 1e-6), Truncation(3, 0.6)],
    ids=str,
)
def test_truncation_survives_compilation(truncation):
    """Compiled, a log-softmax may be computed twice with other rounding: the edge must stay in."""
    rng = np.random.default_rng(6)
    count = COUNT
    logits = jnp.asarray(rng.normal(scale=2, size=(count, VOCAB)), jnp.float32)
    temperatures = jnp.asarray(rng.choice([0.6, 1.0, 1.4], count), jnp.float32)

    def run(logits, keys, temperatures):
        return draw(logits, keys, temperatures, live_vocab=LIVE, truncation=truncation)[0]

    tokens = np.asarray(jax.jit(run)(logits, keys(count), temperatures))
    rank = (logits[:, :LIVE] > jnp.take_along_axis(logits, tokens[:, None], axis=1)).sum(axis=1)
    rank = np.asarray(rank)
    if truncation.top_k == 1 or truncation.top_p < 1e-3:
        assert (rank == 0).all()
    else:
        np.testing.assert_array_equal(tokens, run(logits, keys(count), temperatures))
        assert rank.max() < truncation.top_k


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [
        (Truncation(), [0, 1, 2, 3]),
        (Truncation(top_k=2), [1, 3]),
        (Truncation(top_p=0.5), [3]),
        (Truncation(top_p=0.51), [1, 3]),
        (Truncation(top_p=0.81), [1, 2, 3]),
        # 0.5 and 0.3 of the 0.8 that top-k leaves: 0.625 reaches 0.6 alone.
        (Truncation(top_k=2, top_p=0.6), [3]),
        (Truncation(top_k=2, top_p=0.63), [1, 3]),
    ],
)
def test_truncated_frequencies(truncation, kept):
    """What is left keeps its proportions; the log-probability stays that of the whole softmax."""
    whole = np.array([0.05, 0.3, 0.15, 0.5])
    tokens, logprobs = draw_many(np.log(whole), 1.0, truncation)
    probabilities = np.zeros(4)
    probabilities[kept] = whole[kept] / whole[kept].sum()
    assert tokens.max() < 4
    counts = np.bincount(tokens, minlength=4)
    assert set(np.nonzero(counts)[0]) == set(kept)
    if len(kept) > 1:
        assert abs(chi_square(counts, probabilities)) < 4
    np.testing.assert_allclose(logprobs, np.log(whole)[tokens], rtol=1e-5)


def test_dead_and_impossible_tokens_are_never_drawn():
    """Rows past the live vocabulary though their logits are huge, and tokens of logit -inf."""
    logits = np.full(VOCAB, -np.inf)
    logits[[3, 130, 289]] = [0.0, 1.0, 2.0]
    logits[290:] = 1e9
    tokens, logprobs = draw_many(logits, 1.0)
    assert set(tokens.tolist()) == {3, 130, 289}
    assert np.isfinite(logprobs).all()
    tokens, _ = draw_many(logits, 0.0)
    assert (tokens == 289).all()


@pytest.mark.parametrize("size", [5, 128, 1187, 1200])
def test_first_above_never_lands_on_weight_zero(size):
    """Uniforms aimed at every partial sum, where a rounding error decides.

    A long float32 cumsum is not monotone and moves where weights are 0 (1187 blocks are the Qwen3
    vocabulary), so "the first sum above" could be an index of weight 0 or past the end.
    """
    rng = np.random.default_rng(3)
    cases = 4000
    weights = rng.exponential(size=(cases, size)) * (rng.random((cases, size)) < 0.15)
    weights[:, rng.integers(size)] = 1e-3
    weights = weights.astype(np.float32)
    running = np.asarray(jnp.cumsum(jnp.asarray(weights), axis=-1))
    aim = np.take_along_axis(running, rng.integers(size, size=(cases, 1)), axis=1)[:, 0]
    aim = (aim / running[:, -1]).astype(np.float32)
    for uniforms in (aim, np.nextafter(aim, np.float32(0)), np.zeros_like(aim), np.ones_like(aim)):
        uniforms = np.clip(uniforms, 0, np.float32(1 - 2**-24))
        chosen = np.asarray(_first_above(jnp.asarray(weights), jnp.asarray(uniforms)))
        assert chosen.max() < size
        assert (np.take_along_axis(weights, chosen[:, None], axis=1) > 0).all()


def test_inverse_cdf_frequencies():
    """Across blocks of 128, an incomplete last one included; threshold 4 standard deviations."""
    rng = np.random.default_rng(4)
    weights = rng.exponential(size=700) ** 2
    weights[rng.random(700) < 0.3] = 0
    weights[128:256] = 0
    tokens = many_from(weights, 200_000, seed=4)
    score = chi_square(np.bincount(tokens, minlength=700), weights / weights.sum())
    assert abs(score) < 4


def many_from(weights, count, seed):
    weights = jnp.asarray(weights, jnp.float32)[None]

    def one(key):
        return inverse_cdf(weights, key[None])[0]

    batches = keys(count, seed).reshape(-1, 2000)
    return np.asarray(jax.jit(lambda k: jax.lax.map(jax.vmap(one), k))(batches)).ravel()


def test_thin_tail_of_a_large_vocabulary():
    """1e-3 spread over 150,000 tokens comes at its rate, and over distinct tokens.

    One float32 uniform for the whole vocabulary would reach some 8,000 of them only, and 1000 draws
    would collide about 60 times; fair draws collide about 3 times.
    """
    weights = np.full(150_000, 1e-3 / 149_999)
    weights[70_000] = 0.999
    tokens = many_from(weights, 1_000_000, seed=5)
    tail = tokens[tokens != 70_000]
    assert abs(len(tail) - 1000) < 4 * np.sqrt(1000)
    assert len(tail) - len(np.unique(tail)) < 15
    quarters = np.bincount(tail // 37_500, minlength=4)
    assert abs(chi_square(quarters, np.full(4, 0.25))) < 4


@pytest.mark.parametrize(
    "bad",
    [
        {"top_k": 0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.01}, {"top_p": np.nan},
        {"min_p": -0.1}, {"min_p": 1.0}, {"min_p": np.nan},
    ],
)  # fmt: skip
def test_truncation_refuses(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Truncation(**bad)
