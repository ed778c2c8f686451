# SPDX-License-Identifier: Apache-2.0
"""Numerics that trainer and sampler share: the log-probability operator and masked sums."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from klear_jax.core import mesh as mesh_lib

CHUNK_LOGITS = 2**25
"""Logits held at a time on a device (128 MiB in float32); sets the chunk of `linear_logprob`."""


def linear_logprob(
    hidden: Float[Array, "b t d"],
    head: Float[Array, "d v"],
    targets: Int[Array, "b t"],
    *,
    live_vocab: int,
    needed: Bool[Array, "b t"] | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """log p(target) and entropy of softmax(hidden @ head / temperature), both in nats.

    Rows of the vocabulary from `live_vocab` up have probability 0. Tokens are walked in chunks that
    are made again in the backward pass, so no [tokens, v] array exists at any time; the vocabulary
    stays cut over its mesh axis, with sums of one number a token between devices. Both results can
    be differentiated.

    Args:
        needed: where False both results are 0. Prompts and padding are sorted behind the needed
            tokens, and chunks that hold nothing else on any device are skipped.
        temperature: the *sampling* temperature; logits are divided by it before the softmax.
        chunk: tokens a device handles at a time; by default as many as keep `CHUNK_LOGITS`.
    """
    axis = mesh_lib.mesh_axis("vocab")
    local = functools.partial(
        _local_logprob, live_vocab=live_vocab, temperature=temperature, chunk=chunk, axis=axis
    )
    tokens = ("batch", "seq")
    run = mesh_lib.sharded(
        local,
        inputs=((*tokens, None), (None, "vocab"), tokens, tokens),
        outputs=(tokens, tokens),
    )
    needed = jnp.ones_like(targets, bool) if needed is None else needed
    return run(hidden, head.astype(hidden.dtype), targets, needed)


def _local_logprob(hidden, head, targets, needed, *, live_vocab, temperature, chunk, axis):
    """`linear_logprob` of one device's tokens and vocabulary rows."""
    b, t, d = hidden.shape
    n, v = b * t, head.shape[1]
    head = mesh_lib.differs_over(head, "batch", "seq")
    chunk = min(chunk or max(CHUNK_LOGITS // v, 1), n)
    padding = -n % chunk
    needed = needed.reshape(n)
    order = jnp.argsort(~needed, stable=True)
    flat_hidden = jnp.pad(hidden.reshape(n, d)[order], ((0, padding), (0, 0)))
    flat_targets = jnp.pad(targets.reshape(n)[order], (0, padding))
    flat_needed = jnp.pad(needed[order], (0, padding))
    first_id = 0 if axis is None else jax.lax.axis_index(axis) * v
    ids = first_id + jnp.arange(v)
    live = ids < live_vocab

    def total(x):
        return x if axis is None else jax.lax.psum(x, axis)

    def logprob_and_entropy(hidden, targets):
        logits = jnp.matmul(hidden, head, preferred_element_type=jnp.float32) / temperature
        logits = jnp.where(live, logits, -jnp.inf)
        top = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
        top = top if axis is None else jax.lax.pmax(top, axis)
        shifted = logits - top
        weights = jnp.exp(shifted)
        mass = total(weights.sum(axis=-1))
        # where, not a product: 0 * -inf is NaN.
        is_target = ids == targets[:, None]
        chosen = total(jnp.where(is_target, shifted, 0.0).sum(axis=-1))
        mean_shifted = total((weights * jnp.where(live, shifted, 0.0)).sum(axis=-1)) / mass
        log_mass = jnp.log(mass)
        return chosen - log_mass, log_mass - mean_shifted

    def nothing(hidden, targets):
        # Not a constant: it varies over the mesh axes of the other branch's results.
        zero = 0.0 * targets
        return zero, zero

    @jax.checkpoint
    def one_chunk(args):
        hidden, targets, needed, wanted = args
        # What stands beside a needed token must not reach it, or the gradient, even as a NaN.
        hidden = jnp.where(needed[:, None], hidden, 0.0)
        results = jax.lax.cond(wanted, logprob_and_entropy, nothing, hidden, targets)
        return tuple(jnp.where(needed, x, 0.0) for x in results)

    def back(x):
        return jnp.zeros_like(x, shape=n).at[order].set(x.reshape(-1)[:n]).reshape(b, t)

    chunk_needed = flat_needed.reshape(-1, chunk)
    wanted = mesh_lib.any_over(chunk_needed.any(axis=1), "batch", "seq")
    pieces = (flat_hidden.reshape(-1, chunk, d), flat_targets.reshape(-1, chunk))
    logprobs, entropy = jax.lax.map(one_chunk, (*pieces, chunk_needed, wanted))
    return back(logprobs), back(entropy)


def masked_sum(
    x: Float[Array, "b t"] | Bool[Array, "b t"], mask: Bool[Array, "b t"]
) -> Float[Array, ""]:
    """Sum of `x` where `mask` holds; what stands elsewhere, NaN too, does not count."""
    return jnp.where(mask, x, 0.0).sum()
