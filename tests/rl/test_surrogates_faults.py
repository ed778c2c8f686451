# SPDX-License-Identifier: Apache-2.0
"""Faults that users of other systems reported of their surrogates, and what `Clip` refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from klear_jax.rl.surrogates import READS, SURROGATES, Clip, clipped_high, clipped_low

EVEN = {"low": 0.2, "high": 0.2}
CHANGED = {"dual": 3.0, "beta_low": 0.5, "beta_high": 0.5, "tau_positive": 2.0, "tau_negative": 2.0}
SIZE = 8
"""Of every array: operations are compiled once."""


def outcome(name, ratio, sign, **clip):
    """The objective and W by autodiff at some ratios, float32."""
    ratio = np.atleast_1d(np.asarray(ratio, np.float64))
    l = jnp.asarray(np.resize(np.log(ratio), SIZE), jnp.float32)
    advantages = jnp.full(SIZE, sign, jnp.float32)
    objective, pull = jax.vjp(lambda l: SURROGATES[name](l, advantages, Clip(**clip)), l)
    (gradient,) = pull(jnp.ones_like(l))
    return np.asarray(objective)[: len(ratio)], np.asarray(gradient)[: len(ratio)] * sign


def weight_at(name, ratio, sign, **clip):
    return outcome(name, ratio, sign, **clip)[1][0]


@pytest.mark.parametrize("name", ["ppo", "gppo", "gppo_high", "gppo_low", "ce_gppo", "aspo"])
def test_easydel_clip_is_not_inverted_for_negative_advantages(name):
    """A bad token that became likelier is pushed down in full; one that is rare already is not."""
    kept = 0.8 if name in ("gppo", "gppo_low", "ce_gppo") else 0
    assert weight_at(name, 1.5, -1, **EVEN) == pytest.approx(1.5, rel=1e-6)
    assert weight_at(name, 0.5, -1, **EVEN) == pytest.approx(kept, rel=1e-6)
    assert weight_at(name, 0.5, +1, **EVEN) == pytest.approx(2 if name == "aspo" else 0.5, rel=1e-6)


@pytest.mark.parametrize("sign", [+1, -1])
@pytest.mark.parametrize("name", ["cispo", "cispo_upper"])
def test_open_instruct_1264_cispo_weight_is_clipped_and_detached(name, sign):
    """Also #1269 and trl#4499: at r = 1.5 W is 1.2 for both signs, none of it by the weight."""
    assert weight_at(name, 1.5, sign, **EVEN) == pytest.approx(1.2, rel=1e-6)
    # Inside the bounds a weight that is not detached would double it.
    assert weight_at(name, 1.1, sign, **EVEN) == pytest.approx(1.1, rel=1e-6)


@pytest.mark.parametrize("sign", [+1, -1])
@pytest.mark.parametrize("name", SURROGATES)
def test_prime_rl_2972_ratio_beyond_float32(name, sign):
    """Trainer -2, sampler -91: exp(89) is no float32."""
    for dual in (None, 10.0):
        objective, weight = outcome(name, np.exp([89.0, -89.0]), sign, dual=dual)
        assert np.isfinite(objective).all()
        assert np.isfinite(weight).all()


def test_trl_3032_clip_fractions():
    """Also trl 6021 and RLinf#1471: of four tokens one is clipped low and one high."""
    log_ratio = jnp.log(jnp.array([0.5, 1.5, 0.5, 1.5]))
    advantages = jnp.array([1.0, 1.0, -1.0, -1.0])
    for factor, expected in ((1, (0.25, 0.25, 0.5)), (0, (0, 0, 0))):
        low, high = (f(log_ratio, factor * advantages, Clip(**EVEN))
                     for f in (clipped_low, clipped_high))  # fmt: skip
        assert (low.mean(), high.mean(), (low | high).mean()) == expected


@pytest.mark.parametrize("sign", [+1, -1])
@pytest.mark.parametrize("name", SURROGATES)
def test_verl_6829_on_policy_weight_is_one(name, sign):
    """At r = 1 every variant is the plain policy gradient, exactly, whatever the bounds."""
    for clip in ({}, {"low": 0.0, "high": 0.0}, {"dual": 10.0}):
        assert weight_at(name, 1.0, sign, **clip) == 1


@pytest.mark.parametrize("name", ["ppo", "gppo", "gppo_high", "gppo_low", "ce_gppo"])
def test_ties_at_a_bound_are_not_split(name):
    """`minimum` and `clip` halve the gradient of a tie twice: 0.75 r. Here W = r on the bound."""
    for ratio, sign in ((2.0, +1), (0.5, -1), (4.0, -1)):
        weight = weight_at(name, ratio, sign, low=0.5, high=1.0, dual=4.0)
        assert weight == pytest.approx(ratio, rel=1e-6)


def test_ce_gppo_contains_gppo_and_ppo():
    """Betas of 1 are GPPO, value and gradient; betas of 0 have PPO's gradient."""
    ratios = [0.1, 0.5, 0.9, 1.1, 1.5, 4.0]
    for sign in (+1, -1):
        gppo, ppo = (outcome(name, ratios, sign, dual=3.0) for name in ("gppo", "ppo"))
        np.testing.assert_array_equal(outcome("ce_gppo", ratios, sign, dual=3.0), gppo)
        none = outcome("ce_gppo", ratios, sign, dual=3.0, beta_low=0.0, beta_high=0.0)
        np.testing.assert_array_equal(none[1], ppo[1])


@pytest.mark.parametrize("name", SURROGATES)
def test_nan_stays_nan(name):
    """A log-ratio that is no number must reach the loss, so that the update is skipped."""
    assert np.isnan(outcome(name, np.nan, 1)[0]).all()


# --- Clip -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        {"low": -0.1}, {"low": 1.1}, {"low": np.nan}, {"high": -0.1}, {"high": np.nan},
        {"high": np.inf}, {"dual": 1.28}, {"dual": 0.5}, {"dual": np.nan}, {"dual": np.inf},
        {"beta_low": -1.0}, {"beta_high": np.inf}, {"tau_positive": 0.0}, {"tau_negative": np.nan},
    ],
)  # fmt: skip
def test_clip_refuses(bad):
    with pytest.raises(ValueError, match=f"clip .*{next(iter(bad))}"):
        Clip(**bad)


def test_clip_refuses_an_unknown_variant():
    # Under pytest the type checker sees the Literal first; elsewhere it is a ValueError.
    with pytest.raises(Exception, match="grpo"):
        Clip(variant="grpo")


@pytest.mark.parametrize("name", SURROGATES)
def test_numbers_without_effect_are_refused(name):
    for field, value in CHANGED.items():
        clip = Clip(variant=name, **{field: value})
        if field in READS[name]:
            clip.check_effect()
        else:
            with pytest.raises(ValueError, match=f"clip {field} .* no effect on variant {name}"):
                clip.check_effect()


def test_geometric_level_goes_with_unclipped():
    Clip(variant="unclipped", level="geometric").check_effect()
    with pytest.raises(ValueError, match="geometric"):
        Clip(variant="gppo", level="geometric").check_effect()


def test_clip_defaults():
    clip = Clip()
    assert (clip.low, clip.high, clip.dual, clip.variant) == (0.2, 0.28, None, "gppo")
