# SPDX-License-Identifier: Apache-2.0
"""From problems to graded groups: requests, verdicts as completions arrive, rewards, the filter.

Everything here is host code and numpy; `rl.minibatch` makes batches of the groups that are kept.
"""

import concurrent.futures
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from klear_jax.data.problems import Problem
from klear_jax.rewards.verdict import Kind, Reason, Verdict, format_of
from klear_jax.rl.advantages import is_informative
from klear_jax.sampling.sampler import Completion, Request

GroupFilter = Literal["reward", "accuracy", "none"]
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


@dataclasses.dataclass(frozen=True)
class Overlong:
    """What happens to completions that are too long, or nearly."""

    buffer: int = 0
    """Tokens before max_tokens over which a penalty grows (soft overlong punishment of DAPO, arXiv
    2503.14476, eq. 13); 0: no penalty."""
    factor: float = 1.0
    """The penalty at max_tokens: the reward falls by (tokens into the buffer) / buffer x this."""
    filter: bool = False
    """Leave out completions that were cut at max_tokens: they enter no statistic, mask or
    denominator. Advised below 32,768 tokens by the released code's notes."""

    def __post_init__(self):
        if self.buffer < 0 or not 0 < self.factor < float("inf"):
            raise ValueError(
                f"overlong buffer {self.buffer} (tokens) must be >= 0 and factor {self.factor} > 0"
            )
        if self.buffer == 0 and self.factor != 1.0:
            raise ValueError(
                f"overlong factor {self.factor} has no effect without a buffer; set buffer, in "
                "tokens"
            )


def training_rewards(
    groups: Sequence[Group],
    reward: Callable[[Kind, Verdict], float],
    overlong: Overlong,
    max_tokens: int,
) -> Float[np.ndarray, "n g"]:
    """The training reward of every sample, its length penalty included; NaN where invalid."""
    rewards = np.array([[reward(g.problem.kind, v) for v in g.verdicts] for g in groups])
    if overlong.buffer:
        into = _lengths(groups) - (max_tokens - overlong.buffer)
        rewards = rewards - overlong.factor * np.maximum(into, 0) / overlong.buffer
    return rewards


def trainable(groups: Sequence[Group], overlong: Overlong) -> Bool[np.ndarray, "n g"]:
    """Which samples may be trained on: valid, and not cut where the overlong filter is on."""
    valid = np.array([g.valid for g in groups])
    return valid & ~_cut(groups) if overlong.filter else valid


def _lengths(groups: Sequence[Group]) -> Int[np.ndarray, "n g"]:
    return np.array([[len(c.tokens) for c in g.completions] for g in groups])


def _cut(groups: Sequence[Group]) -> Bool[np.ndarray, "n g"]:
    return np.array([[c.stop == "length" for c in g.completions] for g in groups])


def keep_informative(
    groups: Sequence[Group],
    rewards: Float[np.ndarray, "n g"],
    valid: Bool[np.ndarray, "n g"],
    group_filter: GroupFilter,
    limit: int,
) -> list[int]:
    """Indices of the groups to train on, at most `limit`, in order.

    `reward` keeps groups whose valid rewards differ, `accuracy` those whose correctness does (the
    released code), `none` all groups with a valid sample.
    """
    if group_filter == "none":
        keep = valid.any(axis=1)
    elif group_filter == "accuracy":
        keep = is_informative(np.array([g.correct for g in groups], np.float64), valid)
    else:
        keep = is_informative(rewards, valid)
    return np.flatnonzero(keep)[:limit].tolist()


def summarise(
    groups: Sequence[Group],
    rewards: Float[np.ndarray, "n g"],
    trained: Bool[np.ndarray, "n g"],
    kept: Sequence[int],
) -> dict[str, float]:
    """Metrics of a rollout, over its valid samples; lengths in tokens.

    `trained` says which samples `trainable` allows, `kept` which groups passed the filter.
    """
    valid = np.array([g.valid for g in groups])
    correct = np.array([g.correct for g in groups])[valid]
    lengths = _lengths(groups)
    nothing = float("nan")
    accuracy = correct.mean() if correct.size else nothing
    samples = valid.shape[1]
    return {
        "reward": rewards[valid].mean() if valid.any() else nothing,
        "accuracy": accuracy,
        "groups/informative": is_informative(rewards, trained).mean(),
        "groups/expected_informative": 1 - accuracy**samples - (1 - accuracy) ** samples,
        "groups/sampled": len(groups),
        "groups/trained": len(kept),
        "invalid": int((~valid).sum()),
        "invalid_share": (~valid).mean(),
        "overlong_filtered": int((valid & ~trained).sum()),
        "length/mean": lengths.mean(),
        "length/max": int(lengths.max()),
        "truncated": _cut(groups).mean(),
        "tokens/sampled": int(lengths.sum()),
    }
