# SPDX-License-Identifier: Apache-2.0
"""From problems to mini-batches: requests, verdicts as completions arrive, groups, packed rows.

Everything here is host code and numpy; `with_old_logprobs` is where a batch reaches the device.
"""

import concurrent.futures
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float

from klear_jax.core import mesh as mesh_lib
from klear_jax.core.batch import RolloutBatch
from klear_jax.data.packing import TokenSequence, first_fit, pack
from klear_jax.data.problems import Problem
from klear_jax.rewards.verdict import Kind, Reason, Verdict, format_of
from klear_jax.rl.advantages import ADVANTAGES, is_informative
from klear_jax.sampling.sampler import Completion, Request

GroupFilter = Literal["reward", "accuracy", "none"]
Aggregation = Literal["token_mean", "sequence_mean", "constant"]
Grader = Callable[[Problem, str], Verdict]
"""(problem, response text) -> verdict; called from threads."""
Encode = Callable[[Problem], tuple[int, ...]]
"""Problem -> prompt ids."""
Decode = Callable[[np.ndarray], str]
"""Completion ids -> response text."""

GRADING_THREADS = 4
"""Threads that hand completions to the grader while others still decode."""


@dataclasses.dataclass(frozen=True)
class Group:
    """The samples of one problem."""

    problem: Problem
    prompt: tuple[int, ...]
    completions: tuple[Completion, ...]
    texts: tuple[str, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def valid(self) -> Bool[np.ndarray, " g"]:
        return np.array([v.valid for v in self.verdicts])

    @property
    def correct(self) -> Bool[np.ndarray, " g"]:
        return np.array([v.correct for v in self.verdicts])


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


def sample_id(*parts: str | int) -> int:
    """An unsigned 32-bit hash that names the noise of a sample."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def make_requests(
    problems: Sequence[Problem],
    encode: Encode,
    *,
    step: int | str,
    samples: int,
    max_tokens: int,
    temperature: float,
) -> list[Request]:
    """`samples` requests a problem, in order; the noise depends on (step, problem id, sample)."""
    return [
        Request(
            id=f"{number}/{sample}",
            prompt=prompt,
            sample_id=sample_id(step, problem.id, sample),
            max_tokens=max_tokens,
            temperature=temperature,
        )
        for number, problem in enumerate(problems)
        for prompt in [encode(problem)]
        for sample in range(samples)
    ]


def collect(
    problems: Sequence[Problem],
    requests: Sequence[Request],
    completions: Iterable[Completion],
    *,
    decode: Decode,
    grade: Grader,
) -> list[Group]:
    """Grade completions in threads as they arrive and put them back in order, by problem.

    A grader that raises makes its sample invalid (reason `infrastructure`), not wrong.
    """

    def judge(problem: Problem, completion: Completion) -> tuple[Completion, str, Verdict]:
        text = decode(completion.tokens)
        try:
            return completion, text, grade(problem, text)
        except Exception as error:  # a user's grader may raise anything; the step must go on
            detail = f"{type(error).__name__}: {error}"
            return (
                completion, text,
                Verdict.invalid(Reason.INFRASTRUCTURE, format=format_of(text), detail=detail),
            )  # fmt: skip

    with concurrent.futures.ThreadPoolExecutor(GRADING_THREADS) as pool:
        try:
            futures = {
                c.id: pool.submit(judge, problems[int(c.id.partition("/")[0])], c)
                for c in completions
            }
            judged = {name: future.result() for name, future in futures.items()}
        except BaseException:  # whoever interrupts must not wait for the whole queue
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    samples = len(requests) // len(problems)
    groups = []
    for number, problem in enumerate(problems):
        members = [judged[f"{number}/{i}"] for i in range(samples)]
        texts, verdicts = tuple(m[1] for m in members), tuple(m[2] for m in members)
        prompt = requests[number * samples].prompt
        groups.append(Group(problem, prompt, tuple(m[0] for m in members), texts, verdicts))
    return groups


def training_rewards(
    groups: Sequence[Group], reward: Callable[[Kind, Verdict], float]
) -> Float[np.ndarray, "n g"]:
    """The training reward of every sample; NaN where the verdict is not valid."""
    return np.array([[reward(g.problem.kind, v) for v in g.verdicts] for g in groups])


def keep_informative(
    groups: Sequence[Group],
    rewards: Float[np.ndarray, "n g"],
    group_filter: GroupFilter,
    limit: int,
) -> list[int]:
    """Indices of the groups to train on, at most `limit`, in order; there is no refill (paper).

    `reward` keeps groups whose valid rewards differ, `accuracy` those whose correctness does (the
    released code), `none` all groups with a valid sample.
    """
    valid = np.array([g.valid for g in groups])
    if group_filter == "none":
        keep = valid.any(axis=1)
    elif group_filter == "accuracy":
        keep = is_informative(np.array([g.correct for g in groups], np.float64), valid)
    else:
        keep = is_informative(rewards, valid)
    return np.flatnonzero(keep)[:limit].tolist()


@dataclasses.dataclass(frozen=True)
class Objective:
    """How rewards become the weights of tokens."""

    advantage: Literal["group_normalised", "group_normalised_sample"] = "group_normalised"
    """Standard deviation over G (paper), or over G - 1 plus 1e-6 (released code)."""
    aggregation: Aggregation = "token_mean"
    """What one mini-batch averages over: its tokens, its sequences' token means, or sequences
    divided by the constant `max_tokens`."""
    positive_nll: float = 0.1
    """alpha, the weight of the mean negative log-likelihood of positive samples' tokens."""
    positive_threshold: float = 1.0
    """A sample is positive when its training reward is at least this."""

    def __post_init__(self):
        if not 0 <= self.positive_nll < float("inf"):
            raise ValueError(f"positive_nll {self.positive_nll} must be >= 0; 0 turns it off")


def assemble(
    groups: Sequence[Group],
    rewards: Float[np.ndarray, "n g"],
    objective: Objective,
    *,
    updates: int,
    layout: Layout,
    max_tokens: int,
) -> list[MiniBatch]:
    """Split whole groups into `updates` mini-batches and pack each.

    With fewer groups than updates there is one group a mini-batch, so fewer updates. Invalid
    samples are left out everywhere.
    """
    if not groups:
        return []
    valid = np.array([g.valid for g in groups])
    advantages = ADVANTAGES[objective.advantage](rewards, valid)
    shares = np.array_split(np.arange(len(groups)), min(updates, len(groups)))
    batches = []
    for share in shares:
        members = [(n, i) for n in share for i in range(valid.shape[1]) if valid[n, i]]
        if members:
            batches.append(
                _pack(groups, rewards, advantages, members, objective, layout, max_tokens)
            )
    return batches


def _pack(groups, rewards, advantages, members, objective, layout, max_tokens) -> MiniBatch:
    completions = [groups[n].completions[i] for n, i in members]
    lengths = np.array([len(c.tokens) for c in completions])
    positive = np.array([rewards[n, i] >= objective.positive_threshold for n, i in members])
    weights = token_weights(lengths, objective.aggregation, max_tokens)
    positives = objective.positive_nll * positive / max(lengths[positive].sum(), 1)

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

    batch = RolloutBatch(
        tokens=pieces(packed.tokens),
        targets=pieces(packed.targets),
        positions=pieces(packed.positions),
        segments=pieces(packed.segments),
        mask=pieces(packed.mask),
        old_logprobs=pieces(np.zeros(packed.tokens.shape, np.float32)),
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
    minibatches: Iterable[MiniBatch], score: Callable, mesh: Mesh
) -> Iterator[MiniBatch]:
    """Place each mini-batch on the mesh and fill in log-probs under the policy as it is now."""
    for minibatch in minibatches:
        batch = mesh_lib.place(minibatch.batch, mesh, None, "batch", "seq")
        old = score(batch, minibatch.microbatches)
        batch = dataclasses.replace(batch, old_logprobs=old)
        yield dataclasses.replace(minibatch, batch=batch)


def summarise(
    groups: Sequence[Group], rewards: Float[np.ndarray, "n g"], kept: Sequence[int]
) -> dict[str, float]:
    """Metrics of a rollout, over its valid samples; lengths in tokens."""
    valid = np.array([g.valid for g in groups])
    correct = np.array([g.correct for g in groups])[valid]
    lengths = np.array([[len(c.tokens) for c in g.completions] for g in groups])
    cut = np.array([[c.stop == "length" for c in g.completions] for g in groups])
    informative = is_informative(rewards, valid)
    nothing = float("nan")
    accuracy = correct.mean() if correct.size else nothing
    samples = valid.shape[1]
    return {
        "reward": rewards[valid].mean() if valid.any() else nothing,
        "accuracy": accuracy,
        "groups/informative": informative.mean(),
        "groups/expected_informative": 1 - accuracy**samples - (1 - accuracy) ** samples,
        "groups/trained": len(kept),
        "invalid": int((~valid).sum()),
        "invalid_share": (~valid).mean(),
        "length/mean": lengths.mean(),
        "length/max": int(lengths.max()),
        "truncated": cut.mean(),
        "tokens/sampled": int(lengths.sum()),
    }
