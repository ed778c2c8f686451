# SPDX-License-Identifier: Apache-2.0
"""Token surrogates: what each token contributes to the objective, to be maximised.

A surrogate is a small elementwise function `(log_ratio, advantages, clip) -> objective`. A new one
is such a function, one entry of `SURROGATES` with its closed form in `gradient_weight`, and one row
of the gradient table in tests/rl/test_surrogates.py.

Notation: r = pi / pi_old of one token, l = log r, A its advantage, sg = stop-gradient, and W the
gradient weight: d objective / d log pi = W * A. A bound belongs to the interior, where W = r:
branches are `where` on closed intervals, since `minimum` and `clip` split ties (0.75 r at a bound).
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

MAX_LOG_RATIO = 20.0
"""Where a branch uses r itself, l is held at +-20 (r at 4.9e8 or 2.1e-9) and its gradient is 0
beyond: exp overflows float32 at 88. Branches that keep a bounded gradient are not affected."""

Variant = Literal["gppo", "ppo"]


@dataclasses.dataclass(frozen=True)
class Clip:
    """Bounds of the ratio and what happens beyond them."""

    low: float = 0.2
    """The lower bound is 1 - low."""
    high: float = 0.28
    """The upper bound is 1 + high."""
    dual: float | None = None
    """Where A < 0 and r > dual, the objective is the constant dual * A (dual-clip PPO); the
    released recipe uses 10. None: no such bound."""
    variant: Variant = "gppo"
    """Which surrogate of `SURROGATES`."""

    def __post_init__(self):
        if not 0 <= self.low <= 1 or not 0 <= self.high < float("inf"):
            raise ValueError(
                f"clip low {self.low} must lie in [0, 1] and high {self.high} be >= 0 and finite"
            )
        if self.dual is not None and not self.dual > 1 + self.high:
            raise ValueError(
                f"clip dual {self.dual} must lie above the upper bound {1 + self.high}; the "
                "released recipe uses 10"
            )
        if self.variant not in SURROGATES:
            raise ValueError(f"clip variant {self.variant!r} is none of {', '.join(SURROGATES)}")


Tokens = Float[Array, "*shape"]
Surrogate = Callable[[Tokens, Tokens, Clip], Tokens]


def ratio_of(log_ratio: Tokens) -> Tokens:
    """r = exp(l), with l held at +-`MAX_LOG_RATIO` (gradient 0 beyond)."""
    # A NaN is not outside: it stays a NaN, so that the update is skipped and nothing is counted.
    outside = jnp.abs(log_ratio) > MAX_LOG_RATIO
    # Two wheres: the branch that is not chosen must not overflow either, or its gradient is NaN.
    safe = jnp.where(outside, 0.0, log_ratio)
    edge = jnp.where(log_ratio > 0, np.exp(MAX_LOG_RATIO), np.exp(-MAX_LOG_RATIO))
    return jnp.where(outside, edge.astype(log_ratio.dtype), jnp.exp(safe))


def anchor_of(log_ratio: Tokens) -> Tokens:
    """r / sg(r): the number 1 with the gradient of log pi.

    Written exp(l - sg(l)), never as a division, which is 0/0 or inf/inf for large |l|.
    """
    return jnp.exp(log_ratio - jax.lax.stop_gradient(log_ratio))


def clipped_high(ratio: Tokens, advantages: Tokens, clip: Clip) -> Array:
    """A > 0 and r > 1 + high: PPO gives such a token no gradient."""
    return (advantages > 0) & (ratio > 1 + clip.high)


def clipped_low(ratio: Tokens, advantages: Tokens, clip: Clip) -> Array:
    """A < 0 and r < 1 - low: PPO gives such a token no gradient."""
    return (advantages < 0) & (ratio < 1 - clip.low)


def ppo(log_ratio: Tokens, advantages: Tokens, clip: Clip) -> Tokens:
    """min(r A, clip(r, 1 - low, 1 + high) A): clipped tokens have no gradient.

    Schulman et al. 2017, eq. 7; with high > low it is DAPO's clip-higher.
    """
    ratio = ratio_of(log_ratio)
    bounded = jnp.where(clipped_high(ratio, advantages, clip), 1 + clip.high, ratio)
    bounded = jnp.where(clipped_low(ratio, advantages, clip), 1 - clip.low, bounded)
    return _dual(bounded, ratio, advantages, clip) * advantages


def gppo(log_ratio: Tokens, advantages: Tokens, clip: Clip) -> Tokens:
    """min(r A, clip(r, (1 - low) a, (1 + high) a) A) with a = r / sg(r).

    PPO's value everywhere, but a clipped token keeps the gradient of the bound: W = 1 + high where
    A > 0 and r is above, 1 - low where A < 0 and r is below (Klear-Reasoner, arXiv 2508.07629, the
    GPPO objective of section 3).
    """
    ratio, anchor = ratio_of(log_ratio), anchor_of(log_ratio)
    bounded = jnp.where(clipped_high(ratio, advantages, clip), (1 + clip.high) * anchor, ratio)
    bounded = jnp.where(clipped_low(ratio, advantages, clip), (1 - clip.low) * anchor, bounded)
    return _dual(bounded, ratio, advantages, clip) * advantages


def _dual(bounded: Tokens, ratio: Tokens, advantages: Tokens, clip: Clip) -> Tokens:
    """Hold the ratio at the constant `clip.dual` where A < 0 and r is larger."""
    if clip.dual is None:
        return bounded
    return jnp.where((advantages < 0) & (ratio > clip.dual), clip.dual, bounded)


SURROGATES: dict[str, Surrogate] = {"gppo": gppo, "ppo": ppo}
"""Variant name -> surrogate."""

_KEPT = {"gppo": 1.0, "ppo": 0.0}
"""Share of a bound's gradient that a clipped token keeps."""


def gradient_weight(
    name: str, log_ratio: np.ndarray, advantage: np.ndarray, clip: Clip
) -> np.ndarray:
    """W in closed form, float64 numpy, written apart from the surrogates to test them.

    W is r in the interior; kept * (1 + high) where A > 0 and r > 1 + high; kept * (1 - low) where
    A < 0 and r < 1 - low; 0 where A < 0 and r > dual; and 0 where r itself counts but
    |l| > `MAX_LOG_RATIO`.
    """
    log_ratio, advantage = np.broadcast_arrays(
        np.asarray(log_ratio, np.float64), np.asarray(advantage, np.float64)
    )
    ratio = np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    weight = np.where(np.abs(log_ratio) > MAX_LOG_RATIO, 0.0, ratio)
    above, below = ratio > 1 + clip.high, ratio < 1 - clip.low
    weight = np.where((advantage > 0) & above, _KEPT[name] * (1 + clip.high), weight)
    weight = np.where((advantage < 0) & below, _KEPT[name] * (1 - clip.low), weight)
    if clip.dual is not None:
        weight = np.where((advantage < 0) & (ratio > clip.dual), 0.0, weight)
    return weight
