# SPDX-License-Identifier: Apache-2.0
"""Drawing a token: truncations against numpy, frequencies, and what may never be drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from klear_jax.sampling.draw import Truncation, _first_above, allowed, draw, inverse_cdf

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
    tokens, logprobs = draw(
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
    tokens, logprobs = draw(
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


def numpy_allowed(probabilities, top_k, top_p):
    """Indices kept: the k most likely, then the smallest most likely set of mass top_p of those."""
    order = np.argsort(-probabilities, kind="stable")[:top_k]
    mass = np.cumsum(probabilities[order]) / probabilities[order].sum()
    return set(order[: int(np.searchsorted(mass, top_p)) + 1].tolist())


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("top_k", [1, 2, 7, 289, 5000, None])
def test_truncation_equals_numpy(top_k, top_p):
    rng = np.random.default_rng(2)
    logits = rng.normal(scale=2, size=(SLOTS, VOCAB))
    logits[:, LIVE:] = -np.inf
    keep = np.asarray(allowed(jnp.asarray(logits, jnp.float32), Truncation(top_k, top_p)))
    for row, mask in zip(softmax(logits), keep, strict=True):
        expected = numpy_allowed(row[:LIVE], top_k, top_p if top_p < 1 else 2.0)
        assert set(np.nonzero(mask)[0].tolist()) == expected


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
    """Across blocks of 128, an incomplete last block included; threshold 4 standard deviations."""
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
    "bad", [{"top_k": 0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.01}, {"top_p": np.nan}]
)
def test_truncation_refuses(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Truncation(**bad)
