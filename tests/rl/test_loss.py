# SPDX-License-Identifier: Apache-2.0
"""The policy loss against a float64 oracle, its masking, and its telemetry."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from klear_jax.core.batch import RolloutBatch
from klear_jax.rl.loss import LOG_RATIO_EDGES, histogram, policy_loss
from klear_jax.rl.surrogates import SURROGATES, Clip
from klear_jax.train.state import init_state
from klear_jax.train.step import loss_and_gradient, make_step

SHAPE = (4, 20)
"""Of every batch, masked where a case is smaller: operations are compiled once."""


def padded(x):
    x = np.asarray(x)
    return np.pad(x, [(0, full - size) for full, size in zip(SHAPE, x.shape, strict=True)])


def rollouts(mask, advantages, old_logprobs, **changes):
    """A batch in token mean; what the loss does not read is 0."""
    mask = np.asarray(mask, bool)
    integers = np.zeros(mask.shape, np.int32)
    fields = {
        "tokens": integers, "targets": integers, "positions": integers, "segments": integers,
        "mask": mask,
        "loss_weights": mask / mask.sum(),
        "positive_weights": np.zeros(mask.shape),
        "advantages": np.where(mask, advantages, 0.0),
        "old_logprobs": old_logprobs,
        "sampler_logprobs": old_logprobs,
    }  # fmt: skip
    fields |= changes
    fields = {k: padded(np.broadcast_to(v, mask.shape)) for k, v in fields.items()}
    floats = {k: jnp.asarray(v, v.dtype if v.dtype.kind in "bi" else jnp.float32)
              for k, v in fields.items()}  # fmt: skip
    return RolloutBatch(**floats)


def loss_of(logprobs, batch, clip):
    """Loss, gradient and summarised metrics."""
    rows, columns = np.shape(logprobs)
    logprobs = jnp.asarray(padded(logprobs), jnp.float32)

    def total(logprobs):
        return policy_loss(logprobs, jnp.ones_like(logprobs), batch, clip=clip)

    (loss, metrics), gradient = jax.value_and_grad(total, has_aux=True)(logprobs)
    gradient = np.asarray(gradient)
    assert not gradient[rows:].any()
    assert not gradient[:, columns:].any()
    return float(loss), gradient[:rows, :columns], jax.device_get(metrics.summarise())


def random_case(seed=0, shape=(3, 17)):
    rng = np.random.default_rng(seed)
    mask = rng.random(shape) < 0.7
    mask[0, 0] = True
    logprobs = -rng.exponential(size=shape)
    old = logprobs - rng.normal(scale=0.5, size=shape)
    advantages = rng.normal(size=shape)
    advantages[1, :4] = 0
    positive = np.where(mask & (advantages > 0), 0.1 / max((mask & (advantages > 0)).sum(), 1), 0)
    return logprobs, rollouts(mask, advantages, old, positive_weights=positive)


def oracle(logprobs, batch, clip):
    """Loss and its gradient token by token, from the printed formulas, float64."""
    mask, advantages, old, positive = (
        np.asarray(x, np.float64)
        for x in (batch.mask, batch.advantages, batch.old_logprobs, batch.positive_weights)
    )
    loss, gradient, count = 0.0, np.zeros(logprobs.shape), mask.sum()
    for cell in zip(*np.nonzero(mask), strict=True):
        ratio, advantage = np.exp(logprobs[cell] - old[cell]), advantages[cell]
        low, high = 1 - clip.low, 1 + clip.high
        bounded = min(max(ratio, low), high)
        value, weight = min(ratio * advantage, bounded * advantage), ratio
        keep = clip.variant == "gppo"
        if advantage > 0 and ratio > high:
            weight = keep * high
        if advantage < 0 and ratio < low:
            weight = keep * low
        if clip.dual is not None and advantage < 0 and ratio > clip.dual:
            value, weight = clip.dual * advantage, 0.0
        loss -= value / count + positive[cell] * logprobs[cell]
        gradient[cell] = -weight * advantage / count - positive[cell]
    return loss, gradient


@pytest.mark.parametrize("dual", [None, 1.5])
@pytest.mark.parametrize("variant", SURROGATES)
def test_loss_equals_oracle(variant, dual):
    clip = Clip(dual=dual, variant=variant)
    logprobs, batch = random_case()
    loss, gradient, metrics = loss_of(logprobs, batch, clip)
    expected, expected_gradient = oracle(logprobs, batch, clip)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-8)
    mask = np.asarray(batch.mask)[:3, :17]
    log_ratio = (logprobs - np.asarray(batch.old_logprobs)[:3, :17])[mask]
    np.testing.assert_allclose(metrics["ratio/max"], np.exp(log_ratio).max(), rtol=1e-5)
    np.testing.assert_allclose(metrics["kl"], np.mean(np.exp(log_ratio) - 1 - log_ratio), rtol=1e-4)
    positive = np.asarray(batch.positive_weights)[:3, :17] > 0
    np.testing.assert_allclose(metrics["nll_positive"], -logprobs[positive].mean(), rtol=1e-5)
    assert metrics["tokens/trained"] == mask.sum()
    np.testing.assert_allclose(metrics["entropy"], 1.0)


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_token_mean_does_not_depend_on_micro_batches(pieces):
    """trl#3021: 2 tokens of loss 1 and 6 tokens of loss 3 are 2.5, not the mean of means, 2.0."""
    mask = np.arange(6) < np.array([[2], [6]])
    batch = rollouts(mask, np.array([[-1.0], [-3.0]]), np.full((2, 6), -2.0))
    used = min(pieces, 2)
    batch = jax.tree.map(lambda x: x[:2].reshape(used, 2 // used, SHAPE[1]), batch)
    if pieces == 4:  # two more pieces that are not used, full of NaN
        unused = jax.tree.map(
            lambda x: jnp.full_like(x, jnp.nan if x.dtype == jnp.float32 else 1), batch
        )
        batch = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), batch, unused)

    def loss_fn(params, piece):
        logprobs = piece.old_logprobs + params["shift"]
        return policy_loss(logprobs, jnp.zeros_like(logprobs), piece, clip=Clip())

    params = {"shift": jnp.zeros(())}
    (loss, metrics), gradient = loss_and_gradient(loss_fn, params, batch, used)
    assert float(loss) == 2.5
    assert float(gradient["shift"]) == 2.5
    assert int(metrics.sums["tokens/trained"]) == 8

    optimizer = optax.identity()
    step = make_step(loss_fn, optimizer=optimizer)
    state, values = step(init_state(params, optimizer), batch, used, 0.01)
    assert float(values["loss"]) == float(values["grad_norm"]) == 2.5
    np.testing.assert_allclose(float(state.params["shift"]), -0.025, rtol=1e-6)
    assert int(values["updates_skipped"]) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -91.0, 1e30])
@pytest.mark.parametrize("variant", SURROGATES)
def test_masked_tokens_contribute_nothing(variant, bad):
    clip = Clip(variant=variant)
    logprobs, batch = random_case(1)
    mask = np.asarray(batch.mask)
    old = np.where(mask, np.asarray(batch.old_logprobs), bad)
    dirty = batch.replace(
        old_logprobs=jnp.asarray(old, jnp.float32), sampler_logprobs=jnp.asarray(old, jnp.float32)
    )
    loss, gradient, metrics = loss_of(logprobs, dirty, clip)
    clean = loss_of(logprobs, batch, clip)
    assert loss == clean[0]
    np.testing.assert_array_equal(gradient, clean[1])
    np.testing.assert_array_equal(gradient[~mask[:3, :17]], 0)
    for name, value in metrics.items():
        np.testing.assert_array_equal(value, clean[2][name], err_msg=name)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("variant", SURROGATES)
def test_ratio_beyond_float32(variant, advantage):
    """prime-rl#2972: trainer -2, sampler -91, a ratio of e^89."""
    clip = Clip(variant=variant)
    logprobs, old = np.array([[-2.0, -1.0]]), np.array([[-91.0, -1.0]])
    loss, gradient, metrics = loss_of(logprobs, rollouts([[1, 1]], advantage, old), clip)
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()
    assert all(np.isfinite(v).all() for k, v in metrics.items() if k != "nll_positive")
    masked, masked_gradient, _ = loss_of(logprobs, rollouts([[0, 1]], advantage, old), clip)
    assert masked == -advantage
    np.testing.assert_array_equal(masked_gradient, [[0, -advantage]])


def test_clip_fractions():
    """trl#3032: fractions of tokens, each cell apart, and none of the masked tokens."""
    ratio = np.array([[0.5, 1.5, 0.5, 1.5, 9.0]])
    batch = rollouts([[1, 1, 1, 1, 0]], np.array([[1, 1, -1, -1, 1.0]]), np.zeros((1, 5)))
    _, _, metrics = loss_of(np.log(ratio), batch, Clip(low=0.2, high=0.2))
    fractions = ("clip/neg_low", "clip/pos_high", "outside/pos_low", "outside/neg_high")
    assert [float(metrics[name]) for name in fractions] == [0.25] * 4
    assert float(metrics["ratio/max"]) == 1.5


def test_clip_fraction_cells_are_told_apart():
    """One token in each cell but with other counts, bounds that differ, and A = 0 in none."""
    ratio = np.array([[0.7, 0.7, 0.7, 1.25, 1.25, 1.4, 1.4, 0.5]])
    signs = np.array([[-1, -1, 1, 1, -1, 1, -1, 0.0]])
    batch = rollouts(np.ones((1, 8)), signs, np.zeros((1, 8)))
    _, _, metrics = loss_of(np.log(ratio), batch, Clip(low=0.2, high=0.28))
    assert float(metrics["clip/neg_low"]) == 2 / 8
    assert float(metrics["clip/pos_high"]) == 1 / 8
    assert float(metrics["outside/pos_low"]) == 1 / 8
    assert float(metrics["outside/neg_high"]) == 1 / 8


def test_sampler_gap():
    old, sampled = np.array([[-1.0, -2.0, -3.0]]), np.array([[-1.5, -1.75, np.nan]])
    batch = rollouts([[1, 1, 0]], 1.0, old, sampler_logprobs=sampled)
    _, _, metrics = loss_of(old, batch, Clip())
    assert float(metrics["sampler_gap"]) == 0.375
    assert float(metrics["sampler_gap/max"]) == 0.5


def test_histogram_equals_numpy():
    rng = np.random.default_rng(0)
    values = rng.normal(scale=0.7, size=(4, 500)).astype(np.float32)
    values[0, :6] = [-1000, 1000, -1, 1, 0, 25]
    mask = rng.random(values.shape) < 0.8
    mask[0, :6] = True
    counts = np.asarray(histogram(jnp.asarray(values), jnp.asarray(mask)))
    edges = LOG_RATIO_EDGES.astype(np.float32)
    expected, _ = np.histogram(np.clip(values[mask], -1, 1), bins=edges)
    np.testing.assert_array_equal(counts, expected)
    assert counts.shape == (40,)
    assert counts.sum() == mask.sum()


def test_loss_ignores_sampler_logprobs():
    logprobs, batch = random_case()
    other = batch.replace(sampler_logprobs=batch.sampler_logprobs - 3)
    assert loss_of(logprobs, other, Clip())[0] == loss_of(logprobs, batch, Clip())[0]
