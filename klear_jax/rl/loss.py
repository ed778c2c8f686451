# SPDX-License-Identifier: Apache-2.0
"""The policy loss: log-probs -> surrogate -> weighted sum, and the telemetry of clipping."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from klear_jax.core.batch import RolloutBatch
from klear_jax.core.numerics import linear_logprob, masked_sum
from klear_jax.model import qwen3
from klear_jax.model.config import ModelConfig
from klear_jax.rl.surrogates import (
    MAX_LOG_RATIO,
    SURROGATES,
    Clip,
    clipped_high,
    clipped_low,
    ratio_of,
)
from klear_jax.train.metrics import Metrics
from klear_jax.train.step import LossFn

LOG_RATIO_EDGES = np.linspace(-1.0, 1.0, 41)
"""Bins of the ratio histogram, in log r; the first and last bin also hold what lies beyond."""


def make_policy_loss(cfg: ModelConfig, *, clip: Clip, temperature: float = 1.0) -> LossFn:
    """The loss of one micro-batch of rollouts: forward pass, then `policy_loss`."""

    def loss_fn(params, batch: RolloutBatch):
        hidden = qwen3.forward(params, batch.tokens, batch.positions, batch.segments, cfg=cfg)
        logprobs, entropy = linear_logprob(
            hidden, qwen3.unembed(params), batch.targets,
            live_vocab=cfg.live_vocab, needed=batch.mask, temperature=temperature,
        )  # fmt: skip
        return policy_loss(logprobs, entropy, batch, clip=clip)

    return loss_fn


def policy_loss(
    logprobs: Float[Array, "b t"],
    entropy: Float[Array, "b t"],
    batch: RolloutBatch,
    *,
    clip: Clip,
) -> tuple[Float[Array, ""], Metrics]:
    """-sum(loss_weights * objective) - sum(positive_weights * log p).

    The first term is the chosen surrogate; the second is alpha times the negative log-likelihood of
    positive samples (paper, the auxiliary LM loss of section 3). Both sets of weights were
    normalised over the whole mini-batch on the host, so the terms of micro-batches add up.
    """
    # Masked tokens leave before the surrogate: a zero weight would still turn inf into NaN.
    log_ratio = jnp.where(batch.mask, logprobs - batch.old_logprobs, 0.0)
    objective = SURROGATES[clip.variant](log_ratio, batch.advantages, clip)
    likelihood = jnp.where(batch.mask, logprobs, 0.0) * batch.positive_weights
    loss = -(batch.loss_weights * objective).sum() - likelihood.sum()
    return loss, _telemetry(jax.lax.stop_gradient((log_ratio, logprobs, entropy)), batch, clip)


def _telemetry(values, batch: RolloutBatch, clip: Clip) -> Metrics:
    log_ratio, logprobs, entropy = values
    mask, advantages, count = batch.mask, batch.advantages, batch.mask.sum()
    ratio = ratio_of(log_ratio)
    above, below = ratio > 1 + clip.high, ratio < 1 - clip.low
    cells = {
        "clip/pos_high": clipped_high(ratio, advantages, clip),
        "clip/neg_low": clipped_low(ratio, advantages, clip),
        "outside/pos_low": (advantages > 0) & below,
        "outside/neg_high": (advantages < 0) & above,
    }
    positive = batch.positive_weights > 0
    gap = jnp.abs(batch.old_logprobs - batch.sampler_logprobs)
    # k3, the low-variance estimator of KL(old || new): r - 1 - log r >= 0 for every token.
    kl = ratio - 1 - jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    fractions = {name: (masked_sum(cell, mask), count) for name, cell in cells.items()}
    return Metrics(
        sums={"tokens/trained": count, "ratio_histogram": histogram(log_ratio, mask)},
        means=fractions
        | {
            "entropy": (masked_sum(entropy, mask), count),
            "kl": (masked_sum(kl, mask), count),
            "sampler_gap": (masked_sum(gap, mask), count),
            "nll_positive": (-masked_sum(logprobs, mask & positive), (mask & positive).sum()),
        },
        maxima={
            "ratio/max": jnp.where(mask, ratio, 0.0).max(),
            "sampler_gap/max": jnp.where(mask, gap, 0.0).max(),
        },
    )


def histogram(log_ratio: Float[Array, "b t"], mask: Array) -> Float[Array, " bins"]:
    """Tokens in each bin of `LOG_RATIO_EDGES`; comparisons and sums only, no sort."""
    inner = jnp.asarray(LOG_RATIO_EDGES[1:-1], log_ratio.dtype)
    # Counts of tokens above each inner edge; differences of neighbours are the bins.
    above = (mask[..., None] & (log_ratio[..., None] >= inner)).sum(axis=(0, 1))
    ends = jnp.concatenate([mask.sum()[None], above, jnp.zeros_like(above[:1])])
    return (ends[:-1] - ends[1:]).astype(jnp.float32)
