# SPDX-License-Identifier: Apache-2.0
"""AdamW against a float64 oracle through the jitted step, and the learning-rate schedules."""

import jax.numpy as jnp
import numpy as np
import pytest

from klear_jax.train.metrics import Metrics
from klear_jax.train.optim import OptimConfig, make_optimizer, make_schedule
from klear_jax.train.state import init_state
from klear_jax.train.step import make_step


def linear_loss(params, batch):
    """A loss whose gradient is the batch itself."""
    return sum((params[name] * batch[name]).sum() for name in params), Metrics()


def adamw(params, gradients, cfg, rates):
    """AdamW (Loshchilov and Hutter) with the global norm clipped first, float64."""
    first = {k: np.zeros(v.shape) for k, v in params.items()}
    second = {k: np.zeros(v.shape) for k, v in params.items()}
    params = {k: v.astype(np.float64) for k, v in params.items()}
    for number, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradient.values()))
        for name in params:
            g = gradient[name].astype(np.float64) * min(1.0, cfg.clip_norm / norm)
            first[name] = cfg.b1 * first[name] + (1 - cfg.b1) * g
            second[name] = cfg.b2 * second[name] + (1 - cfg.b2) * g**2
            mean = first[name] / (1 - cfg.b1**number)
            root = np.sqrt(second[name] / (1 - cfg.b2**number))
            decay = cfg.weight_decay * params[name]
            params[name] = params[name] - rate * (mean / (root + cfg.eps) + decay)
    return params


def test_adamw_equals_oracle():
    cfg = OptimConfig(b1=0.8, b2=0.95, eps=1e-3, weight_decay=0.1, clip_norm=1.0)
    rng = np.random.default_rng(0)
    shapes = {"a": (3, 5), "b": (7,)}
    start = {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    # Norms from far below the clip to far above it.
    gradients = [
        {k: (scale * rng.normal(size=s)).astype(np.float32) for k, s in shapes.items()}
        for scale in (0.01, 3.0, 0.1, 50.0, 0.05)
    ]
    rates = [0.0, 0.1, 0.05, 0.2, 0.01]
    optimizer = make_optimizer(cfg)
    step = make_step(linear_loss, optimizer=optimizer)
    state = init_state({k: jnp.asarray(v) for k, v in start.items()}, optimizer)
    for number, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        state, values = step(state, {k: jnp.asarray(v)[None] for k, v in gradient.items()}, 1, rate)
        expected = adamw(start, gradients[:number], cfg, rates[:number])
        for name in shapes:
            np.testing.assert_allclose(state.params[name], expected[name], rtol=2e-5, atol=1e-6)
        norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        np.testing.assert_allclose(values["grad_norm"], norm, rtol=1e-5)
        assert int(state.updates) == number


def test_small_updates_are_not_swallowed():
    """AReaL PR 1634: 1000 updates of 1e-6 move a weight of 1 to .999 (in bfloat16 it stays 1)."""
    optimizer = make_optimizer(OptimConfig(weight_decay=0.0))
    step = make_step(linear_loss, optimizer=optimizer)
    state = init_state({"w": jnp.ones(768)}, optimizer)
    batch = {"w": jnp.full((1, 768), 0.01)}
    for _ in range(1000):
        state, _ = step(state, batch, 1, 1e-6)
    assert state.params["w"].dtype == jnp.float32
    np.testing.assert_allclose(state.params["w"], 0.999, atol=3e-5)
    assert int(state.updates) == 1000


def test_defaults_follow_the_recipe():
    cfg = OptimConfig()
    assert (cfg.b1, cfg.b2, cfg.eps, cfg.weight_decay) == (0.9, 0.999, 1e-8, 0.1)
    assert (cfg.learning_rate, cfg.clip_norm, cfg.warmup_steps) == (1e-6, 1.0, 0)


def rates_of(total, **fields):
    schedule = make_schedule(OptimConfig(**fields), total)
    rates = [schedule(step) for step in range(total)]
    assert all(type(rate) is float for rate in rates)
    return rates


def test_constant_schedule():
    np.testing.assert_allclose(rates_of(4, learning_rate=2e-6), [2e-6] * 4, rtol=1e-6)


def test_warmup_starts_at_zero():
    rates = rates_of(6, learning_rate=1e-6, warmup_steps=4)
    assert rates[0] == 0.0
    np.testing.assert_allclose(rates, np.array([0, 0.25, 0.5, 0.75, 1, 1]) * 1e-6, rtol=1e-6)


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("total", [5, 11, 100])
def test_cosine_reaches_its_floor_at_the_last_step(total, warmup):
    rates = rates_of(
        total, learning_rate=8e-5, final_learning_rate=4e-5, schedule="cosine", warmup_steps=warmup
    )
    np.testing.assert_allclose(rates[warmup], 8e-5, rtol=1e-6)
    np.testing.assert_allclose(rates[-1], 4e-5, rtol=1e-6)
    progress = np.arange(total - warmup) / (total - warmup - 1)
    expected = 4e-5 + 4e-5 * (1 + np.cos(np.pi * progress)) / 2
    np.testing.assert_allclose(rates[warmup:], expected, rtol=1e-6)
    np.testing.assert_allclose(rates[:warmup], 8e-5 * np.arange(warmup) / 3, rtol=1e-6)


def test_cosine_of_one_step():
    assert rates_of(1, learning_rate=1e-3, schedule="cosine") == pytest.approx([1e-3])


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"learning_rate": -1e-6}, "learning_rate"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"final_learning_rate": 1e-6}, "final_learning_rate"),
    ],
)
def test_optim_config_refuses(fields, word):
    with pytest.raises(ValueError, match=word):
        OptimConfig(**fields)
