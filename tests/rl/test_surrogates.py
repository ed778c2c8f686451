# SPDX-License-Identifier: Apache-2.0
"""The gradient table of every surrogate, its bounds, and its behaviour at extreme ratios."""

import contextlib
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from klear_jax.rl.surrogates import (
    _KEPT,
    MAX_LOG_RATIO,
    SURROGATES,
    Clip,
    Variant,
    gradient_weight,
)

RATIOS = (1.0, 0.9, 1.15, 0.5, 0.1, 1.6, 4.0, 12.0)
"""Bounds 0.8 and 1.28, dual 10: the table of Klear's specification."""
ORACLE_RATIOS = (0.5, 0.9, 1.1, 1.5, 4.0)
"""Bounds 0.8 and 1.2, dual 3: the table gathered from other systems' fault reports."""

LENGTH = 128

WIDE, WIDE_DUAL = {"low": 0.2, "high": 0.28}, {"low": 0.2, "high": 0.28, "dual": 10.0}
EVEN, EVEN_DUAL = {"low": 0.2, "high": 0.2}, {"low": 0.2, "high": 0.2, "dual": 3.0}

# (variant, bounds, sign of A, ratios, W of each ratio)
TABLE = [
    ("ppo", WIDE, +1, RATIOS, (1, 0.9, 1.15, 0.5, 0.1, 0, 0, 0)),
    ("ppo", WIDE, -1, RATIOS, (1, 0.9, 1.15, 0, 0, 1.6, 4, 12)),
    ("ppo", WIDE_DUAL, +1, RATIOS, (1, 0.9, 1.15, 0.5, 0.1, 0, 0, 0)),
    ("ppo", WIDE_DUAL, -1, RATIOS, (1, 0.9, 1.15, 0, 0, 1.6, 4, 0)),
    ("gppo", WIDE, +1, RATIOS, (1, 0.9, 1.15, 0.5, 0.1, 1.28, 1.28, 1.28)),
    ("gppo", WIDE, -1, RATIOS, (1, 0.9, 1.15, 0.8, 0.8, 1.6, 4, 12)),
    ("gppo", WIDE_DUAL, +1, RATIOS, (1, 0.9, 1.15, 0.5, 0.1, 1.28, 1.28, 1.28)),
    ("gppo", WIDE_DUAL, -1, RATIOS, (1, 0.9, 1.15, 0.8, 0.8, 1.6, 4, 0)),
    ("ppo", EVEN, +1, ORACLE_RATIOS, (0.5, 0.9, 1.1, 0, 0)),
    ("ppo", EVEN, -1, ORACLE_RATIOS, (0, 0.9, 1.1, 1.5, 4)),
    ("ppo", EVEN_DUAL, +1, ORACLE_RATIOS, (0.5, 0.9, 1.1, 0, 0)),
    ("ppo", EVEN_DUAL, -1, ORACLE_RATIOS, (0, 0.9, 1.1, 1.5, 0)),
    ("gppo", EVEN_DUAL, +1, ORACLE_RATIOS, (0.5, 0.9, 1.1, 1.2, 1.2)),
    ("gppo", EVEN_DUAL, -1, ORACLE_RATIOS, (0.8, 0.9, 1.1, 1.5, 0)),
]


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    with jax.enable_x64() if request.param == "float64" else contextlib.nullcontext():
        yield np.dtype(request.param)


def objective_and_weight(name, log_ratio, advantage, clip):
    """The objective of each token, and its W by autodiff."""
    count = len(log_ratio)
    # One length for all tests: operations are compiled once.
    log_ratio = jnp.asarray(np.pad(log_ratio, (0, LENGTH - count)))
    advantages = jnp.full(log_ratio.shape, advantage, log_ratio.dtype)
    objective, pull = jax.vjp(lambda l: SURROGATES[name](l, advantages, clip), log_ratio)
    (gradient,) = pull(jnp.ones_like(objective))
    assert objective.dtype == gradient.dtype == log_ratio.dtype
    return np.asarray(objective)[:count], np.asarray(gradient)[:count] / advantage


@pytest.mark.parametrize(("name", "bounds", "sign", "ratios", "expected"), TABLE)
def test_gradient_table(dtype, name, bounds, sign, ratios, expected):
    clip, advantage = Clip(**bounds, variant=name), sign * 0.3
    log_ratio = np.log(np.asarray(ratios)).astype(dtype)
    objective, weight = objective_and_weight(name, log_ratio, advantage, clip)
    tolerance = 1e-6 if dtype == np.float32 else 1e-12
    np.testing.assert_allclose(weight, expected, rtol=tolerance, atol=0)
    closed = gradient_weight(name, log_ratio.astype(np.float64), np.array(advantage), clip)
    assert closed.dtype == np.float64
    np.testing.assert_allclose(closed, expected, rtol=tolerance, atol=0)
    np.testing.assert_allclose(
        objective, numpy_value(np.asarray(ratios), advantage, clip), rtol=tolerance
    )


def numpy_value(ratio, advantage, clip):
    """The objective of PPO as the papers print it: with min, clip and max."""
    bounded = np.clip(ratio, 1 - clip.low, 1 + clip.high)
    value = np.minimum(ratio * advantage, bounded * advantage)
    if clip.dual is not None and advantage < 0:
        value = np.maximum(value, clip.dual * advantage)
    return value


def test_every_variant_has_rows_for_both_signs():
    for name in SURROGATES:
        assert {row[2] for row in TABLE if row[0] == name} == {+1, -1}, name


def test_names_agree():
    assert set(SURROGATES) == set(get_args(Variant)) == set(_KEPT)
    for name in SURROGATES:
        assert gradient_weight(name, np.zeros(1), np.ones(1), Clip(variant=name)) == 1.0


@pytest.mark.parametrize("sign", [+1, -1])
@pytest.mark.parametrize("name", SURROGATES)
def test_weight_is_one_at_ratio_one(dtype, name, sign):
    objective, weight = objective_and_weight(name, np.zeros(3, dtype), sign, Clip(dual=10.0))
    assert (weight == 1).all()
    assert (objective == sign).all()


@pytest.mark.parametrize("sign", [+1, -1])
@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("bound", ["low", "high", "dual"])
def test_bounds_are_closed(dtype, name, sign, bound):
    """Around each bound, float by float: W = r up to and on the bound, and the other branch after.

    Bounds are powers of two and e.g. 10, so that some float's exponential meets them exactly.
    """
    clip = Clip(low=0.5, high=1.0, dual=4.0, variant=name)
    value = {"low": 0.5, "high": 2.0, "dual": 4.0}[bound]
    log_ratio = neighbours(dtype.type(np.log(value)), 12)
    padded = np.pad(log_ratio, (0, LENGTH - len(log_ratio)))
    ratio = np.asarray(jnp.exp(jnp.asarray(padded)))[: len(log_ratio)]
    assert (ratio < value).any()
    assert (ratio == value).any()
    assert (ratio > value).any()
    beyond = ratio < value if bound == "low" else ratio > value
    other = {
        ("low", -1): {"gppo": 0.5, "ppo": 0.0},
        ("high", +1): {"gppo": 2.0, "ppo": 0.0},
        ("dual", -1): {"gppo": 0.0, "ppo": 0.0},
        ("dual", +1): {"gppo": 2.0, "ppo": 0.0},
    }.get((bound, sign))
    if other is None:
        expected = ratio
    elif (bound, sign) == ("dual", +1):
        expected = np.full_like(ratio, other[name])
    else:
        expected = np.where(beyond, other[name], ratio)
    _, weight = objective_and_weight(name, log_ratio, sign, clip)
    np.testing.assert_array_equal(weight, expected)


def neighbours(centre, count):
    """`count` floats on each side of `centre`, and itself."""
    values = [centre]
    for direction in (-np.inf, np.inf):
        here = centre
        for _ in range(count):
            here = np.nextafter(here, here.dtype.type(direction))
            values.append(here)
    return np.sort(np.asarray(values))


@pytest.mark.parametrize("name", SURROGATES)
def test_bounds_of_width_zero(dtype, name):
    """low = high = 0: r = 1 is still inside, and the first ratio beyond it is not."""
    clip = Clip(low=0.0, high=0.0, variant=name)
    tiny = dtype.type(4 * np.finfo(dtype).eps)
    log_ratio = np.array([-tiny, 0, tiny], dtype)
    _, up = objective_and_weight(name, log_ratio, +1, clip)
    _, down = objective_and_weight(name, log_ratio, -1, clip)
    kept = {"gppo": 1.0, "ppo": 0.0}[name]
    np.testing.assert_array_equal(up, [np.exp(-tiny), 1, kept])
    np.testing.assert_array_equal(down, [kept, 1, np.exp(tiny)])


@pytest.mark.parametrize("dual", [None, 10.0])
@pytest.mark.parametrize("sign", [+1, -1])
@pytest.mark.parametrize("name", SURROGATES)
def test_extreme_log_ratios(dtype, name, sign, dual):
    clip = Clip(dual=dual, variant=name)
    log_ratio = np.array([-1000, -120, -90, -21, 21, 90, 120, 1000], dtype)
    objective, weight = objective_and_weight(name, log_ratio, sign, clip)
    assert np.isfinite(objective).all()
    closed = gradient_weight(name, log_ratio.astype(np.float64), np.array(float(sign)), clip)
    np.testing.assert_allclose(weight, closed, rtol=1e-6)
    kept = {"gppo": 1.0, "ppo": 0.0}[name]
    if sign > 0:
        np.testing.assert_allclose(weight[4:], kept * 1.28, rtol=1e-6)
        np.testing.assert_array_equal(weight[:4], 0)
    else:
        np.testing.assert_allclose(weight[:4], kept * 0.8, rtol=1e-6)
        np.testing.assert_array_equal(weight[4:], 0)


def test_ratio_limit(dtype):
    """Where r itself counts it is exact up to 20 and has no gradient after."""
    limit = dtype.type(MAX_LOG_RATIO)
    log_ratio = np.array([limit, np.nextafter(limit, dtype.type(99))])
    _, weight = objective_and_weight("ppo", log_ratio, -1, Clip(variant="ppo"))
    np.testing.assert_allclose(weight, [np.exp(20.0), 0], rtol=1e-5)
    assert MAX_LOG_RATIO == 20


@pytest.mark.parametrize("name", SURROGATES)
def test_autodiff_equals_closed_form_on_random_points(dtype, name):
    rng = np.random.default_rng(0)
    log_ratio = rng.normal(scale=2.0, size=LENGTH).astype(dtype)
    for clip in (Clip(), Clip(dual=10.0), Clip(low=1.0, high=0.0), Clip(low=0.0, high=3.0)):
        for advantage in (0.7, -1.3):
            _, weight = objective_and_weight(name, log_ratio, advantage, clip)
            closed = gradient_weight(name, log_ratio.astype(np.float64), np.array(advantage), clip)
            np.testing.assert_allclose(weight, closed, rtol=1e-5)


def test_zero_advantage_gives_zero(dtype):
    log_ratio = jnp.asarray(np.pad(np.array([-1000, -1, 0, 1, 1000], dtype), (0, LENGTH - 5)))
    zeros = jnp.zeros_like(log_ratio)
    for surrogate in SURROGATES.values():
        gradient = jax.grad(lambda l, f=surrogate: f(l, zeros, Clip(dual=10.0)).sum())(log_ratio)
        np.testing.assert_array_equal(np.asarray(gradient), 0)


@pytest.mark.parametrize(
    "bad",
    [
        {"low": -0.1}, {"low": 1.1}, {"low": np.nan}, {"high": -0.1}, {"high": np.nan},
        {"high": np.inf}, {"dual": 1.28}, {"dual": 0.5}, {"dual": np.nan},
    ],
)  # fmt: skip
def test_clip_refuses(bad):
    with pytest.raises(ValueError, match=f"clip .*{next(iter(bad))}"):
        Clip(**bad)


def test_clip_refuses_an_unknown_variant():
    # Under pytest the type checker sees the Literal first; elsewhere it is a ValueError.
    with pytest.raises(Exception, match="grpo"):
        Clip(variant="grpo")


def test_clip_defaults():
    clip = Clip()
    assert (clip.low, clip.high, clip.dual, clip.variant) == (0.2, 0.28, None, "gppo")
