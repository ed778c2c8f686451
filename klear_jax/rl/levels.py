# SPDX-License-Identifier: Apache-2.0
"""Ratio levels: what stands for the log-ratio of a token when the surrogate clips it.

A response is one segment of a packed row; sums over it cross the devices that a row is cut over.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from klear_jax.core import mesh as mesh_lib
from klear_jax.core.batch import RolloutBatch
from klear_jax.rl.surrogates import (
    Clip,
    Level,
    Tokens,
    clipped_high,
    clipped_low,
    log_high,
    log_low,
)

LevelFn = Callable[[Tokens, RolloutBatch, Clip], Tokens]


def token(log_ratio: Tokens, batch: RolloutBatch, clip: Clip) -> Tokens:
    """l of the token itself."""
    return log_ratio


def sequence(log_ratio: Tokens, batch: RolloutBatch, clip: Clip) -> Tokens:
    """log s = the mean of l over the response, with its gradient: GSPO (arXiv 2507.18071, eq. 7).

    d s / d log pi of a token is s / (tokens of its response).
    """
    return segment_mean(log_ratio, batch.segments, batch.mask)


def sequence_token(log_ratio: Tokens, batch: RolloutBatch, clip: Clip) -> Tokens:
    """The value of log s, with the gradient of the token's own l: GSPO-token (same paper)."""
    fixed = jax.lax.stop_gradient(log_ratio)
    return segment_mean(fixed, batch.segments, batch.mask) + log_ratio - fixed


def geometric(log_ratio: Tokens, batch: RolloutBatch, clip: Clip) -> Tokens:
    """The mean over the response of l, each held at the bound where PPO clips: GMPO.

    Geometric-mean policy optimization (arXiv 2507.20673): its clip is in log space, so that a range
    of +-0.4 is low = 1 - exp(-0.4), high = exp(0.4) - 1.
    """
    low, high = log_low(clip), log_high(clip)
    held = jnp.where(clipped_high(log_ratio, batch.advantages, clip), high, log_ratio)
    held = jnp.where(clipped_low(log_ratio, batch.advantages, clip), low, held)
    return segment_mean(held, batch.segments, batch.mask)


LEVELS: dict[Level, LevelFn] = {
    "token": token,
    "sequence": sequence,
    "sequence_token": sequence_token,
    "geometric": geometric,
}
"""Level name -> function `(log_ratio, batch, clip) -> log_ratio`."""


def segment_mean(
    values: Float[Array, "b t"], segments: Int[Array, "b t"], mask: Bool[Array, "b t"]
) -> Float[Array, "b t"]:
    """At each masked token the mean of `values` over its segment's masked tokens; 0 elsewhere."""
    total = segment_sum(values, segments, mask)
    count = segment_sum(jnp.ones_like(values), segments, mask)
    return total / jnp.maximum(count, 1.0)


def segment_sum(
    values: Float[Array, "b t"], segments: Int[Array, "b t"], mask: Bool[Array, "b t"]
) -> Float[Array, "b t"]:
    """At each masked token the sum of `values` over its segment's masked tokens; 0 elsewhere."""
    tokens = segments.shape[1]
    axis = mesh_lib.mesh_axis("seq")

    def local(values, segments, mask):
        # A segment has at least one token, so a row has at most as many segments as tokens.
        def one_row(values, segments):
            return jax.ops.segment_sum(values, segments, num_segments=tokens + 1)

        sums = jax.vmap(one_row)(jnp.where(mask, values, 0.0), segments)
        sums = sums if axis is None else jax.lax.psum(sums, axis)
        return jnp.where(mask, jnp.take_along_axis(sums, segments, axis=1), 0.0)

    cells = ("batch", "seq")
    run = mesh_lib.sharded(local, inputs=(cells, cells, cells), outputs=cells)
    return run(values, segments, mask)
