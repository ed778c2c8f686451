# SPDX-License-Identifier: Apache-2.0
"""One optimizer step, the same for SFT and GPPO, and the forward pass that scores a batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from klear_jax.core.numerics import linear_logprob
from klear_jax.model import qwen3
from klear_jax.model.config import ModelConfig
from klear_jax.model.params import Params
from klear_jax.train.metrics import Metrics, zeros_like
from klear_jax.train.state import TrainState

LossFn = Callable[[Params, Any], tuple[Float[Array, ""], Metrics]]
"""(params, micro-batch) -> its *share* of the loss, and metrics. Shares add up to the loss, since
every weight in a batch is normalised over the whole mini-batch beforehand."""

Step = Callable[[TrainState, Any, Int[Array, ""] | int, float], tuple[TrainState, dict[str, Array]]]

Scorer = Callable[[Params, Any, Int[Array, ""] | int], tuple[Array, Array]]


def make_step(loss_fn: LossFn, *, optimizer: optax.GradientTransformation) -> Step:
    """A jitted `step(state, batch, microbatches, learning_rate) -> (state, metrics)`.

    Leaves of `batch` are `[m, b, t]`; the first `microbatches` of the m pieces are used. That
    number and the learning rate are run-time values, so one compiled program serves mini-batches of
    any size up to m. The state is donated. Where the loss or the gradient norm is not finite, the
    state stays as it was and `skipped` counts up.
    """

    def step(state, batch, microbatches, learning_rate):
        (loss, metrics), grads = loss_and_gradient(loss_fn, state.params, batch, microbatches)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        direction, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = jax.tree.map(lambda p, u: p - learning_rate * u, state.params, direction)

        def keep_if_finite(new, old):
            return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

        new_state = TrainState(
            params=keep_if_finite(params, state.params),
            opt_state=keep_if_finite(opt_state, state.opt_state),
            updates=state.updates + finite,
            skipped=state.skipped + ~finite,
        )
        values = metrics.summarise() | {
            "loss": loss,
            "grad_norm": grad_norm,
            "updates_skipped": 1 - finite.astype(jnp.int32),
        }
        return new_state, values

    return jax.jit(step, donate_argnums=0)


def loss_and_gradient(
    loss_fn: LossFn, params: Params, batch: Any, microbatches: Int[Array, ""] | int
) -> tuple[tuple[Float[Array, ""], Metrics], optax.Updates]:
    """The summed loss, merged metrics and summed gradient of the first `microbatches` pieces.

    The gradient is a tree of the structure of `params`.
    """
    value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
    piece = jax.tree.map(lambda x: x[0], batch)
    if jax.tree.leaves(batch)[0].shape[0] == 1:
        return value_and_grad(params, piece)

    def add(number, total):
        here = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, 0, False), batch)
        (loss, metrics), grads = value_and_grad(params, here)
        (loss_sum, metrics_sum), grads_sum = total
        merged = (loss_sum + loss, metrics_sum.merge(metrics))
        return merged, jax.tree.map(jnp.add, grads_sum, grads)

    _, metrics_shape = jax.eval_shape(loss_fn, params, piece)
    zero = (jnp.zeros(()), zeros_like(metrics_shape)), jax.tree.map(jnp.zeros_like, params)
    return jax.lax.fori_loop(0, microbatches, add, zero)


def make_scorer(cfg: ModelConfig, *, temperature: float) -> Scorer:
    """A jitted `score(params, batch, microbatches) -> (log-probs, entropies)`, each `[m, b, t]`.

    The same operator as in the loss, so an unchanged policy has ratio 1. Pieces beyond
    `microbatches` are left 0.
    """

    def one(params, piece):
        hidden = qwen3.forward(params, piece.tokens, piece.positions, piece.segments, cfg=cfg)
        return linear_logprob(
            hidden, qwen3.unembed(params), piece.targets,
            live_vocab=cfg.live_vocab, needed=piece.mask, temperature=temperature,
        )  # fmt: skip

    def score(params, batch, microbatches):
        def fill(number, out):
            piece = jax.tree.map(lambda x: x[number], batch)
            return jax.tree.map(
                lambda all, new: jax.lax.dynamic_update_index_in_dim(all, new, number, 0),
                out, one(params, piece),
            )  # fmt: skip

        empty = jnp.zeros_like(batch.loss_weights)
        return jax.lax.fori_loop(0, microbatches, fill, (empty, empty))

    return jax.jit(score)
