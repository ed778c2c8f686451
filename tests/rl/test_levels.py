# SPDX-License-Identifier: Apache-2.0
"""Ratio levels against loops over sequences in float64, on packed rows and on meshes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from klear_jax.core.batch import RolloutBatch
from klear_jax.core.mesh import MeshSpec, make_mesh, place
from klear_jax.data.packing import TokenSequence, pack
from klear_jax.rl.levels import LEVELS, segment_mean, segment_sum
from klear_jax.rl.loss import policy_loss
from klear_jax.rl.surrogates import Clip

ROW, ROWS = 20, 4
LENGTHS = ((3, 1), (2, 3), (3, 8), (2, 5))
"""Prompt and completion tokens of each sequence; the last three share a row."""
GSPO = Clip(low=0.2, high=0.28, variant="ppo", level="sequence")
GSPO_TOKEN = dataclasses.replace(GSPO, level="sequence_token")
GMPO = Clip(
    low=1 - np.exp(-0.4).item(), high=np.exp(0.4).item() - 1, variant="unclipped", level="geometric"
)


def log_ratios(scale=0.5):
    rng = np.random.default_rng(0)
    return [rng.normal(0.1, scale, n).astype(np.float32) for _, n in LENGTHS]


ADVANTAGES = np.array([1.0, -0.7, 0.4, -1.2], np.float32)


def batch_of(ratios=None, order=None, alone=False, junk=0.0):
    """(log-ratios, batch with old log-probs of 0, packed rows); weights 1 / (N T), as in GSPO.

    Args:
        alone: every sequence in a row of its own.
        junk: stands as log-ratio wherever no token is trained.
    """
    ratios = log_ratios() if ratios is None else ratios
    order = list(range(len(LENGTHS)) if order is None else order)
    sequences = [TokenSequence(np.arange(sum(LENGTHS[i]), dtype=np.int32), LENGTHS[i][0])
                 for i in order]  # fmt: skip
    count = len(LENGTHS)
    extras = {
        "log_ratio": [ratios[i] for i in order],
        "advantages": [np.full(LENGTHS[i][1], ADVANTAGES[i]) for i in order],
        "loss_weights": [np.full(LENGTHS[i][1], 1 / (count * LENGTHS[i][1])) for i in order],
        "owner": [np.full(LENGTHS[i][1], i) for i in order],
    }
    if alone:
        pieces = [pack([s], row=ROW, per_token={k: [v[n]] for k, v in extras.items()})
                  for n, s in enumerate(sequences)]  # fmt: skip
        fields = ("tokens", "targets", "positions", "segments", "mask")
        rows = {name: np.concatenate([getattr(p, name) for p in pieces]) for name in fields}
        values = {k: np.concatenate([p.per_token[k] for p in pieces]) for k in extras}
    else:
        packed = pack(sequences, row=ROW, rows=ROWS, per_token=extras)
        rows, values = vars(packed), packed.per_token
    mask = rows["mask"]
    zeros = jnp.zeros(mask.shape, jnp.float32)
    batch = RolloutBatch(
        **{k: jnp.asarray(rows[k]) for k in ("tokens", "targets", "positions", "segments", "mask")},
        loss_weights=jnp.asarray(values["loss_weights"], jnp.float32),
        advantages=jnp.asarray(values["advantages"], jnp.float32),
        positive_weights=zeros, old_logprobs=zeros, old_entropy=zeros, reference_logprobs=zeros,
        sampler_logprobs=zeros,
    )  # fmt: skip
    log_ratio = np.where(mask, values["log_ratio"], junk).astype(np.float32)
    return jnp.asarray(log_ratio), batch, np.where(mask, values["owner"], -1)


def outcome(clip, **layout):
    """Loss, and the gradient of every sequence's tokens, in the order of `LENGTHS`."""
    log_ratio, batch, owner = batch_of(**layout)

    def loss(log_ratio):
        return policy_loss(log_ratio, jnp.ones_like(log_ratio), batch, clip=clip)[0]

    value, gradient = jax.value_and_grad(loss)(log_ratio)
    gradient = np.asarray(gradient)
    np.testing.assert_array_equal(gradient[owner < 0], 0)
    return float(value), [gradient[owner == i] for i in range(len(LENGTHS))]


@functools.cache
def usual(clip):
    return outcome(clip)


def assert_same(one, other, rtol=1e-5):
    np.testing.assert_allclose(one[0], other[0], rtol=rtol)
    for got, want in zip(one[1], other[1], strict=True):
        np.testing.assert_allclose(got, want, rtol=rtol, atol=1e-8)


def looped(per_sequence, ratios):
    """-mean over sequences of `per_sequence(l, A)`, and its gradient by differences, float64."""
    total, gradients, step = 0.0, [], 1e-6
    for l, advantage in zip(ratios, ADVANTAGES.astype(np.float64), strict=True):
        l = l.astype(np.float64)
        total -= per_sequence(l, advantage) / len(ratios)
        moved = [(per_sequence(l + d, advantage) - per_sequence(l - d, advantage)) / (2 * step)
                 for d in step * np.eye(len(l))]  # fmt: skip
        gradients.append(-np.array(moved) / len(ratios))
    return total, gradients


# --- sums over segments -----------------------------------------------------------------------


def by_loop(values, batch, mean):
    result = np.zeros(values.shape)
    segments, mask = np.asarray(batch.segments), np.asarray(batch.mask)
    for b, t in zip(*np.nonzero(mask), strict=True):
        here = values[b][mask[b] & (segments[b] == segments[b, t])].astype(np.float64)
        result[b, t] = here.mean() if mean else here.sum()
    return result


FUNCTIONS = {"sum": segment_sum, "mean": segment_mean}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_segment_functions_equal_a_loop(name):
    values, batch, _ = batch_of(junk=np.nan)
    assert int(batch.segments.max()) == 3
    got = FUNCTIONS[name](values, batch.segments, batch.mask)
    expected = by_loop(np.asarray(values), batch, mean=name == "mean")
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)


def weighted(name):
    """A function of (values, segments, mask, weights) and its gradient."""

    def total(values, segments, mask, weights):
        return (weights * FUNCTIONS[name](values, segments, mask)).sum()

    return jax.jit(jax.value_and_grad(total))


@pytest.mark.parametrize("spec", ["fsdp:2", "fsdp:2,seq:2"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_segment_functions_on_a_mesh(name, spec):
    """A row that is cut between devices has the sums, and gradients, of the whole row."""
    values, batch, _ = batch_of(junk=np.inf)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=values.shape), jnp.float32)
    arguments = (values, batch.segments, batch.mask, weights)
    expected, expected_gradient = weighted(name)(*arguments)
    assert bool((expected_gradient != 0).any())
    np.testing.assert_array_equal(np.asarray(expected_gradient)[~np.asarray(batch.mask)], 0)
    parsed = MeshSpec.parse(spec)
    mesh = make_mesh(parsed, jax.devices()[: np.prod(parsed.sizes)])
    with jax.set_mesh(mesh):
        got, gradient = weighted(name)(*place(arguments, mesh, "batch", "seq"))
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-6)


# --- GSPO -------------------------------------------------------------------------------------


def gspo(l, advantage):
    """min(s A, clip(s) A), s the geometric mean of the ratios (arXiv 2507.18071, eq. 5 and 7)."""
    s = np.exp(l.mean())
    return min(s * advantage, np.clip(s, 1 - GSPO.low, 1 + GSPO.high) * advantage)


def test_gspo_equals_a_loop_over_sequences():
    got = outcome(GSPO)
    assert_same(got, looped(gspo, log_ratios()))
    clipped = [not gradient.any() for gradient in got[1]]
    assert 0 < sum(clipped) < len(clipped)


def test_gradient_of_gspo_is_s_over_length():
    """An unclipped sequence of T tokens: -A s / T for each of them, over N sequences."""
    ratios = log_ratios(scale=0.05)
    _, gradients = outcome(GSPO, ratios=ratios)
    for l, advantage, gradient in zip(ratios, ADVANTAGES, gradients, strict=True):
        expected = -advantage * np.exp(l.mean()) / len(l) / len(LENGTHS)
        np.testing.assert_allclose(gradient, np.full(len(l), expected), rtol=1e-5)


def test_gppo_at_the_sequence_level_keeps_the_bound():
    _, gradients = outcome(dataclasses.replace(GSPO, variant="gppo"))
    for l, advantage, gradient in zip(log_ratios(), ADVANTAGES, gradients, strict=True):
        s = np.exp(l.mean())
        weight = min(s, 1 + GSPO.high) if advantage > 0 else max(s, 1 - GSPO.low)
        expected = -advantage * weight / len(l) / len(LENGTHS)
        np.testing.assert_allclose(gradient, np.full(len(l), expected), rtol=1e-5)


@pytest.mark.parametrize("clip", [GSPO, GSPO_TOKEN, GMPO], ids=lambda clip: clip.level)
@pytest.mark.parametrize("layout", ["reversed", "alone", "nan", "inf"])
def test_the_layout_changes_nothing(clip, layout):
    """Soup#723: order, packing, padding, and what stands where nothing is trained."""
    changes = {
        "reversed": {"order": range(len(LENGTHS) - 1, -1, -1)},
        "alone": {"alone": True},
        "nan": {"junk": np.nan},
        "inf": {"junk": -np.inf},
    }[layout]
    assert_same(outcome(clip, **changes), usual(clip))


def test_gspo_token_is_gspo_where_the_advantage_is_constant():
    assert_same(outcome(GSPO_TOKEN), outcome(GSPO))


def test_gspo_token_gives_each_token_its_own_advantage():
    """-A_t s / T, where GSPO gives all tokens of a sequence one gradient, that of the mean A."""
    log_ratio, batch, owner = batch_of(ratios=log_ratios(scale=0.05))
    own = np.where(owner >= 0, np.random.default_rng(2).normal(size=owner.shape), 0)
    batch = dataclasses.replace(batch, advantages=jnp.asarray(own, jnp.float32))

    def gradient(clip):
        def loss(log_ratio):
            return policy_loss(log_ratio, jnp.ones_like(log_ratio), batch, clip=clip)[0]

        return np.asarray(jax.grad(loss)(log_ratio))

    by_token, by_sequence = gradient(GSPO_TOKEN), gradient(GSPO)
    for i, (_, length) in enumerate(LENGTHS):
        here = owner == i
        s = np.exp(np.asarray(log_ratio)[here].mean(dtype=np.float64))
        expected = -own[here] * s / length / len(LENGTHS)
        np.testing.assert_allclose(by_token[here], expected, rtol=1e-5, atol=1e-8)
        np.testing.assert_allclose(by_sequence[here], expected.mean(), rtol=1e-4, atol=1e-8)


# --- GMPO -------------------------------------------------------------------------------------


def gmpo(l, advantage):
    """The released code (arXiv 2507.20673): the clip in log space, min of A's sign times l."""
    sign = 1.0 if advantage > 0 else -1.0
    held = sign * np.minimum(sign * l, np.clip(sign * l, -0.4, 0.4))
    return advantage * np.exp(held.mean())


def test_gmpo_equals_a_loop_over_sequences():
    got = outcome(GMPO)
    assert_same(got, looped(gmpo, log_ratios()))
    still = [(gradient == 0).mean() for gradient in got[1]]
    assert 0 < np.mean(still) < 1


def test_bounds_of_gmpo_are_closed():
    """A token on the bound keeps its gradient, s / T; the next float beyond it has none."""
    clip = Clip(low=0.5, high=1.0, variant="unclipped", level="geometric")
    for bound, outwards, advantage in ((np.log(2.0), 9, 1.0), (np.log(0.5), -9, -1.0)):
        edge = np.float32(bound)
        ratios = [np.zeros(n, np.float32) for _, n in LENGTHS]
        ratios[2][:2] = edge, np.nextafter(edge, np.float32(outwards))
        log_ratio, batch, owner = batch_of(ratios=ratios)
        batch = dataclasses.replace(batch, advantages=jnp.where(batch.mask, advantage, 0.0))
        pull = jax.grad(lambda l, b=batch: LEVELS["geometric"](l, b, clip).sum())(log_ratio)
        np.testing.assert_allclose(np.asarray(pull)[owner == 2][:3], [1, 0, 1], rtol=1e-6)


# --- extremes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("log_ratio", [-1000.0, 1000.0])
def test_extreme_ratios_stay_finite(level, log_ratio):
    variant = "unclipped" if level == "geometric" else "gppo"
    ratios = [np.full(n, log_ratio, np.float32) for _, n in LENGTHS]
    loss, gradients = outcome(Clip(variant=variant, level=level), ratios=ratios)
    assert np.isfinite(loss)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_a_single_extreme_token_does_not_overflow_its_sequence():
    """e^90 is no float32, and the mean log-ratio of its eight tokens is 11.25."""
    ratios = [np.zeros(n, np.float32) for _, n in LENGTHS]
    ratios[2][4] = 90.0
    clip = Clip(variant="unclipped", level="sequence")
    _, gradients = outcome(clip, ratios=ratios)
    expected = -ADVANTAGES[2] * np.exp(11.25) / 8 / len(LENGTHS)
    np.testing.assert_allclose(gradients[2], np.full(8, expected), rtol=1e-5)


def test_one_token_responses_have_one_ratio_at_every_level():
    """Where every response has one token, a mean over it is the token, and all levels agree."""
    log_ratio, batch, owner = batch_of()
    chosen = owner == 0
    batch = dataclasses.replace(batch, mask=jnp.asarray(chosen))
    wide = Clip(low=1.0, high=9.0)
    for level in LEVELS:
        got = np.asarray(LEVELS[level](log_ratio, batch, wide))
        np.testing.assert_allclose(got[chosen], np.asarray(log_ratio)[chosen], rtol=1e-6)
