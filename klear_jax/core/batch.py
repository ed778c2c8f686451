# SPDX-License-Identifier: Apache-2.0
"""The two batches that reach a device.

Alignment, stated once for the whole project: in every `[b, t]` array, index t speaks about
predicting `targets[t]` from `tokens[..t]`. Shifts happen in `data.packing` and nowhere else.

Dimension letters (in jaxtyping strings and einsum alike): `b` packed rows, `t` tokens in a row, `p`
prompt tokens, `s` decode slots, `c` cache length, `l` layers, `d` model, `f` feed-forward, `h`
query heads, `k` KV heads, `q` query heads per KV head, `e` head width, `v` vocabulary, `n`
problems, `g` samples a problem. A mini-batch has one more leading axis, `m` micro-batches of one
fixed shape.
"""

from flax import struct
from jaxtyping import Array, Bool, Float, Int


@struct.dataclass
class SftBatch:
    """Packed demonstrations."""

    tokens: Int[Array, "b t"]
    targets: Int[Array, "b t"]
    positions: Int[Array, "b t"]
    """Restart at 0 in each segment."""
    segments: Int[Array, "b t"]
    """1, 2, ... along a row; 0 is padding."""
    mask: Bool[Array, "b t"]
    """True where the target belongs to a response."""
    loss_weights: Float[Array, "b t"]
    """What each token's negative log-likelihood counts in the loss; 0 outside the mask."""


@struct.dataclass
class RolloutBatch:
    """Packed rollouts of one mini-batch."""

    tokens: Int[Array, "b t"]
    targets: Int[Array, "b t"]
    positions: Int[Array, "b t"]
    segments: Int[Array, "b t"]
    mask: Bool[Array, "b t"]
    """True where the target is a completion token of a valid sample, the end token included."""
    loss_weights: Float[Array, "b t"]
    """What each token's objective counts; the normaliser is that of the whole mini-batch."""
    positive_weights: Float[Array, "b t"]
    """What each token's log-likelihood counts: alpha / (tokens of positive samples), else 0."""
    advantages: Float[Array, "b t"]
    old_logprobs: Float[Array, "b t"]
    """Nats, under the policy that sampled, recomputed by the trainer."""
    old_entropy: Float[Array, "b t"]
    """Nats, of the next-token distribution under that policy."""
    reference_logprobs: Float[Array, "b t"]
    """Nats, under the frozen reference; 0 where there is none."""
    sampler_logprobs: Float[Array, "b t"]
    """Nats, as captured while sampling."""
