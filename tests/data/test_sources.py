# SPDX-License-Identifier: Apache-2.0
"""The problems of a step depend on the seed and the step number alone."""

import collections

import pytest

from klear_jax.data.problems import Message, Problem
from klear_jax.data.sources import file_stream, task_stream
from klear_jax.data.tasks import split_of

PROBLEMS = [Problem(f"p{i}", (Message("user", f"question {i}"),), str(i)) for i in range(11)]


def ids(problems):
    return [p.id for p in problems]


def test_a_pass_meets_every_problem_once_and_leaves_the_remainder_out():
    stream = file_stream(PROBLEMS, 3, seed=0)
    passes = [[i for step in range(3 * n, 3 * n + 3) for i in ids(stream(step))] for n in range(20)]
    assert all(len(set(one)) == len(one) == 9 for one in passes)
    left_out = collections.Counter(p.id for one in passes for p in PROBLEMS if p.id not in one)
    assert len(left_out) > 5
    assert len({tuple(one) for one in passes}) == 20


def test_file_stream_remembers_nothing():
    """Any step, in any order, from a stream made anew: what a resumed run asks for."""
    stream, again = file_stream(PROBLEMS, 4, seed=5), file_stream(PROBLEMS, 4, seed=5)
    forward = [ids(stream(step)) for step in range(8)]
    assert forward == [ids(again(step)) for step in reversed(range(8))][::-1]
    assert forward == [ids(stream(step)) for step in range(8)]


def test_past_the_end_of_a_pass():
    """Sixty steps a pass: step 60 is the first of the second pass and has problems."""
    stream = file_stream([Problem(str(i), (), "1") for i in range(60)], 1, seed=0)
    first = [ids(stream(step))[0] for step in range(60)]
    second = [ids(stream(step))[0] for step in range(60, 120)]
    assert sorted(first) == sorted(second)
    assert first != second


def test_all_problems_in_one_step():
    assert sorted(ids(file_stream(PROBLEMS, 11, seed=0)(3))) == sorted(ids(PROBLEMS))


def test_too_few_problems():
    with pytest.raises(ValueError, match=r"problems_per_step asks for 12 a step and .* only 11"):
        file_stream(PROBLEMS, 12, seed=0)
    with pytest.raises(ValueError, match="batch asks for 3 a step and there are only 2"):
        file_stream([1, 2], 3, seed=0, setting="batch")


@pytest.mark.parametrize("make", ["file", "task"])
def test_seeds_and_steps_share_nothing(make):
    """Also neighbours: seed 0 at step 1 is not seed 1 at step 0."""

    def orders(seed):
        if make == "file":
            stream = file_stream(PROBLEMS, 11, seed=seed)
        else:
            stream = task_stream(("sort",), 11, seed=seed)
        return [tuple(ids(stream(step))) for step in range(6)]

    seen = [order for seed in range(6) for order in orders(seed)]
    assert len(set(seen)) == 36


def test_task_stream():
    stream = task_stream(("sum", "sort"), 8, seed=2)
    steps = [stream(n) for n in range(4)]
    assert [ids(s) for s in steps] == [ids(stream(n)) for n in range(4)]
    for problems in steps:
        assert len(set(ids(problems))) == 8
        assert [p.source for p in problems] == ["sum", "sort"] * 4
        assert {split_of(p.question) for p in problems} == {"train"}


def test_unknown_task_is_refused_at_once():
    with pytest.raises(ValueError, match="name one or more of sum, sort, reverse"):
        task_stream(("sum", "nope"), 4, seed=0)
