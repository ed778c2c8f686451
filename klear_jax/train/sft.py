# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning: the negative log-likelihood of responses (klear_jax's stage 1)."""

import jax.numpy as jnp

from klear_jax.core.batch import SftBatch
from klear_jax.core.numerics import linear_logprob, masked_sum
from klear_jax.model import qwen3
from klear_jax.model.config import ModelConfig
from klear_jax.train.metrics import Metrics
from klear_jax.train.step import LossFn


def make_sft_loss(cfg: ModelConfig) -> LossFn:
    """-sum(loss_weights * log p(target)) over the response tokens of a micro-batch, nats.

    The paper prints the mean of the *probability*; the logarithm is what is meant
    (docs/deviations.md).
    """

    def loss_fn(params, batch: SftBatch):
        hidden = qwen3.forward(params, batch.tokens, batch.positions, batch.segments, cfg=cfg)
        logprobs, entropy = linear_logprob(
            hidden,
            qwen3.unembed(params),
            batch.targets,
            live_vocab=cfg.live_vocab,
            needed=batch.mask,
        )
        count = batch.mask.sum()
        metrics = Metrics(
            sums={"tokens": count},
            means={
                "entropy": (masked_sum(entropy, batch.mask), count),
                "nll": (-masked_sum(logprobs, batch.mask), count),
            },
        )
        weighted = jnp.where(batch.mask, logprobs, 0.0) * batch.loss_weights
        return -weighted.sum(), metrics

    return loss_fn
