# SPDX-License-Identifier: Apache-2.0
"""The frozen-rollout bench against numpy oracles, and against the gradient that training takes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from klear_jax.core.batch import RolloutBatch
from klear_jax.model import params as params_lib
from klear_jax.model.config import ModelConfig
from klear_jax.rl import frozen, frozen_tokens
from klear_jax.rl.frozen import Scored, Variant
from klear_jax.rl.loss import make_policy_loss
from klear_jax.rl.minibatch import MiniBatch
from klear_jax.rl.objective import Objective
from klear_jax.rl.surrogates import SURROGATES, Clip, gradient_weight
from klear_jax.train.step import loss_and_gradient, make_scorer

MODEL = ModelConfig(
    layers=1, d_model=16, q_heads=2, kv_heads=1, head_dim=8, d_ff=24, vocab=64, live_vocab=61,
    tied=True, max_positions=64, init_range=0.3,
)  # fmt: skip
SHAPE = (2, 3, 12)
"""Micro-batches, rows, cells; each row has two responses of 2 + 4 cells."""
PLAIN = Objective(positive_nll=0.0)
FREE = Variant(Clip(variant="unclipped"))


def minibatch(seed):
    """Weights are uneven and advantages constant in a response, one of them 0."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 61, SHAPE).astype(np.int32)
    segments = np.broadcast_to(np.repeat([1, 2], 6), SHAPE).astype(np.int32)
    mask = np.broadcast_to(np.tile([0, 0, 1, 1, 1, 1], 2).astype(bool), SHAPE)
    advantages = np.repeat(rng.normal(size=(*SHAPE[:2], 2)), 6, axis=-1)
    advantages[0, 0, :6] = 0
    weights = rng.uniform(0.5, 1.5, SHAPE) / mask.sum()
    fields = {
        "tokens": ids, "targets": np.roll(ids, -1, axis=-1), "segments": segments, "mask": mask,
        "positions": np.broadcast_to(np.tile(np.arange(6), 2), SHAPE).astype(np.int32),
        "loss_weights": np.where(mask, weights, 0),
        "positive_weights": np.where(mask & (advantages > 0), 0.01, 0),
        "advantages": np.where(mask, advantages, 0),
        "old_logprobs": rng.normal(-2, 0.3, SHAPE), "old_entropy": np.full(SHAPE, 1.0),
        "reference_logprobs": rng.normal(-2, 0.3, SHAPE),
        "sampler_logprobs": np.full(SHAPE, -2.0),
    }  # fmt: skip
    floats = {k: v if v.dtype.kind in "bi" else v.astype(np.float32) for k, v in fields.items()}
    return MiniBatch(RolloutBatch(**jax.tree.map(jnp.asarray, floats)), SHAPE[0], 0.0)


def scored_by_hand(seed=0, spread=0.5):
    """Log-ratios of a given spread, no model."""
    rng = np.random.default_rng(seed + 100)
    made = []
    for number in range(2):
        m = minibatch(seed + number)
        change = jnp.asarray(rng.normal(0, spread, SHAPE), jnp.float32)
        entropy = jnp.asarray(rng.uniform(0.9, 1.1, SHAPE), jnp.float32)
        made.append(Scored(m, m.batch.old_logprobs + change, entropy))
    return made


def slopes_of(scored, variants, objective=PLAIN):
    slopes = frozen.token_slopes(scored, variants, objective)
    return slopes, {name: frozen_tokens.values_at(scored, s) for name, s in slopes.items()}


# --- tokens -----------------------------------------------------------------------------------


def test_loss_and_weights_equal_the_closed_forms():
    scored = scored_by_hand()
    variants = {n: Variant(Clip(variant=n, beta_low=1.0)) for n in SURROGATES}
    slopes, flat = slopes_of(scored, variants)
    tokens = frozen_tokens.tokens_of(scored)
    l, a = tokens.log_ratio, tokens.advantages
    for name, variant in variants.items():
        expected = gradient_weight(name, l, a, variant.clip)
        weights = frozen_tokens.gradient_weights(tokens, flat[name])
        np.testing.assert_array_equal(np.isnan(weights), a == 0)
        np.testing.assert_allclose(weights[a != 0], expected[a != 0], rtol=2e-5, atol=1e-6)
    terms = np.minimum(np.exp(l) * a, np.clip(np.exp(l), 0.8, 1.28) * a) * tokens.weights
    losses = sum(part.loss for part in slopes["ppo"])
    np.testing.assert_allclose(losses, -terms.sum(), rtol=1e-5)
    assert [p.loss for p in slopes["gppo"]] == pytest.approx([p.loss for p in slopes["ppo"]])


def test_masses_equal_sums_over_tokens():
    scored = scored_by_hand()
    clip = Clip(variant="gppo")
    _, flat = slopes_of(scored, {"gppo": Variant(clip), "free": FREE})
    tokens = frozen_tokens.tokens_of(scored)
    found = frozen_tokens.masses(tokens, clip, flat["gppo"], flat["free"], clip)
    l, a, w = tokens.log_ratio, tokens.advantages, tokens.weights
    high, low = (a > 0) & (l > np.log(1.28)), (a < 0) & (l < np.log(0.8))
    full = np.abs(w * a) * np.exp(l)
    assert high.sum() > 2
    assert low.sum() > 2
    expected = {
        "clipped_pos": high.mean(),
        "clipped_neg": low.mean(),
        "kept_pos": 1.28 * np.abs(w * a)[high].sum() / full.sum(),
        "kept_neg": 0.8 * np.abs(w * a)[low].sum() / full.sum(),
        # Below the lower bound GPPO has more than the unclipped objective, so nothing is lost.
        "lost_pos": (full - 1.28 * np.abs(w * a))[high].sum() / full.sum(),
        "lost_neg": 0.0,
        "no_gradient": 0.0,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    kept = found["kept_pos"] + found["kept_neg"]
    total = 1 + kept - (full[high].sum() + full[low].sum()) / full.sum()
    np.testing.assert_allclose(found["on_ppo_clipped"], kept / total, rtol=1e-4)


def test_ppo_and_erc_leave_tokens_without_gradient():
    scored = scored_by_hand()
    clip = Clip(variant="ppo")
    variants = {"ppo": Variant(clip), "erc": Variant(Clip(), erc=(0.95, 1.05)), "free": FREE}
    _, flat = slopes_of(scored, variants)
    tokens = frozen_tokens.tokens_of(scored)
    active = tokens.advantages != 0
    ppo = frozen_tokens.masses(tokens, clip, flat["ppo"], flat["free"], clip)
    dropped = np.logical_or(*tokens.clipped(clip))
    assert ppo["no_gradient"] == pytest.approx(dropped.sum() / active.sum())
    assert ppo["kept_pos"] == ppo["kept_neg"] == ppo["on_ppo_clipped"] == 0
    erc = frozen_tokens.masses(tokens, Clip(), flat["erc"], flat["free"], clip)
    ratio = tokens.entropy / tokens.old_entropy
    outside = active & ~((ratio > 0.95) & (ratio < 1.05))
    assert erc["no_gradient"] == pytest.approx(outside.sum() / active.sum())


def test_same_policy_makes_all_variants_equal():
    scored = [
        dataclasses.replace(s, logprobs=s.minibatch.batch.old_logprobs, entropy=jnp.ones(SHAPE))
        for s in scored_by_hand()
    ]
    gspo = Clip(variant="ppo", level="sequence", low=3e-4, high=4e-4)
    variants = {n: Variant(Clip(variant=n)) for n in SURROGATES}
    variants |= {
        "erc": Variant(Clip(), erc=(0.95, 1.05)),
        "gspo_token": Variant(dataclasses.replace(gspo, level="sequence_token")),
        "gmpo": Variant(Clip(variant="unclipped", level="geometric")),
    }
    _, flat = slopes_of(scored, variants)
    for name, slopes in flat.items():
        if name != "gmpo":  # with uneven weights a sequence's gradient is spread over its tokens
            np.testing.assert_allclose(slopes, flat["ppo"], rtol=1e-5, atol=1e-9, err_msg=name)
    assert frozen_tokens.policy_change(frozen_tokens.tokens_of(scored))["log_ratio_max_abs"] == 0


def test_gppo_equals_ppo_where_no_bound_is_reached():
    scored = scored_by_hand(spread=0.01)
    _, flat = slopes_of(scored, {n: Variant(Clip(variant=n)) for n in ("ppo", "gppo")})
    np.testing.assert_array_equal(flat["ppo"], flat["gppo"])


def test_matched_widths_clip_as_many_tokens():
    scored = scored_by_hand(spread=0.6)
    tokens = frozen_tokens.tokens_of(scored)
    base = Clip(variant="ppo", low=0.2, high=0.2)
    clip = Clip(variant="ppo", level="sequence", low=3e-4, high=4e-4)
    matched = frozen_tokens.matched_clip(tokens, clip, base)
    assert (matched.level, matched.variant) == ("sequence", "ppo")
    for own, wanted in zip(tokens.clipped(matched), tokens.clipped(base), strict=True):
        # Whole responses of four tokens are clipped, so it may be up to one response short.
        assert wanted.sum() - 4 <= own.sum() <= wanted.sum()
    means = tokens.leveled("sequence")
    for response in np.unique(tokens.response):
        here = tokens.response == response
        assert here.sum() == 4
        np.testing.assert_allclose(means[here], tokens.log_ratio[here].mean())


def test_largest_gives_a_repeated_text_once():
    scored = scored_by_hand()
    batch = scored[0].minibatch.batch
    # Row 1 repeats row 0 in ids and in log-probs; all have one sign of A.
    repeat = {
        name: getattr(batch, name).at[0, 1].set(getattr(batch, name)[0, 0])
        for name in ("tokens", "targets", "old_logprobs")
    }
    batch = dataclasses.replace(batch, **repeat)
    logprobs = scored[0].logprobs.at[0, 1].set(scored[0].logprobs[0, 0])
    one = [Scored(dataclasses.replace(scored[0].minibatch, batch=batch), logprobs, logprobs * 0)]
    tokens = frozen_tokens.tokens_of(one)
    score = np.where(tokens.cell[:, 2] < 2, 1.0 + tokens.cell[:, 3], 0.0)
    picks = frozen_tokens.largest(score, tokens.cell[:, 1] == 0, tokens, one, 3)
    assert [p.copies for p in picks] == [2, 2, 2]
    assert [tokens.cell[p.index, 3] for p in picks] == [11, 10, 9]
    before, token = frozen_tokens.text_before(one, tokens, picks[1].index)
    np.testing.assert_array_equal(before, np.asarray(batch.tokens)[0, 0, 6:11])
    assert token == batch.targets[0, 0, 10]
    assert frozen_tokens.largest(score * 0, score > 0, tokens, one, 3) == []


def test_cells_follow_sign_and_bound():
    scored = scored_by_hand()
    tokens = frozen_tokens.tokens_of(scored)
    cells = frozen_tokens.cells_of(tokens, Clip())
    high, low = tokens.clipped(Clip())
    np.testing.assert_array_equal(cells == 0, high)
    np.testing.assert_array_equal(cells == 1, low)
    assert set(cells[tokens.advantages == 0]) == {4}


# --- gradients --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def params():
    return params_lib.init(MODEL, 0)


@pytest.fixture(scope="module")
def near(params):
    """Two mini-batches whose old policy is the model's, moved a little."""
    score = make_scorer(MODEL, temperature=0.7)
    rng = np.random.default_rng(5)
    made = []
    for number in range(2):
        m = minibatch(number)
        logprobs, entropy = score(params, m.batch, m.microbatches)
        moved = logprobs + jnp.asarray(rng.normal(0, 0.4, SHAPE), jnp.float32)
        batch = dataclasses.replace(m.batch, old_logprobs=moved, old_entropy=entropy * 1.03)
        made.append(dataclasses.replace(m, batch=batch))
    return frozen.score_minibatches(params, made, score)


VARIANTS = {
    "ppo": Variant(Clip(variant="ppo")),
    "gppo": Variant(Clip()),
    "gspo": Variant(Clip(variant="ppo", level="sequence", low=0.1, high=0.1)),
    "nothing": Variant(Clip(variant="ppo"), erc=(0.99, 1.01)),
}
WHOLE = Objective(positive_nll=0.1, kl_coef=0.3, entropy_coef=0.2)


@pytest.mark.parametrize("name", ["gppo", "gspo"])
def test_gradients_are_those_of_training(params, near, name):
    """The slopes pulled back through the model equal the derivative of the whole loss."""
    alone = frozen.token_slopes(near, {name: VARIANTS[name]}, WHOLE)
    whole = {name: frozen.added(alone[name], frozen.other_slopes(near, WHOLE))}
    row = frozen.gradients(params, near, whole, frozen.make_pullback(MODEL, temperature=0.7))[0]
    loss_fn = make_policy_loss(MODEL, clip=VARIANTS[name].clip, objective=WHOLE, temperature=0.7)
    direct = jax.jit(lambda p, b: loss_and_gradient(loss_fn, p, b, SHAPE[0]))
    expected = np.zeros_like(row)
    for s, part in zip(near, whole[name], strict=True):
        (loss, _), gradient = direct(params, s.minibatch.batch)
        assert part.loss == pytest.approx(float(loss), rel=1e-4, abs=1e-6)
        leaves = [np.ravel(x) for x in jax.tree.leaves(gradient)]
        expected += np.concatenate(leaves) / len(near)
    np.testing.assert_allclose(row, expected, rtol=1e-3, atol=1e-6)


def test_norms_and_cosines(params, near):
    pull = frozen.make_pullback(MODEL, temperature=0.7)
    done = []
    rows = frozen.gradients(
        params, near, frozen.token_slopes(near, VARIANTS, PLAIN), pull, done.append
    )
    assert done == list(VARIANTS)
    norms, cosines = frozen.norms_and_cosines(rows)
    np.testing.assert_allclose(norms, np.linalg.norm(rows.astype(np.float64), axis=1))
    np.testing.assert_array_equal(cosines, cosines.T)
    np.testing.assert_array_equal(np.diag(cosines), [1, 1, 1, np.nan])
    unit = rows[:3].astype(np.float64) / norms[:3, None]
    np.testing.assert_allclose(cosines[:3, :3], unit @ unit.T, atol=1e-12)
    assert np.isnan(cosines[3]).all()  # every token was dropped: no direction
    assert cosines[0, 1] < 0.999


def test_norms_over_several_blocks(monkeypatch):
    rows = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    whole = frozen.norms_and_cosines(rows)
    monkeypatch.setattr(frozen, "BLOCK", 7)
    for one, other in zip(frozen.norms_and_cosines(rows), whole, strict=True):
        np.testing.assert_allclose(one, other)


def test_a_rollout_without_mini_batches_is_refused(params):
    with pytest.raises(ValueError, match="no group of that step could teach anything"):
        frozen.score_minibatches(params, [], make_scorer(MODEL, temperature=1.0))
