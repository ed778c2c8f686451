# SPDX-License-Identifier: Apache-2.0
"""Preflight: a run's own parts, checked against each other before anything is trained.

Every check uses what the run will use (weights, sampler, scorer, step, packer, grader, checkpoints)
on a few samples that it draws itself, in the shapes of the run, so that no large program is
compiled for a check alone. Read `preflight` first.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from klear_jax.core import mesh as mesh_lib
from klear_jax.core.batch import RolloutBatch
from klear_jax.data.packing import PackedRows, TokenSequence, first_fit, pack
from klear_jax.data.problems import Problem
from klear_jax.rl import minibatch
from klear_jax.rl.checks import (
    STEP,
    Check,
    Parts,
    check_checkpoint,
    check_end_token,
    check_grader,
    check_noise,
    requests_of,
)
from klear_jax.rl.minibatch import Layout, MiniBatch
from klear_jax.rl.rollout import Group
from klear_jax.rl.telemetry import drift
from klear_jax.sampling.sampler import Completion
from klear_jax.train.metrics import Metrics

PROBLEMS = 2
"""Most problems that are sampled."""
PIECE = 32
"""Most cells of a sequence in the check of packing."""
COPY_LIMIT = 2 * 2**30
"""Bytes of the training state on one device above which it is not copied."""
KL_LIMIT = 0.3
"""Nats a token by which one update at the peak learning rate may move the policy on the batch that
it was taken on. Measured on the tiny model, fresh moments, four samples: 0.001-0.01 at 1e-4,
0.01-0.07 at 3e-4, 0.15-0.3 at 1e-3, 0.4-1 at 3e-3, above 1.4 at 0.1."""
ROUNDING = 1e-3
"""Share by which a weight may move further than Adam's bound: the step's float32 rounding."""


def preflight(parts: Parts, problems: Sequence[Problem], *, position: int = 0) -> list[Check]:
    """Make every check; call inside `jax.set_mesh`. State and stream are left as they are.

    Args:
        problems: those of stream position `position`; the first `PROBLEMS` are used.
    """
    problems = problems[:PROBLEMS]
    groups = fitting(_sample(parts, problems), parts.layout)
    completions = [c for group in groups for c in group.completions]
    host = [
        check_grader(parts, problems),
        check_noise(parts, problems, position),
        check_checkpoint(parts),
    ]
    if unknown := _unknown_id(parts, completions):
        # Nothing more can be computed from an id without a row in the model.
        return [_sampler_check(parts, float("inf"), unknown), *host]
    score = functools.partial(parts.score, parts.state.params)
    reference = parts.reference and functools.partial(parts.score, parts.reference)
    (scored,) = minibatch.with_old_logprobs(
        [_assemble(parts, groups)], score, parts.mesh, reference=reference
    )
    batch = jax.device_get(scored.batch)
    gap = (batch.old_logprobs - batch.sampler_logprobs)[batch.mask]
    values, update = _try_update(parts, scored)
    short = [_ended_by(parts, groups[0], stop) for stop in parts.tokenizer.stop_ids]
    return [
        check_ratio(parts, batch, values),
        *check_packing(parts, groups),
        check_end_token(parts, completions, batch, short, int(values["tokens/trained"])),
        _sampler_check(parts, parts.tolerance.figure(gap)),
        update,
        *host,
    ]


# --- the samples ------------------------------------------------------------------------------


def _sample(parts: Parts, problems: Sequence[Problem]) -> list[Group]:
    requests = requests_of(parts, problems, STEP)
    done = {c.id: c for c in parts.sampler.sample(requests)}
    samples = len(requests) // len(problems)
    return [
        Group(p, parts.encode(p), tuple(done[f"{n}/{i}"] for i in range(samples)), (), ())
        for n, p in enumerate(problems)
    ]


def fitting(groups: list[Group], layout: Layout) -> list[Group]:
    """As many of the groups, at least one, as a mini-batch of this layout holds."""
    rows = layout.rows * layout.microbatches
    for count in range(len(groups), 1, -1):
        cells = [len(g.prompt) + len(c.tokens) - 1 for g in groups[:count] for c in g.completions]
        if len(first_fit(cells, row=layout.row_tokens)) <= rows:
            return groups[:count]
    return groups[:1]


def _assemble(parts: Parts, groups: Sequence[Group]) -> MiniBatch:
    """One mini-batch, with rewards made up so that advantages are not 0: 1, 0, 1, ..."""
    shape = (len(groups), len(groups[0].completions))
    rewards = 1.0 - np.indices(shape).sum(axis=0) % 2
    (made,) = minibatch.assemble(
        groups, rewards, np.ones(shape, bool), parts.objective,
        updates=1, layout=parts.layout, max_tokens=parts.max_tokens,
    )  # fmt: skip
    return made


def _ended_by(parts: Parts, group: Group, stop: int) -> tuple[np.ndarray, RolloutBatch]:
    """A made-up completion of three tokens that ends with `stop`, and its mini-batch."""
    tokens = np.array([*group.prompt[-2:], stop], np.int32)
    completion = Completion("0/0", tokens, np.zeros(len(tokens), np.float32), "stop")
    one = dataclasses.replace(group, completions=(completion,))
    return tokens, _assemble(parts, [one]).batch


def _unknown_id(parts: Parts, completions: Sequence[Completion]) -> str:
    live = parts.sampler.cfg.live_vocab
    drawn = np.concatenate([c.tokens for c in completions])
    unknown = drawn[(drawn < 0) | (drawn >= live)]
    return f"id {unknown[0]} was drawn, the model knows 0..{live - 1}" if unknown.size else ""


def _sampler_check(parts: Parts, gap: float, detail: str = "") -> Check:
    return Check(
        "sampler",
        f"{parts.tolerance.name} difference (nats) of sampler's and trainer's log-prob of a token",
        gap, parts.tolerance.sampler,
        "Sampler and trainer differ in weights, temperature, vocabulary or positions: hand the "
        "sampler the trainer's parameters and config",
        detail,
    )  # fmt: skip


# --- ratio 1, and one update --------------------------------------------------------------------


def check_ratio(parts: Parts, batch: RolloutBatch, values: dict[str, Any]) -> Check:
    """The loss finds ratio 1 for the policy that sampled, under log-probs from the scorer.

    Exactly: the largest ratio is 1 and so is the mean log-ratio 0, so no ratio is far below 1
    either. Otherwise: the root mean square of log r, which is sqrt(2 KL) to second order.
    """
    if parts.tolerance.exact:
        old = batch.old_logprobs[batch.mask].mean(dtype=np.float64)
        figure = np.maximum(abs(values["ratio/max"] - 1), abs(values["logprob"] - old))
    else:
        figure = np.sqrt(2 * np.maximum(values["kl"], 0))
    return Check(
        "ratio", f"{parts.tolerance.name} |ratio - 1| before the first update", float(figure),
        parts.tolerance.same,
        "Old log-probs and the loss come from different functions: give make_scorer and "
        "make_policy_loss one config and one temperature",
    )  # fmt: skip


def _try_update(parts: Parts, scored: MiniBatch) -> tuple[dict[str, Any], Check]:
    """The loss's metrics at the first update, and how far that update moves a discarded copy."""
    state = parts.state
    size = bytes_on_device(state)
    if size > COPY_LIMIT:
        # Forward only: without an update there is no copy to make.
        loss = jax.jit(lambda params, piece: parts.loss(params, piece)[1])
        pieces = [
            jax.tree.map(operator.itemgetter(i), scored.batch) for i in range(scored.microbatches)
        ]
        metrics = functools.reduce(Metrics.merge, (loss(state.params, p) for p in pieces))
        reason = f"the state takes {size / 2**30:.1f} GiB a device, over {COPY_LIMIT / 2**30:g}"
        skipped = Check("update", "", 0, 0, "", skipped=reason)
        return jax.device_get(metrics.summarise()), skipped
    rate, optim = parts.optim.learning_rate, parts.optim
    # The step gives the buffers of its state away.
    copy = jax.tree.map(jnp.copy, state)
    new, metrics = parts.step(copy, scored.batch, scored.microbatches, rate)
    values = jax.device_get(metrics)
    logprobs, _ = parts.score(new.params, scored.batch, scored.microbatches)
    kl = float(drift(logprobs, scored.batch)["rollout/kl"])
    reach = adam_bound(optim.b1, optim.b2, int(state.updates) + 1)
    share, most = jax.device_get(
        _movement(state.params, new.params, rate, reach, optim.weight_decay)
    )
    return values, check_update(rate, values, float(share), float(most), kl)


def check_update(
    rate: float, values: dict[str, Any], share: float, most: float, kl: float
) -> Check:
    """One update at the peak learning rate moves the weights, no further than AdamW may, and not
    so far that the policy breaks.

    Args:
        values: metrics of the step.
        share, most: as `_movement` says.
        kl: nats a token, KL(old || new) on the batch of the update.
    """
    if values["updates_skipped"]:
        return Check(
            "update", "updates without a finite loss and gradient", 1, 0,
            f"Weights or batch hold a NaN or an infinity (loss {values['loss']:.3g}, gradient norm "
            f"{values['grad_norm']:.3g}): check the weights that the run starts from",
        )  # fmt: skip
    if rate and not most > 0:
        return Check(
            "update", "share of the weights that stood still", 1, 0,
            f"An update at learning rate {rate:g} moved nothing: the rate is below the weights' "
            "rounding, or the loss has no gradient (are all loss weights 0?)",
        )  # fmt: skip
    if not share <= 1 + ROUNDING:
        return Check(
            "update", "largest move of a weight, in learning rate x (Adam's bound + decay)",
            share, 1 + ROUNDING,
            f"The step does more than AdamW may at learning rate {rate:g}: check the optimizer, "
            "and the moments that a resumed run brought",
        )  # fmt: skip
    return Check(
        "update", "KL (nats a token) after one update at the peak learning rate", kl, KL_LIMIT,
        f"learning_rate {rate:g} breaks the policy in one update: lower --optim.learning-rate",
    )  # fmt: skip


def bytes_on_device(tree: Any) -> int:
    """Bytes of the arrays of `tree` that one device holds."""
    return sum(
        int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )


def adam_bound(b1: float, b2: float, updates: int) -> float:
    """The most that Adam's direction can be after so many updates, whatever the gradients were.

    By Cauchy-Schwarz on m = (1 - b1) sum b1^k g_k and v = (1 - b2) sum b2^k g_k^2, both divided by
    their bias correction; 1 for the first update.
    """
    age = np.arange(updates, dtype=np.float64)
    with np.errstate(over="ignore"):
        spread = np.sum((b1 * b1 / b2) ** age) if b2 else (1.0 if updates == 1 else np.inf)
        bound = (1 - b1) * np.sqrt(spread / (1 - b2))
        return float(bound * np.sqrt(1 - b2**updates) / (1 - b1**updates))


@jax.jit
def _movement(old: Any, new: Any, rate: float, reach: float, decay: float):
    """Largest move of a weight as a share of rate (reach + decay |w|), and in itself."""

    def leaf(before, after):
        move, size = jnp.abs(after - before), jnp.abs(before)
        allowed = rate * (reach + decay * size)
        # Subtracting rounds to the spacing of the weight, which may exceed a small rate.
        beyond = move - jnp.finfo(before.dtype).eps * jnp.maximum(size, jnp.abs(after))
        return jnp.where(beyond > 0, beyond / allowed, 0.0).max(), move.max()

    pairs = jax.tree.leaves(jax.tree.map(lambda *x: jnp.stack(leaf(*x)), old, new))
    return jnp.stack(pairs).max(axis=0)


# --- packing and padding --------------------------------------------------------------------------


def check_packing(parts: Parts, groups: Sequence[Group]) -> list[Check]:
    """Sequences score the same packed into one row as alone, and whatever stands in padding."""
    limit, row = parts.tolerance.same, parts.layout.row_tokens
    whole = [np.concatenate([g.prompt, c.tokens]) for g in groups for c in g.completions]
    # Short enough to stand in one row together, with an eighth of it for padding.
    cells = min(PIECE, (row - row // 8) // len(whole))
    sequences = [TokenSequence(x[-cells - 1 :].astype(np.int32), 1) for x in whole]
    together = score_rows(parts, [sequences])
    alone = score_rows(parts, [[s] for s in sequences])
    littered = score_rows(parts, [sequences], litter=True)
    packed = parts.tolerance.figure(np.concatenate(together) - np.concatenate(alone))
    padded = parts.tolerance.figure(np.concatenate(together) - np.concatenate(littered))
    kind = f"{parts.tolerance.name} change (nats) of a token's log-prob"
    return [
        Check(
            "packing", f"{kind} when sequences share a row", packed, limit,
            "Attention leaks between the sequences of a row, or positions do not restart: check "
            "the segments in the attention's mask",
        ),
        Check(
            "padding", f"{kind} when padding holds other ids", padded, limit,
            "Padding is attended to: cells of segment 0 must be invisible to the others",
        ),
    ]  # fmt: skip


def score_rows(
    parts: Parts, rows: Sequence[Sequence[TokenSequence]], *, litter: bool = False
) -> list[np.ndarray]:
    """Log-probs of the completion of every sequence, each inner list packed into one row.

    `litter` fills padding with drawn ids and positions instead of zeros.
    """
    layout = parts.layout
    room = layout.microbatches * layout.rows
    result: list[np.ndarray] = []
    for first in range(0, len(rows), room):
        packed = [pack(row, row=layout.row_tokens, rows=1) for row in rows[first : first + room]]
        batch = _batch_of(packed, layout, parts.sampler.cfg.live_vocab if litter else None)
        placed = mesh_lib.place(batch, parts.mesh, None, "batch", "seq")
        used = -(-len(packed) // layout.rows)
        scored = jax.device_get(parts.score(parts.state.params, placed, used)[0])
        lines = scored.reshape(room, layout.row_tokens)
        for here, line in zip(packed, lines, strict=False):
            for number in range(here.index.max() + 1):
                result.append(line[here.mask[0] & (here.index[0] == number)])
    return result


def _batch_of(packed: Sequence[PackedRows], layout: Layout, litter: int | None) -> RolloutBatch:
    """Single rows as a mini-batch without advantages or weights, on the host.

    `litter` is the number of ids to draw from for the padding; None leaves zeros there.
    """
    room = layout.microbatches * layout.rows

    def pieces(x: np.ndarray) -> Any:
        # Any: as in `rl.minibatch`, the record's fields become device arrays when it is placed.
        return x.reshape(layout.microbatches, layout.rows, layout.row_tokens)

    def stacked(name: str) -> np.ndarray:
        values = np.concatenate([getattr(p, name) for p in packed])
        return np.pad(values, ((0, room - len(packed)), (0, 0)))

    segments, rng = stacked("segments"), np.random.default_rng(0)

    def littered(name: str, top: int) -> np.ndarray:
        noise = rng.integers(0, top, segments.shape, np.int32)
        return np.where(segments == 0, noise, stacked(name)) if litter else stacked(name)

    empty = pieces(np.zeros(segments.shape, np.float32))
    return RolloutBatch(
        tokens=pieces(littered("tokens", litter or 1)),
        targets=pieces(stacked("targets")),
        positions=pieces(littered("positions", layout.row_tokens)),
        segments=pieces(segments),
        mask=pieces(stacked("mask")),
        loss_weights=empty,
        positive_weights=empty,
        advantages=empty,
        old_logprobs=empty,
        old_entropy=empty,
        reference_logprobs=empty,
        sampler_logprobs=empty,
    )
