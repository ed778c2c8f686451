# SPDX-License-Identifier: Apache-2.0
"""Embedded tasks: small problems that a 0.3 M-parameter byte-level model can learn in minutes.

Owns the generators, their split and their flawed demonstrations. Demonstrations have a bad habit on
purpose: the skill is learned, the right behaviour stays rare, and reinforcement learning has a
mode to flip. This makes the effect of clipping visible; it is a constructed demo and says nothing
about large models. Read `draw_problems` first.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np

from klear_jax.data.problems import Message, Problem

Split = Literal["train", "heldout"]

ENUMERABLE = 100_000
"""Tasks with at most so many questions are drawn from a full list, the others by rejection."""


@dataclass(frozen=True)
class Worked:
    """An answer and the steps that lead to it, right or not."""

    steps: str
    answer: str

    @property
    def response(self) -> str:
        """The assistant turn in Qwen3's layout."""
        return f"<think>\n{self.steps}\n</think>\n\n\\boxed{{{self.answer}}}"


@dataclass(frozen=True)
class Task:
    """A family of questions numbered from 0, each with one right answer."""

    name: str
    description: str
    questions: int
    """How many different questions there are."""
    flaw_rate: float
    """Chance of the bad habit, each time there is occasion for it."""
    ask: Callable[[int], str]
    """Question of a number below `questions`; different numbers give different questions."""
    work: Callable[[str, Callable[[], bool]], Worked]
    """Solve a question; the second argument is asked at each occasion whether to slip."""

    def solve(self, question: str) -> Worked:
        """The right steps and answer."""
        return self.work(question, lambda: False)

    def demonstrate(self, question: str, rng: np.random.Generator) -> Worked:
        """Steps and answer of the teacher with the bad habit."""
        return self.work(question, lambda: rng.random() < self.flaw_rate)

    def problem(self, question: str) -> Problem:
        """The problem record of a question; the same question has the same id everywhere."""
        return Problem(
            id=f"{self.name}-{question.rpartition(' ')[2]}",
            messages=(Message("user", question),),
            answer=self.solve(question).answer,
            source=self.name,
        )


def split_of(question: str) -> Split:
    """The one split a question belongs to, by a hash of its text: 12.5 % are held out."""
    return "heldout" if hashlib.sha256(question.encode()).digest()[0] < 32 else "train"


def draw_problems(names: Sequence[str], count: int, *, split: Split, seed: int) -> list[Problem]:
    """Draw problems, the tasks in turn.

    All questions of one call are different, unless more training questions are asked for than a
    pass has: all of a small task, 1/16 of a large one. The result depends on the arguments alone; a
    task's questions do not depend on its companions.

    Args:
        names: task names, keys of `TASKS`.
        count: how many problems in all.
        split: which side of `split_of`.
        seed: any whole number.
    Raises:
        ValueError: unknown task, or more held-out problems asked for than there are.
    """
    tasks, shares = _shares(names, count)
    drawn = [
        list(islice(_questions(task, split, seed), share))
        for task, share in zip(tasks, shares, strict=True)
    ]
    for task, share, questions in zip(tasks, shares, drawn, strict=True):
        if len(questions) < share:
            raise ValueError(
                f"task {task.name!r} offers {len(questions)} {split} problems, {share} were asked"
                " for; ask for fewer or name more tasks"
            )
    return [
        tasks[i % len(tasks)].problem(drawn[i % len(tasks)][i // len(tasks)]) for i in range(count)
    ]


def draw_demonstrations(
    names: Sequence[str], count: int, *, seed: int, flawed: bool = True
) -> list[tuple[Message, ...]]:
    """Draw demonstrations on training questions: a user and an assistant message each.

    Args:
        names: task names, keys of `TASKS`; used in turn.
        count: how many in all.
        seed: any whole number.
        flawed: with the task's bad habit; False gives right demonstrations only.
    """
    problems = draw_problems(names, count, split="train", seed=seed)
    rng = _rng("demonstrations", seed)
    shown: list[tuple[Message, ...]] = []
    for problem in problems:
        task = TASKS[problem.source]
        question = problem.question
        worked = task.demonstrate(question, rng) if flawed else task.solve(question)
        shown.append((*problem.messages, Message("assistant", worked.response)))
    return shown


def _shares(names: Sequence[str], count: int) -> tuple[list[Task], list[int]]:
    """The named tasks, and how many of `count` problems each gives."""
    unknown = [name for name in names if name not in TASKS]
    if unknown or not names or len(set(names)) != len(names):
        raise ValueError(f"tasks {list(names)}; name one or more of {', '.join(TASKS)}, each once")
    if count < 1:
        raise ValueError(f"count={count} asks for nothing; give 1 or more")
    tasks = [TASKS[name] for name in names]
    return tasks, [len(range(i, count, len(tasks))) for i in range(len(tasks))]


def _rng(purpose: str, seed: int) -> np.random.Generator:
    digest = hashlib.sha256(f"{purpose}:{seed}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "little"))


@functools.lru_cache(maxsize=8)
def _pool(name: str, split: Split) -> tuple[str, ...]:
    """Every question of a small task on one side of the split."""
    task = TASKS[name]
    return tuple(q for q in map(task.ask, range(task.questions)) if split_of(q) == split)


def _questions(task: Task, split: Split, seed: int) -> Iterator[str]:
    """Questions in random order, each once a pass: one pass of held-out ones, else endless."""
    rng = _rng(f"{task.name}:{split}", seed)
    if task.questions > ENUMERABLE:
        yield from _rejected(task, split, rng)
        return
    pool = _pool(task.name, split)
    while True:
        for i in rng.permutation(len(pool)):
            yield pool[i]
        if split == "heldout":
            return


def _rejected(task: Task, split: Split, rng: np.random.Generator) -> Iterator[str]:
    """As `_questions` for a large task.

    A pass ends at 1/16 of all questions, half the held-out share, so that no draw searches long.
    """
    while True:
        seen: set[str] = set()
        while len(seen) < task.questions // 16:
            for number in rng.integers(task.questions, size=256).tolist():
                question = task.ask(number)
                if question not in seen and split_of(question) == split:
                    seen.add(question)
                    yield question
        if split == "heldout":
            return


def _ask_sum(number: int) -> str:
    return f"{10 + number // 90}+{10 + number % 90}"


def _work_sum(question: str, slips: Callable[[], bool]) -> Worked:
    """Add from the right with carries; a slip forgets one."""
    left, right = question.split("+")
    carry, steps, digits = 0, [], []
    for a, b in zip(map(int, reversed(left)), map(int, reversed(right)), strict=True):
        total = a + b + carry
        steps.append(f"{a}+{b}+{carry}={total}")
        digits.append(str(total % 10))
        carry = total // 10
        if carry and slips():
            carry = 0
    return Worked(" ".join(steps), ("1" if carry else "") + "".join(reversed(digits)))


def _ask_sort(number: int) -> str:
    # Digits 1 to 9 only: a leading zero would let a shorter number pass as the same answer.
    return "sort " + _written(number, "123456789", places=6)


def _work_sort(question: str, slips: Callable[[], bool]) -> Worked:
    """Sort the digits upward; a slip sorts them downward."""
    return Worked("", "".join(sorted(question.removeprefix("sort "), reverse=slips())))


def _ask_reverse(number: int) -> str:
    return "flip " + _written(number, "abcdefghijklmnopqrstuvwxyz", places=4)


def _work_reverse(question: str, slips: Callable[[], bool]) -> Worked:
    """Reverse the word; a slip copies it."""
    word = question.removeprefix("flip ")
    return Worked("", word if slips() else word[::-1])


def _written(number: int, alphabet: str, *, places: int) -> str:
    """`number` in so many places of `alphabet`."""
    base = len(alphabet)
    return "".join(alphabet[number // base**place % base] for place in range(places))


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        # .8 for each carry leaves 35 % of the demonstrations right, and shows enough sums with a
        # carry in them: what was never shown cannot be rewarded.
        Task(
            "sum",
            "add two 2-digit numbers with worked steps; the teacher forgets carries",
            questions=90 * 90,
            flaw_rate=0.8,
            ask=_ask_sum,
            work=_work_sum,
        ),
        Task(
            "sort",
            "sort 6 digits upward; the teacher sorts downward",
            questions=9**6,
            flaw_rate=0.85,
            ask=_ask_sort,
            work=_work_sort,
        ),
        Task(
            "reverse",
            "reverse a 4-letter word; the teacher copies it",
            questions=26**4,
            flaw_rate=0.8,
            ask=_ask_reverse,
            work=_work_reverse,
        ),
    )
}
"""The embedded tasks by name."""
