# SPDX-License-Identifier: Apache-2.0
"""Every surrogate against its gradient table and its closed form, and through other code.

`faults` is what the suite holds against one variant of a surrogates module; the mutation check in
test_surrogate_mutants.py runs it on broken copies of that module.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from klear_jax.core.batch import RolloutBatch
from klear_jax.rl import surrogates
from klear_jax.rl.loss import policy_loss
from klear_jax.rl.surrogates import READS, SURROGATES, Clip, Variant, gradient_weight
from klear_jax.train.state import init_state
from klear_jax.train.step import make_step

# --- literals ---------------------------------------------------------------------------------

WIDE = {"low": 0.2, "high": 0.28}
EVEN = {"low": 0.2, "high": 0.2}
DUAL = WIDE | {"dual": 10.0}
TRIPLE = EVEN | {"dual": 3.0}
QUARTER = {"beta_low": 0.25, "beta_high": 1.0}

R = (1, 0.9, 1.15, 0.5, 0.1, 1.6, 4, 12)
"""Klear's specification: bounds 0.8 and 1.28, dual 10."""
S = (0.5, 0.9, 1.1, 1.5, 4)
"""Gathered from fault reports: bounds 0.8 and 1.2, dual 3."""
# 4 p (1 - p) r at the ratios R, with p the sigmoid of tau (r - 1), in 40 decimal digits.
SAPO_POSITIVE = (
    1, 0.897753744694411084, 1.143555430716697755, 0.470007424403188978, 0.0822001229369053782,
    1.464219138922606725, 0.722826555694594122, 0.000801654859708964771,
)  # fmt: skip
SAPO_NEGATIVE = (
    1, 0.897523926039388934, 1.142897585362901397, 0.467069911642696235, 0.0806208945718869322,
    1.451180569089072351, 0.630444560901071996, 0.000462521155199742553,
)  # fmt: skip

# (variant, bounds, sign of A, ratios, W of each ratio)
TABLE = [
    ("reinforce", WIDE, +1, R, (1, 1, 1, 1, 1, 1, 1, 1)),
    ("reinforce", WIDE, -1, R, (1, 1, 1, 1, 1, 1, 1, 1)),
    ("unclipped", WIDE, +1, R, R),
    ("unclipped", WIDE, -1, R, R),
    ("ppo", WIDE, +1, R, (1, 0.9, 1.15, 0.5, 0.1, 0, 0, 0)),
    ("ppo", WIDE, -1, R, (1, 0.9, 1.15, 0, 0, 1.6, 4, 12)),
    ("ppo", DUAL, +1, R, (1, 0.9, 1.15, 0.5, 0.1, 0, 0, 0)),
    ("ppo", DUAL, -1, R, (1, 0.9, 1.15, 0, 0, 1.6, 4, 0)),
    ("ppo", EVEN, +1, S, (0.5, 0.9, 1.1, 0, 0)),
    ("ppo", EVEN, -1, S, (0, 0.9, 1.1, 1.5, 4)),
    ("ppo", TRIPLE, +1, S, (0.5, 0.9, 1.1, 0, 0)),
    ("ppo", TRIPLE, -1, S, (0, 0.9, 1.1, 1.5, 0)),
    ("gppo", WIDE, +1, R, (1, 0.9, 1.15, 0.5, 0.1, 1.28, 1.28, 1.28)),
    ("gppo", WIDE, -1, R, (1, 0.9, 1.15, 0.8, 0.8, 1.6, 4, 12)),
    ("gppo", DUAL, +1, R, (1, 0.9, 1.15, 0.5, 0.1, 1.28, 1.28, 1.28)),
    ("gppo", DUAL, -1, R, (1, 0.9, 1.15, 0.8, 0.8, 1.6, 4, 0)),
    ("gppo", EVEN, +1, S, (0.5, 0.9, 1.1, 1.2, 1.2)),
    ("gppo", EVEN, -1, S, (0.8, 0.9, 1.1, 1.5, 4)),
    ("gppo", TRIPLE, +1, S, (0.5, 0.9, 1.1, 1.2, 1.2)),
    ("gppo", TRIPLE, -1, S, (0.8, 0.9, 1.1, 1.5, 0)),
    ("gppo_high", WIDE, +1, R, (1, 0.9, 1.15, 0.5, 0.1, 1.28, 1.28, 1.28)),
    ("gppo_high", WIDE, -1, R, (1, 0.9, 1.15, 0, 0, 1.6, 4, 12)),
    ("gppo_high", DUAL, -1, R, (1, 0.9, 1.15, 0, 0, 1.6, 4, 0)),
    ("gppo_low", WIDE, +1, R, (1, 0.9, 1.15, 0.5, 0.1, 0, 0, 0)),
    ("gppo_low", WIDE, -1, R, (1, 0.9, 1.15, 0.8, 0.8, 1.6, 4, 12)),
    ("gppo_low", DUAL, -1, R, (1, 0.9, 1.15, 0.8, 0.8, 1.6, 4, 0)),
    ("ce_gppo", DUAL | QUARTER, +1, R, (1, 0.9, 1.15, 0.5, 0.1, 1.28, 1.28, 1.28)),
    ("ce_gppo", DUAL | QUARTER, -1, R, (1, 0.9, 1.15, 0.2, 0.2, 1.6, 4, 0)),
    ("ce_gppo", TRIPLE | QUARTER, +1, S, (0.5, 0.9, 1.1, 1.2, 1.2)),
    ("ce_gppo", TRIPLE | QUARTER, -1, S, (0.2, 0.9, 1.1, 1.5, 0)),
    ("ce_gppo", EVEN | {"beta_low": 0.5, "beta_high": 0.75}, +1, S, (0.5, 0.9, 1.1, 0.9, 0.9)),
    ("ce_gppo", EVEN | {"beta_low": 0.5, "beta_high": 0.75}, -1, S, (0.4, 0.9, 1.1, 1.5, 4)),
    ("cispo", WIDE, +1, R, (1, 0.9, 1.15, 0.8, 0.8, 1.28, 1.28, 1.28)),
    ("cispo", WIDE, -1, R, (1, 0.9, 1.15, 0.8, 0.8, 1.28, 1.28, 1.28)),
    ("cispo", EVEN, +1, S, (0.8, 0.9, 1.1, 1.2, 1.2)),
    ("cispo", EVEN, -1, S, (0.8, 0.9, 1.1, 1.2, 1.2)),
    ("cispo_upper", WIDE, +1, R, (1, 0.9, 1.15, 0.5, 0.1, 1.28, 1.28, 1.28)),
    ("cispo_upper", WIDE, -1, R, (1, 0.9, 1.15, 0.5, 0.1, 1.28, 1.28, 1.28)),
    ("cispo_upper", EVEN, +1, S, (0.5, 0.9, 1.1, 1.2, 1.2)),
    ("cispo_upper", EVEN, -1, S, (0.5, 0.9, 1.1, 1.2, 1.2)),
    ("sapo", WIDE, +1, R, SAPO_POSITIVE),
    ("sapo", WIDE, -1, R, SAPO_NEGATIVE),
    ("aspo", TRIPLE, +1, R, (1, 1 / 0.9, 1 / 1.15, 2, 3, 0, 0, 0)),
    ("aspo", TRIPLE, -1, R, (1, 0.9, 1.15, 0, 0, 1.6, 3, 3)),
]

# W at l = -1000, -20.5, 20.5 and 1000, bounds 0.8 and 1.28: for A > 0, for A < 0.
FAR = (-1000, -20.5, 20.5, 1000)
HELD, TINY = float(np.exp(20.0)), float(np.exp(-20.0))
EXTREMES = {
    "reinforce": ({}, (1, 1, 1, 1), (1, 1, 1, 1)),
    "unclipped": ({}, (0, 0, 0, 0), (0, 0, 0, 0)),
    "ppo": ({}, (0, 0, 0, 0), (0, 0, 0, 0)),
    "gppo": ({}, (0, 0, 1.28, 1.28), (0.8, 0.8, 0, 0)),
    "gppo_high": ({}, (0, 0, 1.28, 1.28), (0, 0, 0, 0)),
    "gppo_low": ({}, (0, 0, 0, 0), (0.8, 0.8, 0, 0)),
    "ce_gppo": (QUARTER, (0, 0, 1.28, 1.28), (0.2, 0.2, 0, 0)),
    "cispo": ({}, (0.8, 0.8, 1.28, 1.28), (0.8, 0.8, 1.28, 1.28)),
    "cispo_upper": ({}, (TINY, TINY, 1.28, 1.28), (TINY, TINY, 1.28, 1.28)),
    "sapo": ({}, (0, 0, 0, 0), (0, 0, 0, 0)),
    "aspo": ({"dual": 3.0}, (3, 3, 0, 0), (0, 0, 3, 3)),
}


def value_of(name, log_ratio, advantage, clip):
    """The objective as printed, in float64; None for a variant that prints none here."""
    ratio = np.exp(np.clip(log_ratio.astype(np.float64), -20, 20))
    low, high = 1 - clip.low, 1 + clip.high
    if name == "reinforce":
        return advantage
    if name == "unclipped":
        return ratio * advantage
    if name in ("cispo", "cispo_upper"):
        return np.clip(ratio, low if name == "cispo" else 0, high) * advantage
    if name == "sapo":
        tau = np.where(advantage > 0, clip.tau_positive, clip.tau_negative)
        return 4 / tau / (1 + np.exp(-np.minimum(tau * (ratio - 1), 700))) * advantage
    if name == "aspo":
        weight = np.where(advantage > 0, 1 / ratio, ratio)
        return np.minimum(weight, clip.dual or np.inf) * advantage
    if name not in ("ppo", "gppo", "gppo_high", "gppo_low", "ce_gppo"):
        return None
    value = np.minimum(ratio * advantage, np.clip(ratio, low, high) * advantage)
    if name == "ce_gppo":
        # The only value that jumps at a bound: compared as log-ratios, in the same precision.
        up, down = log_ratio > log_of(high, log_ratio), log_ratio < log_of(low, log_ratio)
        value *= np.where((advantage > 0) & up, clip.beta_high, 1)
        value *= np.where((advantage < 0) & down, clip.beta_low, 1)
    if clip.dual is not None:
        value = np.where((advantage < 0) & (ratio > clip.dual), clip.dual * advantage, value)
    return value


def log_of(bound, like):
    with np.errstate(divide="ignore"):
        return np.log(bound).astype(like.dtype)


# --- what is held against a variant -----------------------------------------------------------

SIZE = 1536
"""Points in every array, so that operations are compiled once."""
RANDOM = 1000
DTYPES = (np.dtype("float32"), np.dtype("float64"))
TOLERANCE = {DTYPES[0]: 1e-6, DTYPES[1]: 1e-12}
FLOOR = {"sapo": 1.0}
"""Differences may be tolerance * max(|W|, floor); 0: relative alone. sapo falls as exp(-tau r), so
one rounding of r is tau r roundings of W: at r = 12, where W is 5e-4, about thirteen."""
OWN = {"beta_low": 0.25, "beta_high": 0.75, "tau_positive": 0.7, "tau_negative": 1.6}
"""Every number of a variant away from its default, and from its counterpart."""


def precision(dtype):
    return jax.enable_x64() if dtype == np.float64 else contextlib.nullcontext()


def settings(module, name):
    """Bounds, with the variant's own numbers away from their defaults, and at them."""
    read = READS.get(name, ())
    for low, high, dual in ((0.2, 0.28, 3.0), (1.0, 0.1, 10.0), (0.5, 1.0, 4.0), (0.0, 0.0, 1.5)):
        own = {field: v for field, v in (OWN | {"dual": dual}).items() if field in read}
        for numbers in (own, {}) if own else (own,):
            yield module.Clip(low=low, high=high, variant=name, **numbers)


def points(clip, dtype):
    """(l, A): ratios of the tables, each bound and two floats on both sides, extremes; random."""
    bounds = [1 - clip.low or 1e-3, 1 + clip.high, clip.dual or 2.0]
    centres = np.array([*np.log(bounds), -20.0, 20.0, 0.0, np.log(1e-7)]).astype(dtype)
    fixed = [*np.log(np.array((*R, *S))), -1000, -120, -90, -60, -21, 21, 60, 90, 120, 1000]
    special = np.concatenate([np.array(fixed, dtype), *neighbours(centres, 2)])
    rng = np.random.default_rng(0)
    random = np.concatenate([
        rng.normal(scale=0.5, size=RANDOM // 2),
        rng.uniform(-25, 25, RANDOM // 4),
        rng.uniform(-1000, 1000, RANDOM - RANDOM // 2 - RANDOM // 4),
    ]).astype(dtype)  # fmt: skip
    size = rng.uniform(0.1, 3, RANDOM) * rng.choice([-1, 1], RANDOM)
    log_ratio = np.concatenate([random, special, special, special])
    ones = np.ones_like(special)
    advantages = np.concatenate([size.astype(dtype), ones, -0.3 * ones, 0 * ones]).astype(dtype)
    rest = SIZE - len(log_ratio)
    return np.pad(log_ratio, (0, rest)), np.pad(advantages, (0, rest), constant_values=1)


def neighbours(centres, count):
    """`centres`, and `count` floats on each side of each; beside 0 the smallest normal ones."""
    found = [centres]
    for direction in (-np.inf, np.inf):
        here = centres
        for _ in range(count):
            here = np.nextafter(here, here.dtype.type(direction))
            # XLA takes subnormal numbers for 0; a difference of log-probs is never so small.
            smallest = np.copysign(np.finfo(here.dtype).tiny, here)
            here = np.where(np.abs(here) < np.abs(smallest), smallest, here)
            found.append(here)
    return found


def outcome(function, log_ratio, advantages, clip):
    """The objective of each point, and its gradient by autodiff."""
    advantages = jnp.asarray(advantages)
    with jax.numpy_dtype_promotion("strict"):
        objective, pull = jax.vjp(lambda l: function(l, advantages, clip), jnp.asarray(log_ratio))
        (gradient,) = pull(jnp.ones_like(objective))
    return np.asarray(objective), np.asarray(gradient)


def differs(got, expected, tolerance, scale):
    """Where `got` is off by more than tolerance * scale; a NaN is."""
    return ~(np.abs(got.astype(np.float64) - expected) <= tolerance * scale)


def faults(module, name) -> Iterator[str]:
    """What is wrong with one variant of a surrogates module, by literals and by its closed form.

    The closed form is held to the literals, and what autodiff gives to both.
    """
    yield from closed_form_faults(module, name)
    for clip in settings(module, name):
        for dtype in DTYPES:
            log_ratio, advantages = points(clip, dtype)
            exact = advantages.astype(np.float64)
            weight = module.gradient_weight(name, log_ratio, exact, clip)
            yield from autodiff_faults(module, name, log_ratio, advantages, clip, weight)
    for clip, sign, log_ratio, expected in literals(module, name):
        for dtype in DTYPES:
            rest = SIZE - len(log_ratio)
            l, advantages = np.pad(log_ratio, (0, rest)), np.full(SIZE, sign)
            weight = np.pad(np.asarray(expected, np.float64), (0, rest), constant_values=1)
            yield from autodiff_faults(
                module, name, l.astype(dtype), advantages.astype(dtype), clip, weight, roundings=3
            )


def autodiff_faults(module, name, log_ratio, advantages, clip, weight, roundings=1):
    """Value and gradient of a surrogate against its printed value and W.

    Args:
        roundings: of the tolerance; W given for another l than the rounded one needs 3.
    """
    dtype, exact = log_ratio.dtype, advantages.astype(np.float64)
    with precision(dtype):
        objective, gradient = outcome(module.SURROGATES[name], log_ratio, advantages, clip)
    scale = roundings * np.maximum(np.abs(weight), FLOOR.get(name, 0)) * np.abs(exact)
    bad = differs(gradient, weight * exact, TOLERANCE[dtype], scale)
    value = value_of(name, log_ratio, exact, clip)
    if value is not None:
        bad |= differs(objective, value, TOLERANCE[dtype], np.abs(value))
    if objective.dtype != dtype or gradient.dtype != dtype:
        yield f"{name}: {dtype} became {objective.dtype}, {gradient.dtype}"
    if bad.any():
        at = int(np.argmax(bad))
        yield (
            f"{name} {dtype} {clip}: {bad.sum()} points, first l {log_ratio[at]}, A {exact[at]}: "
            f"gradient {gradient[at]}, not {weight[at] * exact[at]}; objective {objective[at]}, "
            f"not {None if value is None else value[at]}"
        )


def literals(module, name):
    """(clip, sign of A, log-ratios, W) of each row of the tables."""
    for row, bounds, sign, ratios, expected in TABLE:
        if row == name:
            yield module.Clip(**bounds), sign, np.log(ratios), expected
    if name in EXTREMES:
        own, *both = EXTREMES[name]
        clip = module.Clip(**WIDE, **own)
        for sign, expected in zip((1, -1), both, strict=True):
            yield clip, sign, np.array(FAR, np.float64), expected


def closed_form_faults(module, name):
    """W against the literals; a field changes it just where the variant says that it reads it."""
    for clip, sign, log_ratio, expected in literals(module, name):
        closed = module.gradient_weight(name, log_ratio, np.array(sign), clip)
        if closed.dtype != np.float64 or differs(closed, expected, 1e-12, np.abs(expected)).any():
            yield f"{name}, A {sign}, {clip}: closed form {closed} not {expected}"
    if module.MAX_LOG_RATIO != 20:
        yield f"l is held at {module.MAX_LOG_RATIO}"
    base = module.Clip(low=0.2, high=0.28, variant=name)
    at = points(base, DTYPES[1])
    before = module.gradient_weight(name, *at, base)
    for field, value in (OWN | {"dual": 3.0}).items():
        after = module.gradient_weight(name, *at, dataclasses.replace(base, **{field: value}))
        if (before != after).any() != (field in module.READS[name]):
            yield f"{name}: READS is wrong about {field}"


@pytest.mark.parametrize("name", SURROGATES)
def test_autodiff_equals_literals_and_closed_form(name):
    assert list(faults(surrogates, name)) == []


def test_every_variant_has_rows():
    names = set(get_args(Variant))
    assert names == set(SURROGATES) == set(READS) == set(surrogates._WEIGHTS)
    assert {(row[0], row[2]) for row in TABLE} == {(n, sign) for n in names for sign in (+1, -1)}
    assert all(len(ratios) == len(expected) for *_, ratios, expected in TABLE)
    # A number of a variant's own is tried away from its default.
    assert set(OWN) | {"dual"} == set(surrogates._OWN_FIELDS)


def test_sapo_samples():
    """Four digits of W as the specification prints them: A > 0, then A < 0."""
    printed = {0.1: (0.0822, 0.0806), 0.5: (0.4700, 0.4671), 1.6: (1.464, 1.451),
               4: (0.723, 0.630), 12: (8e-4, 5e-4)}  # fmt: skip
    for column, sign in enumerate((1, -1)):
        weight = gradient_weight("sapo", np.log(list(printed)), np.array(sign), Clip())
        expected = [both[column] for both in printed.values()]
        np.testing.assert_allclose(weight, expected, atol=5e-4)
        np.testing.assert_allclose(weight[:2], expected[:2], atol=5e-5)


# --- the same through other code ----------------------------------------------------------------


def random_points(name, dtype, count=128):
    clip = Clip(low=0.2, high=0.28, variant=name, **{f: OWN[f] for f in READS[name] if f in OWN})
    rng = np.random.default_rng(1)
    log_ratio = rng.normal(scale=0.5, size=count).astype(dtype)
    return clip, log_ratio, rng.normal(size=count).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SURROGATES)
def test_gradient_reaches_the_logits(name, dtype):
    """d objective / d logits = W A (one-hot - softmax): 16 tokens, and log pi by log_softmax."""
    clip, shift, advantages = random_points(name, dtype)
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(len(shift), 16)).astype(dtype)
    drawn = rng.integers(16, size=len(shift))
    with precision(dtype):
        rows, a = jnp.arange(len(shift)), jnp.asarray(advantages)
        start = jnp.asarray(logits)
        old = jax.nn.log_softmax(start)[rows, drawn] - jnp.asarray(shift)

        def total(logits):
            log_ratio = jax.nn.log_softmax(logits)[rows, drawn] - old
            return SURROGATES[name](log_ratio, a, clip).sum(), log_ratio

        gradient, log_ratio = jax.grad(total, has_aux=True)(start)
    exact = np.exp(logits.astype(np.float64))
    slope = np.eye(16)[drawn] - exact / exact.sum(axis=1, keepdims=True)
    weight = gradient_weight(name, np.asarray(log_ratio), advantages, clip)
    expected = (weight * advantages)[:, None] * slope
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=4 * TOLERANCE[dtype])


def test_jitted_step_moves_log_probs_by_the_closed_form():
    """Gradient descent on the log-probs themselves, through the loss and the jitted step.

    One table of log-probs a variant in one compiled program, so that every variant meets the
    compiler's rewrites; bounds and their neighbours are among the points.
    """
    shape, clips = (16, SIZE // 16), {name: next(settings(surrogates, name)) for name in SURROGATES}
    log_ratio, advantages = points(clips["gppo"], DTYPES[0])
    weights = np.random.default_rng(3).uniform(0.1, 1, SIZE).astype(np.float32)
    integers, zeros = np.ones(shape, np.int32), np.zeros(shape, np.float32)
    batch = RolloutBatch(
        tokens=integers, targets=integers, positions=integers, segments=integers,
        mask=integers > 0, loss_weights=weights.reshape(shape), positive_weights=zeros,
        advantages=advantages.reshape(shape), old_logprobs=-log_ratio.reshape(shape),
        old_entropy=zeros, reference_logprobs=zeros, sampler_logprobs=zeros,
    )  # fmt: skip

    def loss_fn(params, piece):
        parts = {
            n: policy_loss(params[n], piece.old_entropy, piece, clip=clips[n]) for n in SURROGATES
        }
        return sum(loss for loss, _ in parts.values()), parts["gppo"][1]

    optimizer = optax.identity()
    step = make_step(loss_fn, optimizer=optimizer)
    params = {name: jnp.zeros(shape) for name in SURROGATES}
    batch = jax.tree.map(lambda x: jnp.asarray(x)[None], batch)
    state, values = step(init_state(params, optimizer), batch, 1, 0.5)
    assert int(values["updates_skipped"]) == 0
    for name, clip in clips.items():
        weight = gradient_weight(name, log_ratio, advantages.astype(float), clip)
        expected = 0.5 * weights * weight * advantages
        scale = np.maximum(weight, FLOOR.get(name, 0)) * np.abs(0.5 * weights * advantages)
        moved = np.asarray(state.params[name]).reshape(-1)
        assert not differs(moved, expected, TOLERANCE[DTYPES[0]], scale).any(), name
