# SPDX-License-Identifier: Apache-2.0
"""Gradient mass, clip cells, histograms and their deciles, drift: all against numpy."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from klear_jax.core.batch import RolloutBatch
from klear_jax.rl import telemetry as lib
from klear_jax.rl.loop import BY_UPDATE, merge_updates
from klear_jax.rl.loss import PLAIN, policy_loss
from klear_jax.rl.objective import Objective
from klear_jax.rl.surrogates import SURROGATES, Clip, gradient_weight
from klear_jax.train.step import loss_and_gradient

SHAPE = (4, 20)
"""Of every small batch: operations are compiled once."""


def case(seed=0, shape=SHAPE, **changes):
    """(log-ratios, entropies, batch) of four responses, one a row; old log-probs are -2."""
    rng = np.random.default_rng(seed)
    mask = rng.random(shape) < 0.8
    old = np.full(shape, -2.0)
    fields = {
        "tokens": np.zeros(shape, np.int32), "targets": np.zeros(shape, np.int32),
        "positions": np.arange(shape[1]) + np.zeros(shape, np.int32),
        "segments": np.ones(shape, np.int32),
        "mask": mask,
        "loss_weights": mask / np.maximum(mask.sum(axis=1, keepdims=True), 1) / shape[0],
        "positive_weights": np.zeros(shape),
        "advantages": mask * rng.normal(size=shape),
        "old_logprobs": old, "old_entropy": np.ones(shape), "reference_logprobs": old,
        "sampler_logprobs": old + rng.normal(scale=0.1, size=shape),
    }  # fmt: skip
    fields |= changes
    arrays = {k: np.broadcast_to(v, shape) for k, v in fields.items()}
    batch = RolloutBatch(
        **{k: jnp.asarray(v, np.float32 if v.dtype.kind == "f" else None)
           for k, v in arrays.items()}
    )  # fmt: skip
    log_ratio = rng.normal(scale=0.5, size=shape).astype(np.float32)
    entropy = rng.lognormal(-1, 1.5, shape).astype(np.float32)
    return log_ratio, entropy, batch


def measured(log_ratio, entropy, batch, clip, objective=PLAIN):
    logprobs = jnp.asarray(log_ratio) + batch.old_logprobs
    _, metrics = policy_loss(logprobs, jnp.asarray(entropy), batch, clip=clip, objective=objective)
    return {k: np.asarray(v) for k, v in metrics.summarise().items()}


def masses(log_ratio, batch, clip):
    """|w W A| of every token, 0 where it is masked, in float64."""
    advantages, mask = np.asarray(batch.advantages), np.asarray(batch.mask)
    weight = gradient_weight(clip.variant, log_ratio, advantages, clip)
    return np.where(mask, np.abs(np.asarray(batch.loss_weights) * weight * advantages), 0.0)


def clipped_tokens(log_ratio, batch, clip):
    mask, advantages = np.asarray(batch.mask), np.asarray(batch.advantages)
    ratio = np.exp(log_ratio)
    high, low = ratio > 1 + clip.high, ratio < 1 - clip.low
    return mask & ((advantages > 0) & high | (advantages < 0) & low)


# --- gradient mass ----------------------------------------------------------------------------


@pytest.mark.parametrize("variant", SURROGATES)
def test_masses_are_those_of_the_closed_form(variant):
    clip = Clip(variant=variant)
    log_ratio, entropy, batch = case()
    metrics = measured(log_ratio, entropy, batch, clip)
    mass = masses(log_ratio, batch, clip)
    plain = masses(log_ratio, batch, Clip(variant="unclipped"))
    clipped = clipped_tokens(log_ratio, batch, clip)
    lost = np.maximum(plain - mass, 0)
    np.testing.assert_allclose(
        metrics["mass/clipped"], mass[clipped].sum() / mass.sum(), rtol=1e-5, atol=1e-9
    )
    np.testing.assert_allclose(metrics["mass/lost"], lost.sum() / plain.sum(), rtol=2e-5, atol=1e-7)
    rows = (np.asarray(batch.mask), clipped, mass, mass * clipped, plain, lost)
    for sign, got in zip((1, -1), metrics["entropy_histogram"], strict=True):
        here = np.sign(np.asarray(batch.advantages)) == sign
        for name, row, bins in zip(lib.ENTROPY_ROWS, rows, got, strict=True):
            expected, _ = np.histogram(entropy[here], lib.ENTROPY_EDGES, weights=1.0 * row[here])
            np.testing.assert_allclose(bins, expected, rtol=1e-4, atol=1e-7, err_msg=name)


def test_clipped_tokens_have_mass_under_gppo_and_cispo_and_none_under_ppo():
    log_ratio, entropy, batch = case()
    share = {
        variant: float(measured(log_ratio, entropy, batch, Clip(variant=variant))["mass/clipped"])
        for variant in ("ppo", "gppo", "cispo", "cispo_upper", "aspo")
    }
    assert share["ppo"] == share["aspo"] == 0
    assert min(share["gppo"], share["cispo"], share["cispo_upper"]) > 0.1


def test_unclipped_loses_nothing():
    log_ratio, entropy, batch = case()
    metrics = measured(log_ratio, entropy, batch, Clip(variant="unclipped"))
    assert metrics["mass/lost"] == 0
    assert metrics["mass/clipped"] > 0.1


def test_mass_lost_counts_what_erc_drops():
    """With nothing clipped, the share of the mass on tokens that entropy-ratio clipping drops."""
    log_ratio, entropy, batch = case()
    clip = Clip(variant="unclipped")
    metrics = measured(log_ratio, entropy, batch, clip, Objective(erc=(0.5, 1.5)))
    mass = masses(log_ratio, batch, clip)
    dropped = ~((entropy > 0.5) & (entropy < 1.5))
    np.testing.assert_allclose(metrics["mass/lost"], mass[dropped].sum() / mass.sum(), rtol=1e-5)
    mask = np.asarray(batch.mask)
    np.testing.assert_allclose(metrics["erc/dropped"], dropped[mask].mean(), rtol=1e-6)


@pytest.mark.parametrize("level", ["sequence", "sequence_token"])
def test_masses_of_a_sequence_are_those_of_its_ratio(level):
    """Cells and masses by the ratio of the response, which all of its tokens share."""
    clip = Clip(variant="gppo", level=level)
    log_ratio, entropy, batch = case()
    signs = np.array([[1.0], [1], [-1], [-1]])
    mask = np.asarray(batch.mask)
    batch = dataclasses.replace(batch, advantages=jnp.asarray(mask * signs, jnp.float32))
    shift = np.array([[0.5], [0.0], [-0.5], [0.0]], np.float32)
    log_ratio = 0.1 * log_ratio + shift
    metrics = measured(log_ratio, entropy, batch, clip)
    assert metrics["clip/pos_high"] == pytest.approx(mask[0].sum() / mask.sum())
    assert metrics["clip/neg_low"] == pytest.approx(mask[2].sum() / mask.sum())
    means = np.array([[log_ratio[row][mask[row]].mean(dtype=np.float64)] for row in range(4)])
    mass = masses(np.broadcast_to(means, SHAPE).astype(np.float32), batch, clip)
    share = mass[[0, 2]].sum() / mass.sum()
    np.testing.assert_allclose(metrics["mass/clipped"], share, rtol=1e-5)


def test_gmpo_is_counted_token_by_token():
    """Its clip acts on tokens; a clipped one has no mass, and W of the others is the mean's r."""
    clip = Clip(variant="unclipped", level="geometric")
    log_ratio, entropy, batch = case()
    metrics = measured(log_ratio, entropy, batch, clip)
    share = clipped_tokens(log_ratio, batch, clip).sum() / np.asarray(batch.mask).sum()
    assert metrics["clip"] == pytest.approx(share)
    assert metrics["mass/clipped"] == 0
    assert metrics["mass/lost"] > 0


# --- clip cells -------------------------------------------------------------------------------


def test_cells_of_four_tokens():
    """trl#3032: r = .5, 1.5, .5, 1.5 with A = +, +, -, -: .25 at each bound, .5 in all."""
    mask = np.zeros(SHAPE, bool)
    mask[0, :4] = True
    ratio, advantages = np.full(SHAPE, 9.0), np.ones(SHAPE)
    ratio[0, :4], advantages[0, :4] = [0.5, 1.5, 0.5, 1.5], [1, 1, -1, -1]
    _, entropy, batch = case(mask=mask, advantages=advantages, loss_weights=mask / 4)
    metrics = measured(np.log(ratio), entropy, batch, Clip(low=0.2, high=0.2))
    cells = ("clip/neg_low", "clip/pos_high", "outside/pos_low", "outside/neg_high")
    assert [float(metrics[name]) for name in cells] == [0.25] * 4
    assert float(metrics["clip"]) == 0.5
    assert float(metrics["ratio/max"]) == pytest.approx(1.5)


def test_cells_are_told_apart():
    """One token or two in each cell, bounds that differ, and A = 0 in none."""
    mask = np.zeros(SHAPE, bool)
    mask[0, :8] = True
    ratio, advantages = np.ones(SHAPE), np.zeros(SHAPE)
    ratio[0, :8] = [0.7, 0.7, 0.7, 1.25, 1.25, 1.4, 1.4, 0.5]
    advantages[0, :8] = [-1, -1, 1, 1, -1, 1, -1, 0]
    _, entropy, batch = case(mask=mask, advantages=advantages, loss_weights=mask / 8)
    metrics = measured(np.log(ratio), entropy, batch, Clip(low=0.2, high=0.28))
    expected = {"clip/neg_low": 2, "clip/pos_high": 1, "outside/pos_low": 1, "outside/neg_high": 1}
    assert {name: 8 * float(metrics[name]) for name in expected} == expected
    assert 8 * float(metrics["clip"]) == 3


def test_means_over_the_clipped_tokens():
    log_ratio, entropy, batch = case()
    clip = Clip()
    metrics = measured(log_ratio, entropy, batch, clip)
    clipped, mask = clipped_tokens(log_ratio, batch, clip), np.asarray(batch.mask)
    values = {"entropy": entropy, "logprob": log_ratio - 2, "position": np.asarray(batch.positions)}
    for name, value in values.items():
        np.testing.assert_allclose(metrics[f"clip/{name}"], value[clipped].mean(), rtol=1e-5)
        np.testing.assert_allclose(metrics[name], value[mask].mean(), rtol=1e-5)
    # Nothing clipped: a mean over nothing has no value, and the shares are 0.
    still = measured(0 * log_ratio, entropy, batch, clip)
    assert np.isnan(still["clip/entropy"])
    assert still["mass/clipped"] == still["mass/lost"] == still["clip"] == 0


def test_sampler_gap():
    log_ratio, entropy, batch = case()
    mask = np.asarray(batch.mask)
    gap = np.abs(np.asarray(batch.sampler_logprobs) + 2)[mask]
    metrics = measured(log_ratio, entropy, batch, Clip())
    np.testing.assert_allclose(metrics["sampler_gap"], gap.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["sampler_gap/max"], gap.max(), rtol=1e-6)


def test_micro_batches_change_nothing():
    """Shares are divided once: rows with few tokens do not weigh as much as full ones."""
    log_ratio, entropy, batch = case()
    few = np.asarray(batch.mask) & (np.arange(20) < np.array([[20], [3], [9], [1]]))
    weights = jnp.asarray(few / few.sum(), jnp.float32)
    batch = dataclasses.replace(batch, mask=jnp.asarray(few), loss_weights=weights)
    objective = Objective(tis="token", kl_coef=0.1, erc=(0.5, 1.5))
    whole = measured(log_ratio, entropy, batch, Clip(), objective)

    def loss_fn(params, piece):
        shifted, entropies, piece = piece
        logprobs = shifted + piece.old_logprobs + params
        return policy_loss(logprobs, entropies, piece, clip=Clip(), objective=objective)

    cut = jax.tree.map(
        lambda x: x.reshape(4, 1, 20),
        (jnp.asarray(log_ratio), jnp.asarray(entropy), batch),
    )
    (_, metrics), _ = loss_and_gradient(loss_fn, jnp.zeros(()), cut, 4)
    for name, value in metrics.summarise().items():
        np.testing.assert_allclose(value, whole[name], rtol=2e-6, atol=1e-7, err_msg=name)


# --- histograms and what is read from them -----------------------------------------------------


def test_ratio_histogram_equals_numpy():
    rng = np.random.default_rng(0)
    values = rng.normal(scale=0.7, size=(4, 500)).astype(np.float32)
    values[0, :6] = [-1000, 1000, -1, 1, 0, 25]
    mask = rng.random(values.shape) < 0.8
    mask[0, :6] = True
    counts = np.asarray(lib.histogram(jnp.asarray(values), jnp.asarray(mask)))
    edges = lib.LOG_RATIO_EDGES.astype(np.float32)
    expected, _ = np.histogram(np.clip(values[mask], -1, 1), bins=edges)
    np.testing.assert_array_equal(counts, expected)
    assert counts.shape == (40,)
    assert counts.sum() == mask.sum()


@pytest.fixture(scope="module")
def many():
    """20,000 tokens: (entropy, advantages, clipped, mass, unclipped mass) and their histogram."""
    rng = np.random.default_rng(5)
    shape = (4, 5000)
    entropy = np.minimum(rng.lognormal(-1, 1.5, shape), 11.9).astype(np.float32)
    advantages = rng.normal(size=shape).astype(np.float32)
    # High entropies are clipped more often, so that the deciles differ.
    clipped = rng.random(shape) < entropy / (1 + entropy)
    unclipped = np.abs(advantages)
    mass = np.where(clipped, 0.5, 1) * unclipped
    mask = np.ones(shape, bool)
    rows = (mask, clipped, mass, mass * clipped, unclipped, unclipped - mass)
    counts = lib.entropy_histogram(
        jnp.asarray(entropy), tuple(map(jnp.asarray, rows)), jnp.asarray(mask),
        jnp.asarray(advantages),
    )  # fmt: skip
    return entropy, advantages, clipped, mass, unclipped, np.asarray(counts, np.float64)


def test_entropy_histogram_counts_every_token_once(many):
    """Also those beyond its last edge, at 0, and a little below 0 by rounding."""
    entropy, advantages, *_, counts = many
    assert counts[:, 0].sum() == entropy.size
    assert counts[0, 0].sum() == (advantages > 0).sum()
    odd = jnp.asarray([[0.0, -1e-7, 1e-6, 500.0]])
    ones = jnp.ones((1, 4), bool)
    small = np.asarray(lib.entropy_histogram(odd, (ones,), ones, jnp.ones((1, 4))))
    assert small[0, 0, [0, -1]].tolist() == [3, 1]
    assert small.sum() == 4
    # A = 0 teaches nothing and is in neither half.
    assert not np.asarray(lib.entropy_histogram(odd, (ones,), ones, jnp.zeros((1, 4)))).any()


def test_deciles_equal_those_of_sorted_tokens(many):
    """Edges to a bin (a factor of 1.35), shares to 2 points of a tenth's tokens."""
    entropy, advantages, clipped, mass, unclipped, counts = many
    got = lib.by_entropy_decile(counts)
    edges = np.quantile(entropy, np.linspace(0, 1, 11))
    factor = lib.ENTROPY_EDGES[3] / lib.ENTROPY_EDGES[2]
    assert factor < 1.35
    ratio = np.array(got["entropy_deciles/edges"]) / edges
    assert (np.abs(np.log(ratio)) < np.log(factor)).all()
    tenths = np.split(np.argsort(entropy.reshape(-1)), 10)
    flat = [x.reshape(-1) for x in (advantages, clipped, mass, unclipped)]
    for sign, name in ((1, "pos"), (-1, "neg")):
        for place, members in enumerate(tenths):
            sides, cut, kept, full = (x[members][np.sign(flat[0][members]) == sign] for x in flat)
            assert len(sides) > 800
            share = {
                k: got[f"entropy_deciles/{name}_{k}"][place] for k in ("clipped", "kept", "lost")
            }
            assert share["clipped"] == pytest.approx(cut.mean(), abs=0.02)
            total = unclipped.sum()
            assert share["kept"] == pytest.approx(kept[cut].sum() / total, abs=0.002)
            assert share["lost"] == pytest.approx((full - kept).sum() / total, abs=0.002)


def test_tenths_add_up_to_the_whole(many):
    _, advantages, clipped, mass, unclipped, counts = many
    got = lib.by_entropy_decile(counts)
    for sign, name in ((1, "pos"), (-1, "neg")):
        chosen = clipped & (np.sign(advantages) == sign)
        kept, lost = (sum(got[f"entropy_deciles/{name}_{k}"]) for k in ("kept", "lost"))
        assert kept == pytest.approx(mass[chosen].sum() / unclipped.sum(), rel=1e-4)
        assert lost == pytest.approx((unclipped - mass)[chosen].sum() / unclipped.sum(), rel=1e-4)


def histogram_of(*entropies):
    values = jnp.asarray([entropies], jnp.float32)
    ones = jnp.ones(values.shape, bool)
    rows = (ones,) * len(lib.ENTROPY_ROWS)
    return np.asarray(lib.entropy_histogram(values, rows, ones, jnp.ones(values.shape)), np.float64)


def test_deciles_of_nothing_and_of_one_value():
    assert lib.by_entropy_decile(np.zeros_like(histogram_of(1.0))) == {}
    assert lib.readable({"entropy_histogram": np.zeros_like(histogram_of(1.0))}) == {}
    got = lib.by_entropy_decile(histogram_of(*[0.5] * 4))
    edges = np.array(got["entropy_deciles/edges"])
    assert (edges > 0.5 / 1.35).all()
    assert (edges < 0.5 * 1.35).all()
    assert got["entropy_deciles/pos_clipped"] == pytest.approx([1] * 10)
    assert got["entropy_deciles/neg_clipped"] == [0] * 10


def test_no_edge_of_a_tenth_lies_in_an_empty_bin():
    """Half the tokens near 0.001, half near 5: every inner edge is near one of the two."""
    got = lib.by_entropy_decile(histogram_of(*[0.001] * 10, *[5.0] * 10))
    edges = np.array(got["entropy_deciles/edges"])
    near = [np.abs(np.log(edges / value)) < np.log(1.35) for value in (0.001, 5.0)]
    assert (near[0] | near[1]).all()
    assert near[0][:5].all()
    assert near[1][6:].all()


def test_ratio_quantiles_to_a_bin():
    log_ratio = np.random.default_rng(6).normal(scale=0.3, size=5000)
    counts, _ = np.histogram(log_ratio, bins=lib.LOG_RATIO_EDGES)
    got = lib.ratio_quantiles(counts.astype(np.float64))
    assert list(got) == ["ratio/q0.01", "ratio/q0.1", "ratio/q0.5", "ratio/q0.9", "ratio/q0.99"]
    for value, quantile in zip(got.values(), np.quantile(log_ratio, lib.QUANTILES), strict=True):
        assert abs(math.log(value) - quantile) <= 0.05
    assert lib.ratio_quantiles(np.zeros(40)) == {}
    # On policy: all in the bin that begins at r = 1.
    ones = lib.ratio_quantiles(np.asarray(lib.histogram(jnp.zeros(SHAPE), jnp.ones(SHAPE, bool))))
    assert all(1 <= value <= math.exp(0.05) for value in ones.values())


def test_readable_leaves_plain_lists():
    log_ratio, entropy, batch = case()
    got = lib.readable(measured(log_ratio, entropy, batch, Clip()))
    assert "entropy_histogram" not in got
    assert len(got["entropy_deciles/edges"]) == 11
    assert sum(got["ratio_histogram"]["counts"]) == np.asarray(batch.mask).sum()
    assert len(got["ratio_histogram"]["edges"]) == 41


# --- over a rollout ---------------------------------------------------------------------------


def test_drift_equals_numpy():
    """Positive where the policy has raised a token; KL(old || new) by k3, never negative."""
    log_ratio, _, batch = case()
    mask, advantages = np.asarray(batch.mask), np.asarray(batch.advantages)
    logprobs = np.where(mask, log_ratio - 2, np.nan).astype(np.float32)
    stacked = jax.tree.map(lambda x: x[None], batch)
    got = lib.drift(jnp.asarray(logprobs[None]), stacked)
    kl = (np.exp(log_ratio) - 1 - log_ratio)[mask]
    assert (kl >= 0).all()
    np.testing.assert_allclose(got["rollout/kl"], kl.mean(), rtol=1e-5)
    for name, side in (("pos", advantages > 0), ("neg", advantages < 0)):
        expected = log_ratio[mask & side].mean()
        np.testing.assert_allclose(got[f"rollout/logprob_change_{name}"], expected, rtol=1e-5)
    raised = lib.drift(stacked.old_logprobs + 0.1, stacked)
    lowered = lib.drift(stacked.old_logprobs - 0.1, stacked)
    still = lib.drift(stacked.old_logprobs, stacked)
    for name in ("rollout/logprob_change_pos", "rollout/logprob_change_neg"):
        np.testing.assert_allclose([raised[name], lowered[name]], [0.1, -0.1], rtol=1e-5)
    assert float(raised["rollout/kl"]) > 0
    assert float(lowered["rollout/kl"]) > 0
    assert [float(x) for x in still.values()] == [0, 0, 0]


def test_by_update_lists_are_in_the_order_of_the_updates():
    names = {name: 10.0 * place for place, name in enumerate(BY_UPDATE)}
    updates = [
        {"updates_skipped": np.int32(n == 1)} | {k: np.float32(v + n) for k, v in names.items()}
        for n in range(3)
    ]
    merged = merge_updates(updates)
    for name, base in names.items():
        assert merged[f"by_update/{name}"] == [base, base + 1, base + 2]
    # A skipped update is listed, and leaves the mean.
    assert merged["loss"] == pytest.approx(1.0)
    assert merged["ratio/max"] == names["ratio/max"] + 2
    assert not [name for name in merge_updates([]) if name.startswith("by_update/")]
