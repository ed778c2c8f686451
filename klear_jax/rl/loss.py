# SPDX-License-Identifier: Apache-2.0
"""The policy loss: log-probs -> ratio level -> surrogate -> detached weights -> weighted sum."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from klear_jax.core.batch import RolloutBatch
from klear_jax.core.numerics import linear_logprob, masked_sum
from klear_jax.model import qwen3
from klear_jax.model.config import ModelConfig
from klear_jax.rl.levels import LEVELS, segment_sum
from klear_jax.rl.objective import Objective
from klear_jax.rl.surrogates import MAX_LOG_RATIO, SURROGATES, Clip, ratio_of
from klear_jax.rl.telemetry import telemetry
from klear_jax.train.metrics import Metrics
from klear_jax.train.step import LossFn

PLAIN = Objective()
ERC_EPS = 1e-8
"""Added to both entropies of the entropy ratio, as in ERC's released code."""


def make_policy_loss(
    cfg: ModelConfig, *, clip: Clip, objective: Objective = PLAIN, temperature: float = 1.0
) -> LossFn:
    """The loss of one micro-batch of rollouts: forward pass, then `policy_loss`.

    Raises:
        ValueError: a field of `clip` has no effect on its variant.
    """
    clip.check_effect()

    def loss_fn(params, batch: RolloutBatch):
        hidden = qwen3.forward(params, batch.tokens, batch.positions, batch.segments, cfg=cfg)
        logprobs, entropy = linear_logprob(
            hidden, qwen3.unembed(params), batch.targets,
            live_vocab=cfg.live_vocab, needed=batch.mask, temperature=temperature,
        )  # fmt: skip
        return policy_loss(logprobs, entropy, batch, clip=clip, objective=objective)

    return loss_fn


def policy_loss(
    logprobs: Float[Array, "b t"],
    entropy: Float[Array, "b t"],
    batch: RolloutBatch,
    *,
    clip: Clip,
    objective: Objective = PLAIN,
) -> tuple[Float[Array, ""], Metrics]:
    """-sum(w * objective) - sum(positive_weights * log p) + kl_coef * KL - entropy_coef * H.

    The first term is the chosen surrogate at the chosen level; the second is alpha times the
    negative log-likelihood of positive samples (paper, the auxiliary LM loss of section 3); KL and
    entropy are sums with the same weights w = loss_weights as the objective. All weights were
    normalised over the whole mini-batch on the host, so the terms of micro-batches add up.
    """
    # Masked tokens leave before the surrogate: a zero weight would still turn inf into NaN.
    log_ratio = jnp.where(batch.mask, logprobs - batch.old_logprobs, 0.0)
    entropy = jnp.where(batch.mask, entropy, 0.0)
    known = jnp.where(batch.mask, logprobs, 0.0)
    factor = token_factor(batch, objective)
    keep = keeps_gradient(entropy, batch, objective)

    def terms(log_ratio, clip=clip, keep=keep):
        # Here and not at the term: at a sequence level a term holds the gradient of many tokens.
        log_ratio = jnp.where(keep, log_ratio, jax.lax.stop_gradient(log_ratio))
        level = LEVELS[clip.level](log_ratio, batch, clip)
        return SURROGATES[clip.variant](level, batch.advantages, clip) * factor * batch.loss_weights

    loss = -terms(log_ratio).sum() - (known * batch.positive_weights).sum()
    kl = jnp.zeros_like(known)
    if objective.kl_coef:
        distance = jnp.where(batch.mask, batch.reference_logprobs, 0.0) - known
        kl = KL_ESTIMATORS[objective.kl_estimator](distance)
        loss += objective.kl_coef * (kl * batch.loss_weights).sum()
    if objective.entropy_coef:
        loss -= objective.entropy_coef * (entropy * batch.loss_weights).sum()
    values = jax.lax.stop_gradient((log_ratio, known, entropy))
    metrics = telemetry(terms, *values, batch, clip=clip)
    own: dict[str, Array] = {}
    if objective.kl_coef:
        own["kl_reference"] = jax.lax.stop_gradient(kl)
    if objective.tis != "none":
        own |= {"tis/weight": factor, "tis/capped": factor >= objective.tis_cap}
    if objective.erc is not None:
        own["erc/dropped"] = ~keep
    count = batch.mask.sum()
    means = {name: (masked_sum(value, batch.mask), count) for name, value in own.items()}
    return loss, dataclasses.replace(metrics, means=metrics.means | means)


def token_factor(batch: RolloutBatch, objective: Objective) -> Float[Array, "b t"]:
    """The truncated importance weight min(p_old / p_sampler, cap); 1 where it is off.

    The trainer's and the sampler's probability of a token differ by rounding and precision; the
    weight corrects for it (arXiv 2508.03772; by sequence: the product over the response).
    """
    if objective.tis == "none":
        return jnp.ones_like(batch.loss_weights)
    gap = jnp.where(batch.mask, batch.old_logprobs - batch.sampler_logprobs, 0.0)
    if objective.tis == "sequence":
        gap = segment_sum(gap, batch.segments, batch.mask)
    limit = float(np.log(objective.tis_cap))
    # The cap itself, not the exponential of its logarithm, which may round to below it.
    return jnp.where(gap >= limit, objective.tis_cap, jnp.exp(jnp.minimum(gap, limit)))


def keeps_gradient(
    entropy: Float[Array, "b t"], batch: RolloutBatch, objective: Objective
) -> Array:
    """Where a token keeps its gradient under entropy-ratio clipping (ERC, arXiv 2512.05591)."""
    if objective.erc is None:
        return jnp.ones_like(batch.mask)
    ratio = (entropy + ERC_EPS) / (batch.old_entropy + ERC_EPS)
    return (ratio > objective.erc[0]) & (ratio < objective.erc[1])


def k2(distance: Float[Array, "b t"]) -> Float[Array, "b t"]:
    """d^2 / 2 with d = log pi_ref - log pi; its gradient is that of the reverse KL on average."""
    return distance**2 / 2


def k3(distance: Float[Array, "b t"]) -> Float[Array, "b t"]:
    """exp(d) - d - 1 >= 0: unbiased for KL(pi || pi_ref) in value; constant beyond d = 20.

    Below -20, where pi is far above pi_ref, the pull stays: there the gradient is that of -d.
    """
    held = jnp.where(distance > MAX_LOG_RATIO, MAX_LOG_RATIO, distance)
    return ratio_of(distance) - held - 1


KL_ESTIMATORS = {"k2": k2, "k3": k3}
"""Estimator name -> function of d = log pi_ref - log pi."""
