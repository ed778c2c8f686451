# SPDX-License-Identifier: Apache-2.0
"""One saved rollout under many variants: what each makes of the same tokens and the same weights.

The model does not depend on the variant: a gradient of the parameters is linear in the slopes d
loss / d log pi of the tokens. So every variant costs its slopes, which need no model, and one run
of a backward pass whose program all of them share.

Everything is a mean over the mini-batches of the rollout, all at the same weights.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from klear_jax.core.batch import RolloutBatch
from klear_jax.core.numerics import linear_logprob, masked_sum
from klear_jax.model import qwen3
from klear_jax.model.config import ModelConfig
from klear_jax.model.params import Params
from klear_jax.rl.loss import policy_loss
from klear_jax.rl.minibatch import MiniBatch
from klear_jax.rl.objective import Objective
from klear_jax.rl.surrogates import Clip
from klear_jax.train.metrics import Metrics
from klear_jax.train.step import Scorer, loss_and_gradient

BLOCK = 2**20
"""Parameters whose products are added up at a time, in float64."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """What may differ between two columns of the bench."""

    clip: Clip
    erc: tuple[float, float] | None = None
    """Entropy-ratio clipping on top; see `Objective.erc`."""

    def surrogate_alone(self, objective: Objective) -> Objective:
        """The run's objective without what stands beside the surrogate."""
        return Objective(
            positive_nll=0.0, tis=objective.tis, tis_cap=objective.tis_cap, erc=self.erc
        )


@dataclasses.dataclass(frozen=True)
class Scored:
    """A mini-batch and what the weights of the bench think of its tokens, `[m, b, t]`."""

    minibatch: MiniBatch
    logprobs: Array
    entropy: Array


@dataclasses.dataclass(frozen=True)
class Slopes:
    """d loss / d log pi and d loss / d entropy of one mini-batch's tokens, and the loss."""

    loss: float
    logprobs: Array
    entropy: Array


# --- on the device ----------------------------------------------------------------------------


def score_minibatches(
    params: Params, minibatches: Sequence[MiniBatch], score: Scorer
) -> list[Scored]:
    """The log-probs and entropies of every mini-batch under the weights of the bench.

    Raises:
        ValueError: there is no mini-batch.
    """
    if not minibatches:
        raise ValueError(
            "the rollout holds no mini-batch: no group of that step could teach anything; give "
            "the rollout of another step"
        )
    return [Scored(m, *score(params, m.batch, m.microbatches)) for m in minibatches]


def token_slopes(
    scored: Sequence[Scored], variants: Mapping[str, Variant], objective: Objective
) -> dict[str, list[Slopes]]:
    """Loss and slopes of the surrogate alone, for each variant and mini-batch."""

    def one(batch: RolloutBatch, logprobs, entropy):
        alone = dataclasses.replace(batch, positive_weights=jnp.zeros_like(logprobs))

        def of(variant: Variant):
            own = variant.surrogate_alone(objective)
            return jax.value_and_grad(
                lambda l: policy_loss(l, entropy, alone, clip=variant.clip, objective=own)[0]
            )(logprobs)

        return {name: of(variant) for name, variant in variants.items()}

    program = _over_pieces(one)
    done = [program(s.minibatch.batch, s.logprobs, s.entropy) for s in scored]
    return {
        name: [
            Slopes(float(d[name][0]), d[name][1], jnp.zeros_like(s.entropy))
            for d, s in zip(done, scored, strict=True)
        ]
        for name in variants
    }


def other_slopes(scored: Sequence[Scored], objective: Objective) -> list[Slopes]:
    """The same of what stands beside the surrogate: likelihood of positives, KL and entropy."""
    rest = dataclasses.replace(objective, erc=None)

    def one(batch: RolloutBatch, logprobs, entropy):
        # With A = 0 every surrogate is 0, so its terms and slopes are.
        silent = dataclasses.replace(batch, advantages=jnp.zeros_like(logprobs))
        clip = Clip(variant="reinforce")
        loss, slopes = jax.value_and_grad(
            lambda l, h: policy_loss(l, h, silent, clip=clip, objective=rest)[0], argnums=(0, 1)
        )(logprobs, entropy)
        return loss, *slopes

    program = _over_pieces(one)
    done = [program(s.minibatch.batch, s.logprobs, s.entropy) for s in scored]
    return [Slopes(float(loss), logprobs, entropy) for loss, logprobs, entropy in done]


def _over_pieces(one: Callable) -> Callable:
    """`one` on each micro-batch of a mini-batch: scalars of the pieces added, arrays `[m, b, t]`.

    Pieces that hold nothing have no masked token, so they add 0.
    """

    def every(batch, logprobs, entropy):
        results = jax.lax.map(lambda piece: one(*piece), (batch, logprobs, entropy))
        return jax.tree.map(lambda x: x.sum() if x.ndim == 1 else x, results)

    return jax.jit(every)


def added(one: Sequence[Slopes], other: Sequence[Slopes]) -> list[Slopes]:
    """Slopes and losses of a sum of two objectives."""
    return [
        Slopes(a.loss + b.loss, a.logprobs + b.logprobs, a.entropy + b.entropy)
        for a, b in zip(one, other, strict=True)
    ]


def make_pullback(cfg: ModelConfig, *, temperature: float) -> Callable[..., Any]:
    """A jitted `pull(params, batch, microbatches, slopes of log-probs, of entropies) -> gradient`.

    The gradient of any loss of the batch's log-probs and entropies that has these slopes.
    """

    def linear(params, piece):
        batch, along_logprobs, along_entropy = piece
        hidden = qwen3.forward(params, batch.tokens, batch.positions, batch.segments, cfg=cfg)
        logprobs, entropy = linear_logprob(
            hidden, qwen3.unembed(params), batch.targets,
            live_vocab=cfg.live_vocab, needed=batch.mask, temperature=temperature,
        )  # fmt: skip
        total = masked_sum(logprobs * along_logprobs + entropy * along_entropy, batch.mask)
        return total, Metrics()

    def pull(params, batch, microbatches, along_logprobs, along_entropy):
        pieces = (batch, along_logprobs, along_entropy)
        return loss_and_gradient(linear, params, pieces, microbatches)[1]

    return jax.jit(pull)


def gradients(
    params: Params,
    scored: Sequence[Scored],
    slopes: Mapping[str, Sequence[Slopes]],
    pull: Callable[..., Any],
    on_done: Callable[[str], None] = lambda name: None,
) -> Float[np.ndarray, "v p"]:
    """The mean gradient over the mini-batches, a float32 row for each variant, on the host.

    It holds 4 bytes x variants x parameters there, and two gradients on the device.
    """
    sizes = [leaf.size for leaf in jax.tree.leaves(params)]
    ends = np.cumsum([0, *sizes])
    result = np.empty((len(slopes), ends[-1]), np.float32)
    for row, (name, parts) in zip(result, slopes.items(), strict=True):
        total = None
        for s, part in zip(scored, parts, strict=True):
            piece = s.minibatch
            new = pull(params, piece.batch, piece.microbatches, part.logprobs, part.entropy)
            total = new if total is None else jax.tree.map(jnp.add, total, new)
        for leaf, start, end in zip(jax.tree.leaves(total), ends[:-1], ends[1:], strict=True):
            row[start:end] = np.asarray(leaf, np.float32).ravel() / len(scored)
        on_done(name)
    return result


# --- on the host ------------------------------------------------------------------------------


def norms_and_cosines(
    rows: Float[np.ndarray, "v p"],
) -> tuple[Float[np.ndarray, " v"], Float[np.ndarray, "v v"]]:
    """Euclidean norms and pairwise cosines, summed in float64; NaN where a gradient is 0."""
    products = np.zeros((len(rows), len(rows)))
    for start in range(0, rows.shape[1], BLOCK):
        block = rows[:, start : start + BLOCK].astype(np.float64)
        products += block @ block.T
    norms = np.sqrt(np.diag(products))
    lengths = np.where(norms > 0, norms, np.nan)
    cosines = products / np.outer(lengths, lengths)
    # Rounding: a cosine never exceeds 1, and a gradient is parallel to itself.
    cosines = np.clip(cosines, -1.0, 1.0)
    np.fill_diagonal(cosines, np.where(norms > 0, 1.0, np.nan))
    return norms, cosines
