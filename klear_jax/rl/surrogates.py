# SPDX-License-Identifier: Apache-2.0
"""Token surrogates: what each token contributes to the objective, to be maximised.

A surrogate is a small elementwise function `(log_ratio, advantages, clip) -> objective`. A new one
is such a function under `@surrogate`, its name in `Variant`, its closed form in `_WEIGHTS`, and its
rows of the gradient table in tests/rl/test_surrogates.py (docs/clipping.md walks through one).

Notation: r = pi / pi_old of one token (or what `Clip.level` makes of it), l = log r, A its
advantage, sg = stop-gradient, a = r / sg(r), and W the gradient weight: d objective / d log pi =
W A. A bound belongs to the interior, where W = r: branches are `where` on closed intervals, since
`minimum` and `clip` split ties (0.75 r at a bound). Bounds are compared as log-ratios, because a
compiler may compute one exponential twice with two roundings. Objectives are written with a where
the papers print log pi: the same gradient, and a value that differs by terms without gradient.
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

Variant = Literal[
    "reinforce", "unclipped", "ppo", "gppo", "gppo_high", "gppo_low", "ce_gppo",
    "cispo", "cispo_upper", "sapo", "aspo",
]  # fmt: skip
Level = Literal["token", "sequence", "sequence_token", "geometric"]


@dataclasses.dataclass(frozen=True)
class Clip:
    """Bounds of the ratio and what happens beyond them.

    `low` and `high` also set the cells of the telemetry for variants that do not clip. In a
    run, a field that the variant does not read must keep its default (`check_effect`).
    """

    low: float = 0.2
    """The lower bound is 1 - low."""
    high: float = 0.28
    """The upper bound is 1 + high."""
    dual: float | None = None
    """Where A < 0 and r > dual, the objective is the constant dual * A (dual-clip PPO); the
    released recipe uses 10. None: no such bound. For aspo: the largest weight."""
    beta_low: float = 1.0
    """ce_gppo: share of the lower bound's gradient that is kept."""
    beta_high: float = 1.0
    """ce_gppo: share of the upper bound's gradient that is kept."""
    tau_positive: float = 1.0
    """sapo: how fast the weight falls away from r = 1 where A > 0."""
    tau_negative: float = 1.05
    """sapo: the same where A < 0."""
    variant: Variant = "gppo"
    """Which surrogate of `SURROGATES`."""
    level: Level = "token"
    """What r is: one token's ratio; sequence: the geometric mean over its response (GSPO);
    sequence_token: that value with each token's own gradient (GSPO-token); geometric: the mean
    after each token was clipped on its own (GMPO; goes with variant unclipped)."""

    def __post_init__(self):
        if self.variant not in SURROGATES:
            raise ValueError(f"clip variant {self.variant!r} is none of {', '.join(SURROGATES)}")
        if not 0 <= self.low <= 1 or not 0 <= self.high < float("inf"):
            raise ValueError(
                f"clip low {self.low} must lie in [0, 1] and high {self.high} be >= 0 and finite"
            )
        if self.dual is not None and not 1 + self.high < self.dual < float("inf"):
            raise ValueError(
                f"clip dual {self.dual} must lie above the upper bound {1 + self.high} and be "
                "finite; the released recipe uses 10"
            )
        if not all(0 <= beta < float("inf") for beta in (self.beta_low, self.beta_high)):
            raise ValueError(
                f"clip beta_low {self.beta_low} and beta_high {self.beta_high} must be >= 0"
            )
        if not all(0 < tau < float("inf") for tau in (self.tau_positive, self.tau_negative)):
            raise ValueError(
                f"clip tau_positive {self.tau_positive} and tau_negative {self.tau_negative} must "
                "be > 0"
            )

    def check_effect(self) -> None:
        """Refuse numbers that the chosen variant and level do not read.

        Raises:
            ValueError: names the field and what to do.
        """
        if self.level == "geometric" and self.variant != "unclipped":
            raise ValueError(
                "clip level geometric clips every token before the mean, so it goes with variant "
                f"unclipped, not {self.variant}, which would clip again"
            )
        own = [f for f in dataclasses.fields(self) if f.name in _OWN_FIELDS]
        for field in own:
            value = getattr(self, field.name)
            if field.name not in READS[self.variant] and value != field.default:
                raise ValueError(
                    f"clip {field.name} {value} has no effect on variant {self.variant}; leave it "
                    f"at {field.default}"
                )


_OWN_FIELDS = ("dual", "beta_low", "beta_high", "tau_positive", "tau_negative")
"""Fields of `Clip` that only some variants read."""

Tokens = Float[Array, "*shape"]
Surrogate = Callable[[Tokens, Tokens, Clip], Tokens]

SURROGATES: dict[str, Surrogate] = {}
"""Variant name -> surrogate."""
READS: dict[str, tuple[str, ...]] = {}
"""Variant name -> which of `_OWN_FIELDS` it reads."""


def surrogate(*reads: str) -> Callable[[Surrogate], Surrogate]:
    """Register a function under its own name, with the fields of `Clip` that are its own."""

    def register(function: Surrogate) -> Surrogate:
        SURROGATES[function.__name__] = function
        READS[function.__name__] = reads
        return function

    return register


# --- parts ------------------------------------------------------------------------------------


def ratio_of(log_ratio: Tokens) -> Tokens:
    """r = exp(l), with l held at +-`MAX_LOG_RATIO` (gradient 0 beyond)."""
    # A NaN is not outside: it stays a NaN, so that the update is skipped and nothing is counted.
    outside = jnp.abs(log_ratio) > MAX_LOG_RATIO
    # Two wheres: the branch that is not chosen must not overflow either, or its gradient is NaN.
    safe = jnp.where(outside, 0.0, log_ratio)
    edge = jnp.where(log_ratio > 0, np.exp(MAX_LOG_RATIO), np.exp(-MAX_LOG_RATIO))
    return jnp.where(outside, edge.astype(log_ratio.dtype), jnp.exp(safe))


def anchor_of(log_ratio: Tokens) -> Tokens:
    """a = r / sg(r): the number 1 with the gradient of log pi.

    Written exp(l - sg(l)), never as a division, which is 0/0 or inf/inf for large |l|.
    """
    return jnp.exp(log_ratio - jax.lax.stop_gradient(log_ratio))


def log_low(clip: Clip) -> float:
    """log(1 - low); -inf where low is 1."""
    return float(np.log(1 - clip.low)) if clip.low < 1 else -float("inf")


def log_high(clip: Clip) -> float:
    """log(1 + high)."""
    return float(np.log(1 + clip.high))


def above(log_ratio: Tokens, clip: Clip) -> Array:
    """r > 1 + high."""
    return log_ratio > log_high(clip)


def below(log_ratio: Tokens, clip: Clip) -> Array:
    """r < 1 - low."""
    return log_ratio < log_low(clip)


def clipped_high(log_ratio: Tokens, advantages: Tokens, clip: Clip) -> Array:
    """A > 0 and r > 1 + high: PPO gives such a token no gradient."""
    return (advantages > 0) & above(log_ratio, clip)


def clipped_low(log_ratio: Tokens, advantages: Tokens, clip: Clip) -> Array:
    """A < 0 and r < 1 - low: PPO gives such a token no gradient."""
    return (advantages < 0) & below(log_ratio, clip)


def _clipped(log_ratio, advantages, clip, *, high, low) -> Tokens:
    """r, but `high` and `low` at clipped tokens, and the constant `dual` beyond that bound."""
    ratio = jnp.where(clipped_high(log_ratio, advantages, clip), high, ratio_of(log_ratio))
    ratio = jnp.where(clipped_low(log_ratio, advantages, clip), low, ratio)
    if clip.dual is None:
        return ratio
    beyond = (advantages < 0) & (log_ratio > float(np.log(clip.dual)))
    return jnp.where(beyond, clip.dual, ratio)


# --- the variants -----------------------------------------------------------------------------


@surrogate()
def reinforce(log_ratio: Tokens, advantages: Tokens, clip: Clip) -> Tokens:
    """a A: the plain policy gradient, W = 1 (Williams 1992). Off-policy it is biased."""
    return anchor_of(log_ratio) * advantages


@surrogate()
def unclipped(log_ratio: Tokens, advantages: Tokens, clip: Clip) -> Tokens:
    """r A: the importance-weighted policy gradient, W = r, without any bound."""
    return ratio_of(log_ratio) * advantages


@surrogate("dual")
def ppo(log_ratio: Tokens, advantages: Tokens, clip: Clip) -> Tokens:
    """min(r A, clip(r, 1 - low, 1 + high) A): clipped tokens have no gradient.

    Schulman et al. 2017 (arXiv 1707.06347), eq. 7; with high > low it is DAPO's clip-higher (arXiv
    2503.14476), with `dual` dual-clip PPO (arXiv 1912.09729).
    """
    high, low = 1 + clip.high, 1 - clip.low
    return _clipped(log_ratio, advantages, clip, high=high, low=low) * advantages


@surrogate("dual")
def gppo(log_ratio: Tokens, advantages: Tokens, clip: Clip) -> Tokens:
    """min(r A, clip(r, (1 - low) a, (1 + high) a) A) with a = r / sg(r).

    PPO's value everywhere, but a clipped token keeps the gradient of the bound: W = 1 + high where
    A > 0 and r is above, 1 - low where A < 0 and r is below (Klear-Reasoner, arXiv 2508.07629, the
    GPPO objective of section 3).
    """
    anchor = anchor_of(log_ratio)
    high, low = (1 + clip.high) * anchor, (1 - clip.low) * anchor
    return _clipped(log_ratio, advantages, clip, high=high, low=low) * advantages


@surrogate("dual")
def gppo_high(log_ratio: Tokens, advantages: Tokens, clip: Clip) -> Tokens:
    """GPPO at the upper bound, PPO at the lower (`only_high` of Klear's released code)."""
    high = (1 + clip.high) * anchor_of(log_ratio)
    return _clipped(log_ratio, advantages, clip, high=high, low=1 - clip.low) * advantages


@surrogate("dual")
def gppo_low(log_ratio: Tokens, advantages: Tokens, clip: Clip) -> Tokens:
    """GPPO at the lower bound, PPO at the upper: the other half, for ablations."""
    low = (1 - clip.low) * anchor_of(log_ratio)
    return _clipped(log_ratio, advantages, clip, high=1 + clip.high, low=low) * advantages


@surrogate("dual", "beta_low", "beta_high")
def ce_gppo(log_ratio: Tokens, advantages: Tokens, clip: Clip) -> Tokens:
    """GPPO with the clipped terms times beta: W = beta_high (1 + high) and beta_low (1 - low).

    The general form of Klear-Reasoner's appendix, tuned as CE-GPPO (arXiv 2509.20712).
    """
    anchor = anchor_of(log_ratio)
    high = clip.beta_high * (1 + clip.high) * anchor
    low = clip.beta_low * (1 - clip.low) * anchor
    return _clipped(log_ratio, advantages, clip, high=high, low=low) * advantages


@surrogate()
def cispo(log_ratio: Tokens, advantages: Tokens, clip: Clip) -> Tokens:
    """sg(clip(r, 1 - low, 1 + high)) a A: the weight is clipped, on both sides, for either sign.

    The form that the Klear-Reasoner paper compares with; MiniMax-M1 leaves the lower bound open.
    """
    weight = jnp.clip(ratio_of(log_ratio), 1 - clip.low, 1 + clip.high)
    return jax.lax.stop_gradient(weight) * anchor_of(log_ratio) * advantages


@surrogate()
def cispo_upper(log_ratio: Tokens, advantages: Tokens, clip: Clip) -> Tokens:
    """sg(min(r, 1 + high)) a A: CISPO of MiniMax-M1 (arXiv 2506.13585, eq. 4)."""
    weight = jnp.minimum(ratio_of(log_ratio), 1 + clip.high)
    return jax.lax.stop_gradient(weight) * anchor_of(log_ratio) * advantages


@surrogate("tau_positive", "tau_negative")
def sapo(log_ratio: Tokens, advantages: Tokens, clip: Clip) -> Tokens:
    """(4 / tau) sigmoid(tau (r - 1)) A: a smooth gate, W = 4 p (1 - p) r with p the sigmoid.

    Soft adaptive policy optimization (arXiv 2511.20347); tau by the sign of A.
    """
    tau = jnp.where(advantages > 0, clip.tau_positive, clip.tau_negative).astype(log_ratio.dtype)
    x = tau * (ratio_of(log_ratio) - 1)
    # sigmoid(x) = 1 - sigmoid(-x): the small one of the two has an exact gradient.
    tail = jax.nn.sigmoid(jnp.where(x > 0, -x, x))
    return 4 / tau * jnp.where(x > 0, 1 - tail, tail) * advantages


@surrogate("dual")
def aspo(log_ratio: Tokens, advantages: Tokens, clip: Clip) -> Tokens:
    """sg(w) a A with w = 1 / r where A > 0 and r where A < 0, at most `dual`; 0 at clipped tokens.

    ASPO (arXiv 2510.06062): unlikely good tokens count more, not less.
    """
    weight = ratio_of(jnp.where(advantages > 0, -log_ratio, log_ratio))
    weight = jax.lax.stop_gradient(weight if clip.dual is None else jnp.minimum(weight, clip.dual))
    dropped = clipped_high(log_ratio, advantages, clip) | clipped_low(log_ratio, advantages, clip)
    return weight * jnp.where(dropped, 1.0, anchor_of(log_ratio)) * advantages


# --- the same in closed form, to test them ------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Points:
    """Points (l, sign of A) in numpy, and the regions that the closed forms speak of."""

    log_ratio: np.ndarray
    positive: np.ndarray
    clip: Clip

    @property
    def ratio(self) -> np.ndarray:
        held = np.clip(self.log_ratio.astype(np.float64), -MAX_LOG_RATIO, MAX_LOG_RATIO)
        return np.exp(held)

    @property
    def free(self) -> np.ndarray:
        """The weight of a branch that differentiates r: r, and 0 where l is held."""
        return np.where(np.abs(self.log_ratio) > MAX_LOG_RATIO, 0.0, self.ratio)

    def beyond(self, bound: float, *, side: int) -> np.ndarray:
        """Outside a bound of r, compared in the precision in which l was given."""
        with np.errstate(divide="ignore"):
            edge = np.log(bound).astype(self.log_ratio.dtype)
        return self.log_ratio > edge if side > 0 else self.log_ratio < edge

    def select(self, high: float, low: float) -> np.ndarray:
        """r inside; `high` where A > 0 and r is above, `low` where A < 0 and r is below; dual 0."""
        clip = self.clip
        weight = np.where(self.positive & self.beyond(1 + clip.high, side=1), high, self.free)
        weight = np.where(~self.positive & self.beyond(1 - clip.low, side=-1), low, weight)
        if clip.dual is not None:
            weight = np.where(~self.positive & self.beyond(clip.dual, side=1), 0.0, weight)
        return weight

    def sapo(self) -> np.ndarray:
        tau = np.where(self.positive, self.clip.tau_positive, self.clip.tau_negative)
        # 4 p (1 - p) = 1 / cosh^2(x / 2); beyond 600 it is below 1e-500.
        x = np.minimum(tau * (self.ratio - 1), 600.0)
        return self.free / np.cosh(x / 2) ** 2

    def aspo(self) -> np.ndarray:
        cap = np.inf if self.clip.dual is None else self.clip.dual
        inside = np.minimum(np.where(self.positive, 1 / self.ratio, self.ratio), cap)
        gone = self.positive & self.beyond(1 + self.clip.high, side=1)
        gone |= ~self.positive & self.beyond(1 - self.clip.low, side=-1)
        return np.where(gone, 0.0, inside)


_WEIGHTS: dict[str, Callable[[_Points, Clip], np.ndarray]] = {
    "reinforce": lambda p, c: np.ones_like(p.ratio),
    "unclipped": lambda p, c: p.free,
    "ppo": lambda p, c: p.select(0.0, 0.0),
    "gppo": lambda p, c: p.select(1 + c.high, 1 - c.low),
    "gppo_high": lambda p, c: p.select(1 + c.high, 0.0),
    "gppo_low": lambda p, c: p.select(0.0, 1 - c.low),
    "ce_gppo": lambda p, c: p.select(c.beta_high * (1 + c.high), c.beta_low * (1 - c.low)),
    "cispo": lambda p, c: np.clip(p.ratio, 1 - c.low, 1 + c.high),
    "cispo_upper": lambda p, c: np.minimum(p.ratio, 1 + c.high),
    "sapo": lambda p, c: p.sapo(),
    "aspo": lambda p, c: p.aspo(),
}


def gradient_weight(
    name: str, log_ratio: np.ndarray, advantage: np.ndarray, clip: Clip
) -> np.ndarray:
    """W in closed form, float64 numpy, written apart from the surrogates to test them.

    Beyond |l| = `MAX_LOG_RATIO` a branch that differentiates r has W = 0, and one that uses r as a
    detached weight has its value there. The region of a point is decided in the precision of
    `log_ratio`, so a float32 array meets the bounds where a float32 surrogate does.
    """
    log_ratio, advantage = np.broadcast_arrays(np.asarray(log_ratio), np.asarray(advantage))
    if not np.issubdtype(log_ratio.dtype, np.floating):
        log_ratio = log_ratio.astype(np.float64)
    return np.asarray(_WEIGHTS[name](_Points(log_ratio, advantage > 0, clip), clip), np.float64)
