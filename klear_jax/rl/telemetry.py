# SPDX-License-Identifier: Apache-2.0
"""What clipping did, measured in the same way for every variant.

*Gradient mass* of a token is |w W A|: the size of its contribution to d loss / d log pi, weights of
the mini-batch included. It is taken by differentiating the objective itself, so it needs no formula
of the variant. Counts and masses are sums; everything is divided once, after the last micro-batch.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from klear_jax.core.batch import RolloutBatch
from klear_jax.core.numerics import masked_sum
from klear_jax.rl.levels import LEVELS
from klear_jax.rl.surrogates import (
    MAX_LOG_RATIO,
    Clip,
    Tokens,
    above,
    below,
    clipped_high,
    clipped_low,
    ratio_of,
)
from klear_jax.train.metrics import Metrics

LOG_RATIO_EDGES = np.linspace(-1.0, 1.0, 41)
"""Bins of the ratio histogram, in log r; the first and last bin also hold what lies beyond."""
ENTROPY_EDGES = np.concatenate([[0.0], np.logspace(-5, np.log10(12.5), 48)])
"""Bins of the entropy of a token, in nats (log 152,000 = 11.9)."""
ENTROPY_ROWS = ("tokens", "clipped", "mass", "clipped_mass", "unclipped_mass", "lost_mass")
"""What the entropy histogram adds up, for A > 0 and then for A < 0."""
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
DECILES = 10


def telemetry(
    terms: Callable[..., Tokens],
    log_ratio: Float[Array, "b t"],
    logprobs: Float[Array, "b t"],
    entropy: Float[Array, "b t"],
    batch: RolloutBatch,
    *,
    clip: Clip,
) -> Metrics:
    """Metrics of a micro-batch.

    Args:
        terms: log-ratios (another `Clip`, other tokens that keep their gradient) -> each token's
            term of the objective, weighted.
        log_ratio, logprobs, entropy: detached, and 0 outside the mask.
    """
    mask, advantages, count = batch.mask, batch.advantages, batch.mask.sum()
    # Where each token is clipped on its own, the cells are those of tokens.
    level = "token" if clip.level == "geometric" else clip.level
    leveled = LEVELS[level](log_ratio, batch, clip)
    cells = {
        "clip/pos_high": clipped_high(leveled, advantages, clip),
        "clip/neg_low": clipped_low(leveled, advantages, clip),
        "outside/pos_low": (advantages > 0) & below(leveled, clip),
        "outside/neg_high": (advantages < 0) & above(leveled, clip),
    }
    clipped = mask & (cells["clip/pos_high"] | cells["clip/neg_low"])
    free = Clip(low=clip.low, high=clip.high, variant="unclipped", level=level)
    mass = jnp.where(mask, jnp.abs(_slope(terms, log_ratio)), 0.0)
    unclipped = jnp.where(mask, jnp.abs(_slope(lambda l: terms(l, free, True), log_ratio)), 0.0)
    lost = jnp.maximum(unclipped - mass, 0.0)
    rows = (mask, clipped, mass, mass * clipped, unclipped, lost)
    gap = jnp.where(mask, jnp.abs(batch.old_logprobs - batch.sampler_logprobs), 0.0)
    ratio, position = ratio_of(log_ratio), batch.positions.astype(log_ratio.dtype)
    kl = kl_from_old(log_ratio)
    positive = mask & (batch.positive_weights > 0)
    return Metrics(
        sums={
            "tokens/trained": count,
            "ratio_histogram": histogram(log_ratio, mask),
            "entropy_histogram": entropy_histogram(entropy, rows, mask, advantages),
        },
        means={name: (masked_sum(cell, mask), count) for name, cell in cells.items()}
        | {
            "clip": (clipped.sum(), count),
            "mass/clipped": ((mass * clipped).sum(), mass.sum()),
            "mass/lost": (lost.sum(), unclipped.sum()),
            "clip/entropy": (masked_sum(entropy, clipped), clipped.sum()),
            "clip/logprob": (masked_sum(logprobs, clipped), clipped.sum()),
            "clip/position": (masked_sum(position, clipped), clipped.sum()),
            "entropy": (masked_sum(entropy, mask), count),
            "logprob": (masked_sum(logprobs, mask), count),
            "position": (masked_sum(position, mask), count),
            "kl": (masked_sum(kl, mask), count),
            "sampler_gap": (masked_sum(gap, mask), count),
            "nll_positive": (-masked_sum(logprobs, positive), positive.sum()),
        },
        maxima={
            "ratio/max": jnp.where(mask, ratio, 0.0).max(),
            "sampler_gap/max": gap.max(),
        },
    )


def kl_from_old(log_ratio: Tokens) -> Tokens:
    """k3, the low-variance estimator of KL(old || new): r - 1 - log r >= 0 for every token."""
    return ratio_of(log_ratio) - 1 - jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _slope(terms: Callable[[Tokens], Tokens], log_ratio: Tokens) -> Tokens:
    """d (sum of terms) / d log pi of each token."""
    return jax.grad(lambda l: terms(l).sum())(log_ratio)


def histogram(log_ratio: Float[Array, "b t"], mask: Array) -> Float[Array, " bins"]:
    """Tokens in each bin of `LOG_RATIO_EDGES`; comparisons and sums only, no sort."""
    inner = jnp.asarray(LOG_RATIO_EDGES[1:-1], log_ratio.dtype)
    # Counts of tokens above each inner edge; differences of neighbours are the bins.
    over = (mask[..., None] & (log_ratio[..., None] >= inner)).sum(axis=(0, 1))
    ends = jnp.concatenate([mask.sum()[None], over, jnp.zeros_like(over[:1])])
    return (ends[:-1] - ends[1:]).astype(jnp.float32)


def entropy_histogram(
    entropy: Float[Array, "b t"], rows: tuple[Array, ...], mask: Array, advantages: Array
) -> Float[Array, "2 rows bins"]:
    """Sums of `ENTROPY_ROWS` over the tokens of each bin of `ENTROPY_EDGES`, by sign of A."""
    inner = ENTROPY_EDGES[1:-1]
    first, last = jnp.asarray([-np.inf, *inner]), jnp.asarray([*inner, np.inf])
    inside = (entropy[..., None] >= first) & (entropy[..., None] < last)

    def bins(values, chosen):
        weights = jnp.where(chosen, values, 0).astype(jnp.float32)
        return jnp.where(inside, weights[..., None], 0.0).sum(axis=(0, 1))

    signs = (mask & (advantages > 0), mask & (advantages < 0))
    return jnp.stack([jnp.stack([bins(row, sign) for row in rows]) for sign in signs])


# --- on the host, after the last update -----------------------------------------------------------


def by_entropy_decile(histogram: np.ndarray) -> dict[str, list[float]]:
    """Shares of clipped tokens and of gradient mass in each tenth of the tokens with A != 0, by
    entropy.

    The tenths are cut from the histogram, whose bins are taken to be even inside. `clipped`: share
    of the tenth's tokens; `kept` and `lost`: the tenth's mass on clipped tokens, and its mass that
    an unclipped objective would have more, as a share of all the unclipped mass of the batch.
    """
    counts = histogram[:, 0].sum(axis=0)
    ends = np.concatenate([[0.0], np.cumsum(counts)])
    result: dict[str, list[float]] = {}
    if ends[-1] == 0:
        return result
    cuts = np.linspace(0.0, ends[-1], DECILES + 1)

    def tenths(row: np.ndarray) -> np.ndarray:
        return np.diff(np.interp(cuts, ends, np.concatenate([[0.0], np.cumsum(row)])))

    everything = max(histogram[:, ENTROPY_ROWS.index("unclipped_mass")].sum(), 1e-30)
    # Both ends of each bin that holds something, so that no tenth reaches into an empty one.
    filled = np.flatnonzero(counts)
    both = np.stack([filled, filled + 1], axis=1).reshape(-1)
    edges = np.interp(cuts, ends[both], ENTROPY_EDGES[both])
    result["entropy_deciles/edges"] = edges.tolist()
    for sign, part in zip(("pos", "neg"), histogram, strict=True):
        rows = {name: tenths(row) for name, row in zip(ENTROPY_ROWS, part, strict=True)}
        tokens = np.maximum(rows["tokens"], 1e-30)
        result[f"entropy_deciles/{sign}_clipped"] = (rows["clipped"] / tokens).tolist()
        result[f"entropy_deciles/{sign}_kept"] = (rows["clipped_mass"] / everything).tolist()
        result[f"entropy_deciles/{sign}_lost"] = (rows["lost_mass"] / everything).tolist()
    return result


def ratio_quantiles(counts: np.ndarray) -> dict[str, float]:
    """Quantiles of r from its histogram: exact to a bin (5 % of r), flat beyond its ends."""
    ends = np.concatenate([[0.0], np.cumsum(counts)])
    if ends[-1] == 0:
        return {}
    # Where bins are empty the first edge of the gap stands for it.
    at = np.interp(np.array(QUANTILES) * ends[-1], ends, LOG_RATIO_EDGES)
    return {f"ratio/q{q:g}": float(np.exp(x)) for q, x in zip(QUANTILES, at, strict=True)}


# --- over one rollout's updates -------------------------------------------------------------------


@jax.jit
def drift(logprobs: Float[Array, "m b t"], batch: RolloutBatch) -> dict[str, Array]:
    """How far the policy moved from the one that sampled, on one mini-batch `[m, b, t]`.

    KL(old || new) by k3, and the mean change of log-prob, of tokens with A > 0 and with A < 0.
    """
    change = jnp.where(batch.mask, logprobs - batch.old_logprobs, 0.0)
    kl = kl_from_old(change)
    good, bad = batch.mask & (batch.advantages > 0), batch.mask & (batch.advantages < 0)

    def mean(values, chosen):
        return jnp.where(chosen, values, 0.0).sum() / jnp.maximum(chosen.sum(), 1)

    return {
        "rollout/kl": mean(kl, batch.mask),
        "rollout/logprob_change_pos": mean(change, good),
        "rollout/logprob_change_neg": mean(change, bad),
    }


def readable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of a rollout with its histograms turned into quantiles, deciles and plain lists."""
    plain = dict(values)
    if (counts := plain.pop("entropy_histogram", None)) is not None:
        plain |= by_entropy_decile(np.asarray(counts, np.float64))
    if (counts := plain.pop("ratio_histogram", None)) is not None:
        plain |= ratio_quantiles(np.asarray(counts, np.float64))
        plain["ratio_histogram"] = {
            "edges": LOG_RATIO_EDGES.tolist(),
            "counts": np.asarray(counts).tolist(),
        }
    return plain
