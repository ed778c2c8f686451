# SPDX-License-Identifier: Apache-2.0
"""AdamW and learning-rate schedules, composed from optax."""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
import numpy as np
import optax


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """AdamW with decoupled weight decay on every parameter, float32 moments."""

    learning_rate: float = 1e-6
    """Peak learning rate."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0; the first of them has learning rate 0 (released recipe)."""
    schedule: Literal["constant", "cosine"] = "constant"
    """What follows the warm-up; cosine falls to `final_learning_rate` at the last step."""
    final_learning_rate: float = 0.0
    """Learning rate of the last step, cosine only."""
    b1: float = 0.9
    """Decay of the mean of gradients, per update."""
    b2: float = 0.999
    """Decay of the mean of squared gradients, per update."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Each update takes learning_rate x this share off every weight."""
    clip_norm: float = 1.0
    """Global gradient norm above which the gradient is scaled down to it."""

    def __post_init__(self):
        zero_or_more = ("learning_rate", "final_learning_rate", "warmup_steps", "weight_decay")
        bad = [n for n in zero_or_more if not 0 <= getattr(self, n) < math.inf]
        bad += [n for n in ("b1", "b2") if not 0 <= getattr(self, n) < 1]
        bad += [n for n in ("eps", "clip_norm") if not 0 < getattr(self, n) < math.inf]
        if bad:
            raise ValueError(
                f"{', '.join(f'{n} {getattr(self, n)}' for n in bad)}: rates, warmup_steps and "
                "weight_decay are >= 0, b1 and b2 in [0, 1), eps and clip_norm > 0, all finite"
            )
        if self.schedule == "constant" and self.final_learning_rate:
            raise ValueError(
                f"final_learning_rate {self.final_learning_rate} has no effect with the constant "
                "schedule; use schedule cosine, or leave it 0"
            )


def make_optimizer(cfg: OptimConfig) -> optax.GradientTransformation:
    """Clip, Adam, weight decay: everything but the learning rate, which the step multiplies in."""
    return optax.chain(
        optax.clip_by_global_norm(cfg.clip_norm),
        optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps, mu_dtype=jnp.float32),
        optax.add_decayed_weights(cfg.weight_decay),
    )


def make_schedule(cfg: OptimConfig, total_steps: int) -> Callable[[int], float]:
    """Learning rate of step 0, 1, ...; one step is one rollout batch (GPPO) or one update (SFT)."""
    after = optax.constant_schedule(cfg.learning_rate)
    if cfg.schedule == "cosine":
        after = optax.cosine_decay_schedule(
            cfg.learning_rate,
            max(total_steps - cfg.warmup_steps - 1, 1),
            alpha=cfg.final_learning_rate / cfg.learning_rate if cfg.learning_rate else 0.0,
        )
    if not cfg.warmup_steps:
        return lambda step: np.asarray(after(step)).item()
    warmup = optax.linear_schedule(0.0, cfg.learning_rate, cfg.warmup_steps)
    joined = optax.join_schedules([warmup, after], [cfg.warmup_steps])
    return lambda step: np.asarray(joined(step)).item()
