# SPDX-License-Identifier: Apache-2.0
"""From kept groups to mini-batches: weights of tokens, packed rows of one fixed shape, old policy.

Everything here is host code and numpy; `with_old_logprobs` is where a batch reaches the device.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float

from klear_jax.core import mesh as mesh_lib
from klear_jax.core.batch import RolloutBatch
from klear_jax.data.packing import TokenSequence, first_fit, pack
from klear_jax.rl.advantages import ADVANTAGES
from klear_jax.rl.objective import Aggregation, Objective
from klear_jax.rl.rollout import Group

ScoreNow = Callable[[RolloutBatch, int], tuple[jax.Array, jax.Array]]
"""(batch, micro-batches) -> log-probs and entropies under one fixed policy."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The one shape that every mini-batch has on the device: [microbatches, rows, row_tokens]."""

    row_tokens: int
    """Cells of a packed row; a prompt and its longest completion must fit."""
    rows: int
    """Rows of a micro-batch, over the whole mesh."""
    microbatches: int
    """Most micro-batches of a mini-batch."""


@dataclasses.dataclass(frozen=True)
class MiniBatch:
    """One optimizer step's share of the rollout, packed."""

    batch: RolloutBatch
    """Leaves `[m, b, t]`."""
    microbatches: int
    """Leading pieces that hold anything."""
    padding_share: float
    """Share of the cells of those pieces that is padding."""


def assemble(
    groups: Sequence[Group],
    rewards: Float[np.ndarray, "n g"],
    valid: Bool[np.ndarray, "n g"],
    objective: Objective,
    *,
    updates: int,
    minibatch_groups: int | None = None,
    layout: Layout,
    max_tokens: int,
) -> list[MiniBatch]:
    """Split whole groups into mini-batches and pack each; invalid samples are left out everywhere.

    Two rules, both in the order of the groups:

    - `updates` mini-batches of nearly equal numbers of groups. With fewer groups than that there is
      one group a mini-batch, so fewer updates.
    - with `minibatch_groups`, mini-batches of that many groups, and a last one with the rest, whose
      weights are scaled by its samples / (minibatch_groups x G): released code.
    """
    if not groups:
        return []
    advantages = ADVANTAGES[objective.advantage](rewards, valid)
    if minibatch_groups is None:
        shares = np.array_split(np.arange(len(groups)), min(updates, len(groups)))
    else:
        shares = np.split(
            np.arange(len(groups)), range(minibatch_groups, len(groups), minibatch_groups)
        )
    batches = []
    for share in shares:
        members = [(n, i) for n in share for i in range(valid.shape[1]) if valid[n, i]]
        scale = 1.0
        if minibatch_groups is not None and len(share) < minibatch_groups:
            scale = len(members) / (minibatch_groups * valid.shape[1])
        if members:
            batches.append(
                _pack(groups, rewards, advantages, members, objective, layout, max_tokens, scale)
            )
    return batches


def _pack(groups, rewards, advantages, members, objective, layout, max_tokens, scale) -> MiniBatch:
    completions = [groups[n].completions[i] for n, i in members]
    lengths = np.array([len(c.tokens) for c in completions])
    positive = np.array([rewards[n, i] >= objective.positive_threshold for n, i in members])
    weights = scale * token_weights(lengths, objective.aggregation, max_tokens)
    positives = scale * objective.positive_nll * positive / max(lengths[positive].sum(), 1)

    def spread(values):
        return [np.full(t, x, np.float32) for t, x in zip(lengths, values, strict=True)]

    sequences = [
        TokenSequence(
            np.concatenate([np.asarray(groups[n].prompt, np.int32), c.tokens]),
            len(groups[n].prompt),
        )
        for (n, _), c in zip(members, completions, strict=True)
    ]
    used = len(first_fit([s.cells for s in sequences], row=layout.row_tokens))
    packed = pack(
        sequences,
        row=layout.row_tokens,
        rows=layout.rows * layout.microbatches,
        per_token={
            "loss_weights": spread(weights),
            "positive_weights": spread(positives),
            "advantages": spread([advantages[n, i] for n, i in members]),
            "sampler_logprobs": [c.logprobs.astype(np.float32) for c in completions],
        },
    )

    def pieces(x: np.ndarray) -> Any:
        # Any: the record's fields are device arrays, which these become when it is placed.
        return x.reshape(layout.microbatches, layout.rows, layout.row_tokens)

    empty = pieces(np.zeros(packed.tokens.shape, np.float32))
    batch = RolloutBatch(
        tokens=pieces(packed.tokens),
        targets=pieces(packed.targets),
        positions=pieces(packed.positions),
        segments=pieces(packed.segments),
        mask=pieces(packed.mask),
        old_logprobs=empty,
        old_entropy=empty,
        reference_logprobs=empty,
        **{name: pieces(x) for name, x in packed.per_token.items()},
    )
    microbatches = -(-used // layout.rows)
    cells = microbatches * layout.rows * layout.row_tokens
    return MiniBatch(batch, microbatches, 1 - float((packed.segments > 0).sum()) / cells)


def token_weights(
    lengths: np.ndarray, aggregation: Aggregation, max_tokens: int
) -> Float[np.ndarray, " m"]:
    """The weight of each token of each sequence; the normaliser is that of all sequences given."""
    lengths = np.asarray(lengths, np.float64)
    if aggregation == "token_mean":
        return np.full(len(lengths), 1 / lengths.sum())
    if aggregation == "sequence_mean":
        return 1 / (len(lengths) * lengths)
    return np.full(len(lengths), 1 / (len(lengths) * max_tokens))


def with_old_logprobs(
    minibatches: Iterable[MiniBatch],
    score: ScoreNow | None,
    mesh: Mesh,
    *,
    reference: ScoreNow | None = None,
) -> Iterator[MiniBatch]:
    """Place each mini-batch on the mesh and fill in what the policy that sampled thinks of it.

    Log-probs and entropies come from `score`, and log-probs of the reference from `reference`.
    Without `score` the sampler's own log-probs stand for the trainer's, and there are no entropies.
    """
    for minibatch in minibatches:
        used = minibatch.microbatches
        batch = mesh_lib.place(minibatch.batch, mesh, None, "batch", "seq")
        if score is None:
            scored = dataclasses.replace(batch, old_logprobs=batch.sampler_logprobs)
        else:
            logprobs, entropy = score(batch, used)
            scored = dataclasses.replace(batch, old_logprobs=logprobs, old_entropy=entropy)
        if reference is not None:
            scored = dataclasses.replace(scored, reference_logprobs=reference(batch, used)[0])
        yield dataclasses.replace(minibatch, batch=scored)
