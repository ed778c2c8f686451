# SPDX-License-Identifier: Apache-2.0
"""Embedded tasks: right answers, one split a question, and how flawed the demonstrations are."""

import re

import numpy as np
import pytest

from klear_jax.data.tasks import TASKS, draw_demonstrations, draw_problems, split_of

NAMES = ("sum", "sort", "reverse")


@pytest.mark.parametrize(
    ("task", "question", "steps", "answer"),
    [
        ("sum", "47+38", "7+8+0=15 4+3+1=8", "85"),
        ("sum", "95+38", "5+8+0=13 9+3+1=13", "133"),
        ("sum", "10+10", "0+0+0=0 1+1+0=2", "20"),
        ("sort", "sort 352819", "", "123589"),
        ("reverse", "flip qwerty", "", "ytrewq"),
    ],
)
def test_right_steps(task: str, question: str, steps: str, answer: str) -> None:
    worked = TASKS[task].solve(question)
    assert (worked.steps, worked.answer) == (steps, answer)
    assert worked.response == f"<think>\n{steps}\n</think>\n\n\\boxed{{{answer}}}"


@pytest.mark.parametrize(
    ("task", "question", "answer"),
    [("sum", "47+38", "75"), ("sum", "95+38", "23"), ("sum", "12+34", "46")],
)
def test_forgotten_carries(task: str, question: str, answer: str) -> None:
    assert TASKS[task].work(question, lambda: True).answer == answer


def test_the_other_habits() -> None:
    assert TASKS["sort"].work("sort 352819", lambda: True).answer == "985321"
    assert TASKS["reverse"].work("flip qwerty", lambda: True).answer == "qwerty"


def test_numbers_and_questions_are_one_to_one() -> None:
    task = TASKS["sum"]
    assert len({task.ask(i) for i in range(task.questions)}) == task.questions == 8100
    assert (TASKS["sort"].ask(0), TASKS["sort"].ask(9**6 - 1)) == ("sort 111111", "sort 999999")
    assert TASKS["reverse"].ask(26**4 - 1) == "flip zzzz"


def test_draws_are_deterministic_and_seeds_differ() -> None:
    first = draw_problems(NAMES, 30, split="train", seed=0)
    assert first == draw_problems(NAMES, 30, split="train", seed=0)
    assert first != draw_problems(NAMES, 30, split="train", seed=1)
    assert [p.source for p in first[:4]] == ["sum", "sort", "reverse", "sum"]
    alone = draw_problems(["sort"], 10, split="train", seed=0)
    assert alone == [p for p in first if p.source == "sort"]


def test_ids_are_stable() -> None:
    for problem in draw_problems(NAMES, 30, split="train", seed=3):
        assert problem.id == f"{problem.source}-{problem.question.split(' ')[-1]}"
        assert problem.answer == TASKS[problem.source].solve(problem.question).answer


def test_splits_are_disjoint_and_held_out_questions_distinct() -> None:
    held = {p.question for p in draw_problems(NAMES, 2400, split="heldout", seed=0)}
    train = {p.question for p in draw_problems(NAMES, 6000, split="train", seed=0)}
    shown = {m[0].content for m in draw_demonstrations(NAMES, 3000, seed=5)}
    assert len(held) == 2400
    assert len(train) == 6000
    assert all(split_of(q) == "heldout" for q in held)
    assert not held & (train | shown)


def test_asking_for_more_than_there_is_raises() -> None:
    total = sum(split_of(TASKS["sum"].ask(i)) == "heldout" for i in range(8100))
    assert total == 996
    assert len(draw_problems(["sum"], total, split="heldout", seed=0)) == total
    with pytest.raises(ValueError, match="'sum' offers 996 heldout problems, 997 were asked for"):
        draw_problems(["sum"], total + 1, split="heldout", seed=0)
    with pytest.raises(ValueError, match="'sort' offers 33219 heldout problems, 50000 were asked"):
        draw_problems(["sort"], 50_000, split="heldout", seed=0)


def test_training_questions_repeat_only_after_all_were_drawn() -> None:
    drawn = [p.question for p in draw_problems(["sum"], 2 * 7104, split="train", seed=0)]
    assert len(set(drawn[:7104])) == len(set(drawn[7104:])) == 7104
    assert drawn[:7104] != drawn[7104:]


@pytest.mark.parametrize(("names", "count"), [(["sums"], 1), ([], 1), (["sum", "sum"], 1)])
def test_unknown_tasks_list_the_choices(names: list[str], count: int) -> None:
    with pytest.raises(ValueError, match="name one or more of sum, sort, reverse"):
        draw_problems(names, count, split="train", seed=0)
    with pytest.raises(ValueError, match="count=0"):
        draw_problems(["sum"], 0, split="train", seed=0)


def right_share(name: str, *, flawed: bool) -> float:
    shown = draw_demonstrations([name], 4000, seed=1, flawed=flawed)
    answers = [re.findall(r"\\boxed\{(.*)\}", reply.content) for _, reply in shown]
    right = [TASKS[name].solve(ask.content).answer for ask, _ in shown]
    return float(np.mean([a == [r] for a, r in zip(answers, right, strict=True)]))


@pytest.mark.parametrize(
    ("name", "share"),
    # sum: .55(4/9 + 5/9 q) + .45 q (28/81 + 53/81 q) with q = .2 remembered carries.
    [("sum", 0.3484), ("sort", 0.15), ("reverse", 0.2)],
)
def test_demonstrations_are_right_as_often_as_stated(name: str, share: float) -> None:
    assert right_share(name, flawed=True) == pytest.approx(share, abs=0.02)
    assert right_share(name, flawed=False) == 1.0


def test_demonstrations_are_short_and_deterministic() -> None:
    shown = draw_demonstrations(NAMES, 300, seed=2)
    assert shown == draw_demonstrations(NAMES, 300, seed=2)
    assert [m.role for m in shown[0]] == ["user", "assistant"]
    assert max(len(m[0].content) for m in shown) <= 11
    assert max(len(m[1].content) for m in shown) <= 60
