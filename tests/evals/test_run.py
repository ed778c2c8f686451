# SPDX-License-Identifier: Apache-2.0
"""Evaluation with a fake sampler: what is asked for, what is counted, and the figures by hand."""

import json

import numpy as np
import pytest

from klear_jax.data.problems import Message, Problem
from klear_jax.evals.run import Evaluation, evaluate
from klear_jax.rewards.verdict import Format, Reason, Verdict
from klear_jax.sampling.sampler import Completion

LAYOUT = Format(think_opened=False, think_closed=False, boxed=False)
PROBLEMS = [
    Problem(f"{source}-{i}", (Message("user", f"{source} {i}"),), str(i), source=source)
    for i, source in enumerate(["x", "y", "x"])
]
CORRECT = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], bool)


class FakeSampler:
    """Answers the number of the request; keeps what it was asked."""

    def sample(self, requests):
        self.requests = list(requests)
        for number in reversed(range(len(self.requests))):
            stop = "length" if number == 5 else "stop"
            yield Completion(self.requests[number].id, np.array([number, 9]), np.zeros(2), stop)


def grade(problem, text):
    number = int(text)
    if number == 6:
        raise RuntimeError("no worker")
    if CORRECT.flat[number]:
        return Verdict.right(format=LAYOUT)
    return Verdict.miss(Reason.WRONG, format=LAYOUT)


def run(sampler=None):
    return evaluate(
        sampler or FakeSampler(), PROBLEMS, lambda p: (1, int(p.answer)), lambda ids: str(ids[0]),
        grade, samples=4, max_tokens=7, temperature=0.6,
    )  # fmt: skip


def test_figures_by_hand():
    result = run()
    assert result.correct.tolist() == CORRECT.tolist()
    assert result.invalid == 1
    assert result.by_source() == {"x": 6 / 8, "y": 0.0}
    table = result.table()
    assert list(table) == ["avg@4", "low", "high", "pass@1", "pass@2", "pass@4"]
    assert table["avg@4"] == table["pass@1"] == pytest.approx(0.5)
    # Two of four right: 1 - C(2,2)/C(4,2) = 5/6, none right: 0, all right: 1.
    assert table["pass@2"] == pytest.approx((5 / 6 + 0 + 1) / 3)
    assert table["pass@4"] == pytest.approx(2 / 3)
    assert (table["low"], table["high"]) == (0.0, 1.0)


def test_the_same_noise_at_every_call():
    one, two = FakeSampler(), FakeSampler()
    run(one)
    run(two)
    assert one.requests == two.requests
    assert len({r.sample_id for r in one.requests}) == 12
    assert {(r.max_tokens, r.temperature) for r in one.requests} == {(7, 0.6)}


def test_records_are_plain_and_say_why():
    records = list(run().records())
    assert json.loads(json.dumps(records, allow_nan=False)) == records
    assert len(records) == 12
    assert records[0] == {
        "problem_id": "x-0", "task": "x", "question": "x 0", "answer": "0", "response": "0",
        "correct": True, "reward": 1.0, "reason": "correct", "tokens": 2, "stop": "stop",
    }  # fmt: skip
    assert records[5]["stop"] == "length"
    assert (records[6]["reward"], records[6]["reason"]) == (None, "infrastructure")
    assert records[6]["correct"] is False


def test_one_sample():
    result = Evaluation(run().groups)
    single = Evaluation(
        tuple(
            type(g)(g.problem, g.prompt, g.completions[:1], g.texts[:1], g.verdicts[:1])
            for g in result.groups
        )
    )
    assert single.table()["avg@1"] == single.table()["pass@1"] == pytest.approx(2 / 3)
    assert "pass@2" not in single.table()
