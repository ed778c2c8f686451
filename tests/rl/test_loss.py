# SPDX-License-Identifier: Apache-2.0
"""The policy loss against a float64 oracle, its masking, and extreme ratios."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from klear_jax.core.batch import RolloutBatch
from klear_jax.rl.loss import PLAIN, policy_loss
from klear_jax.rl.objective import Objective
from klear_jax.rl.surrogates import READS, SURROGATES, Clip, gradient_weight
from klear_jax.train.state import init_state
from klear_jax.train.step import make_step

SHAPE = (4, 20)
"""Of every batch, masked where a case is smaller: operations are compiled once."""


def padded(x):
    x = np.asarray(x)
    return np.pad(x, [(0, full - size) for full, size in zip(SHAPE, x.shape, strict=True)])


def rollouts(mask, advantages, old_logprobs, **changes):
    """A batch in token mean, one response a row; what the loss does not read is 0."""
    mask = np.asarray(mask, bool)
    integers = np.zeros(mask.shape, np.int32)
    fields = {
        "tokens": integers, "targets": integers, "positions": integers, "segments": integers + 1,
        "mask": mask,
        "loss_weights": mask / mask.sum(),
        "positive_weights": np.zeros(mask.shape),
        "advantages": np.where(mask, advantages, 0.0),
        "old_logprobs": old_logprobs,
        "old_entropy": np.ones(mask.shape),
        "reference_logprobs": np.zeros(mask.shape),
        "sampler_logprobs": old_logprobs,
    }  # fmt: skip
    fields |= changes
    fields = {k: padded(np.broadcast_to(v, mask.shape)) for k, v in fields.items()}
    floats = {k: jnp.asarray(v, v.dtype if v.dtype.kind in "bi" else jnp.float32)
              for k, v in fields.items()}  # fmt: skip
    return RolloutBatch(**floats)


def loss_of(logprobs, batch, clip, objective=PLAIN):
    """Loss, gradient and summarised metrics."""
    rows, columns = np.shape(logprobs)
    logprobs = jnp.asarray(padded(logprobs), jnp.float32)

    def total(logprobs):
        entropy = jnp.where(batch.mask, 1.0, jnp.nan)
        return policy_loss(logprobs, entropy, batch, clip=clip, objective=objective)

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


def values(log_ratio, advantages, clip):
    """The objective of every token as the papers print it, in float64; None for other variants."""
    ratio, low, high = np.exp(log_ratio), 1 - clip.low, 1 + clip.high
    name = clip.variant
    if name == "reinforce":
        return advantages
    if name == "unclipped":
        return ratio * advantages
    if name in ("cispo", "cispo_upper"):
        return np.clip(ratio, low if name == "cispo" else 0, high) * advantages
    if name == "sapo":
        tau = np.where(advantages > 0, clip.tau_positive, clip.tau_negative)
        return 4 / tau / (1 + np.exp(-tau * (ratio - 1))) * advantages
    if name == "aspo":
        return np.minimum(np.exp(-np.sign(advantages) * log_ratio), clip.dual or 1e9) * advantages
    if name not in ("ppo", "gppo", "gppo_high", "gppo_low", "ce_gppo"):
        return None
    bounded = np.clip(ratio, low, high)
    if name == "ce_gppo":
        bounded = np.where(ratio > high, clip.beta_high * high, bounded)
        bounded = np.where(ratio < low, clip.beta_low * low, bounded)
        outside = (ratio > high) & (advantages > 0) | (ratio < low) & (advantages < 0)
        value = np.where(outside, bounded, ratio) * advantages
    else:
        value = np.minimum(ratio * advantages, bounded * advantages)
    beyond = (advantages < 0) & (ratio > (clip.dual or 1e9))
    return np.where(beyond, (clip.dual or 0) * advantages, value)


def oracle(logprobs, batch, clip):
    """Loss and its gradient from the printed formulas and the closed gradient weights, float64."""
    rows, columns = logprobs.shape
    mask, advantages, old, positive = (
        np.asarray(x, np.float64)[:rows, :columns]
        for x in (batch.mask, batch.advantages, batch.old_logprobs, batch.positive_weights)
    )
    log_ratio = np.where(mask, logprobs - old, 0)
    share = mask / mask.sum()
    value = values(log_ratio, advantages, clip)
    loss = None if value is None else -(share * value).sum() - (positive * logprobs).sum()
    weight = gradient_weight(clip.variant, log_ratio, advantages, clip)
    return loss, -share * weight * advantages - positive


def tuned(variant, dual=None):
    """Every number that the variant reads away from its default."""
    own = {"dual": dual, "beta_low": 0.5, "beta_high": 0.75, "tau_positive": 1.2,
           "tau_negative": 0.9}  # fmt: skip
    return Clip(variant=variant, **{name: own[name] for name in READS[variant] if name in own})


@pytest.mark.parametrize(
    ("variant", "dual"),
    [(v, dual) for v in SURROGATES for dual in (None, 1.5) if dual is None or "dual" in READS[v]],
)
def test_loss_equals_oracle(variant, dual):
    clip = tuned(variant, dual)
    logprobs, batch = random_case()
    loss, gradient, metrics = loss_of(logprobs, batch, clip)
    expected, expected_gradient = oracle(logprobs, batch, clip)
    if expected is not None:
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


def test_unused_micro_batches_contribute_nothing():
    """Two pieces of 2 and 6 tokens, then two that hold NaN: 2.5 (trl#3021), and no NaN."""
    mask = np.arange(6) < np.array([[2], [6]])
    batch = rollouts(mask, np.array([[-1.0], [-3.0]]), np.full((2, 6), -2.0))
    batch = jax.tree.map(lambda x: x[:2].reshape(2, 1, SHAPE[1]), batch)
    unused = jax.tree.map(
        lambda x: jnp.full_like(x, jnp.nan if x.dtype == jnp.float32 else 1), batch
    )
    batch = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), batch, unused)

    def loss_fn(params, piece):
        logprobs = piece.old_logprobs + params["shift"]
        return policy_loss(logprobs, jnp.zeros_like(logprobs), piece, clip=Clip())

    optimizer = optax.identity()
    step = make_step(loss_fn, optimizer=optimizer)
    state, values = step(init_state({"shift": jnp.zeros(())}, optimizer), batch, 2, 0.01)
    assert float(values["loss"]) == float(values["grad_norm"]) == 2.5
    assert int(values["tokens/trained"]) == 8
    np.testing.assert_allclose(float(state.params["shift"]), -0.025, rtol=1e-6)
    assert int(values["updates_skipped"]) == 0


BAD = (np.nan, np.inf, -np.inf, -91.0, 1e30)
FULL = Objective(kl_coef=0.1, tis="sequence", erc=(0.9, 1.1), entropy_coef=0.01)


@pytest.mark.parametrize(
    ("variant", "level", "objective"),
    [
        *((variant, "token", PLAIN) for variant in SURROGATES),
        ("ppo", "sequence", FULL),
        ("gppo", "sequence_token", FULL),
        ("unclipped", "geometric", FULL),
    ],
)
def test_masked_tokens_contribute_nothing(variant, level, objective):
    """Whatever stands there: each of `BAD` in turn, in every array of log-probs and entropies."""
    clip = Clip(variant=variant, level=level)
    logprobs, batch = random_case(1)
    mask = np.asarray(batch.mask)
    bad = np.resize(np.float32(BAD), mask.shape)
    changes = {
        name: jnp.asarray(np.where(mask, getattr(batch, name), bad))
        for name in ("old_logprobs", "sampler_logprobs", "old_entropy", "reference_logprobs")
    }
    dirty = dataclasses.replace(batch, **changes)
    spoiled = np.where(mask[:3, :17], logprobs, bad[:3, :17])
    loss, gradient, metrics = loss_of(spoiled, dirty, clip, objective)
    clean = loss_of(logprobs, batch, clip, objective)
    assert loss == clean[0]
    np.testing.assert_array_equal(gradient, clean[1])
    np.testing.assert_array_equal(gradient[~mask[:3, :17]], 0)
    for name, value in metrics.items():
        np.testing.assert_array_equal(value, clean[2][name], err_msg=name)


@pytest.mark.parametrize("variant", SURROGATES)
def test_ratio_beyond_float32(variant):
    """prime-rl#2972: trainer -2, sampler -91, a ratio of e^89, for either sign of A."""
    clip = Clip(variant=variant)
    logprobs, old = np.array([[-2.0, -1.0]] * 2), np.array([[-91.0, -1.0]] * 2)
    signs = np.array([[1.0], [-1.0]])
    loss, gradient, metrics = loss_of(logprobs, rollouts(np.ones((2, 2)), signs, old), clip)
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()
    # A mean over no token is the only metric without a value.
    assert all(np.isfinite(v).all() for k, v in metrics.items() if k != "nll_positive")
    mask = np.array([[0, 1], [0, 1]])
    masked, masked_gradient, _ = loss_of(logprobs, rollouts(mask, signs, old), clip)
    # A token at r = 1 has the value A, but for sapo, whose gate is (4 / tau) / 2.
    both = 2 / clip.tau_positive - 2 / clip.tau_negative if variant == "sapo" else 0
    assert masked == pytest.approx(-both / 2, abs=1e-6)
    np.testing.assert_array_equal(masked_gradient, [[0, -0.5], [0, 0.5]])


def test_loss_ignores_sampler_logprobs():
    logprobs, batch = random_case()
    other = dataclasses.replace(batch, sampler_logprobs=batch.sampler_logprobs - 3)
    assert loss_of(logprobs, other, Clip())[0] == loss_of(logprobs, batch, Clip())[0]
