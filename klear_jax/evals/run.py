# SPDX-License-Identifier: Apache-2.0
"""Evaluation: draw k completions of every problem, grade them, and report figures with
intervals."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from klear_jax.data.problems import Problem
from klear_jax.evals import metrics
from klear_jax.rl import rollout
from klear_jax.rl.rollout import Decode, Encode, Grader, Group
from klear_jax.sampling.sampler import Sampler


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Graded completions of a set of problems."""

    groups: tuple[Group, ...]

    @property
    def correct(self) -> Bool[np.ndarray, "n k"]:
        """An invalid verdict counts as not correct here; `invalid` says how many there were."""
        return np.array([group.correct for group in self.groups])

    @property
    def invalid(self) -> int:
        return int(sum((~group.valid).sum() for group in self.groups))

    def records(self) -> Iterator[dict[str, Any]]:
        """One plain record a completion, for a JSONL file."""
        for group in self.groups:
            members = zip(group.completions, group.texts, group.verdicts, strict=True)
            for completion, text, verdict in members:
                yield {
                    "problem_id": group.problem.id,
                    "task": group.problem.source,
                    "question": group.problem.question,
                    "answer": group.problem.answer,
                    "response": text,
                    "correct": verdict.correct,
                    "reward": verdict.reward if verdict.valid else None,
                    "reason": verdict.reason.value,
                    "tokens": len(completion.tokens),
                    "stop": completion.stop,
                }

    def by_source(self) -> dict[str, float]:
        """avg@k for each problem source."""
        sources = np.array([group.problem.source for group in self.groups])
        return {s: metrics.avg_at_k(self.correct[sources == s]) for s in dict.fromkeys(sources)}

    def table(self) -> dict[str, float]:
        """avg@k with a 95 % interval over problems, and pass@k for k = 1, 2, 4, ... samples."""
        correct = self.correct
        k = correct.shape[1]
        low, high = metrics.bootstrap_interval(correct, samples=2000)
        values = {f"avg@{k}": metrics.avg_at_k(correct), "low": low, "high": high}
        powers = [2**i for i in range(k.bit_length()) if 2**i <= k]
        return values | {f"pass@{n}": metrics.pass_at_k(correct, k=n) for n in powers}


def evaluate(
    sampler: Sampler,
    problems: Sequence[Problem],
    encode: Encode,
    decode: Decode,
    grade: Grader,
    *,
    samples: int,
    max_tokens: int,
    temperature: float,
) -> Evaluation:
    """Draw and grade `samples` completions a problem; the same noise every time it is called."""
    requests = rollout.make_requests(
        problems, encode, step="evaluation", samples=samples,
        max_tokens=max_tokens, temperature=temperature,
    )  # fmt: skip
    groups = rollout.collect(
        problems, requests, sampler.sample(requests), decode=decode, grade=grade
    )
    return Evaluation(tuple(groups))
