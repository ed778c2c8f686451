# SPDX-License-Identifier: Apache-2.0
"""Which problems a training step sees: a pure function of the seed and the step number.

Since nothing is remembered between steps, a resumed run needs no position: it asks for the next
step and gets what the uninterrupted run would have got.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from klear_jax.data.problems import Problem
from klear_jax.data.tasks import draw_problems

T = TypeVar("T")

ProblemStream = Callable[[int], list[Problem]]
"""Step number -> the problems of that step, all different."""


def task_stream(names: Sequence[str], count: int, *, seed: int) -> ProblemStream:
    """Fresh training questions of the embedded tasks at every step."""
    draw_problems(names, count, split="train", seed=seed)  # unknown names fail here, not at step 0

    def stream(step: int) -> list[Problem]:
        return draw_problems(names, count, split="train", seed=_mixed(seed, step))

    return stream


def file_stream(
    items: Sequence[T], count: int, *, seed: int, setting: str = "problems_per_step"
) -> Callable[[int], list[T]]:
    """Shuffled passes over a list of problems (or examples), `count` a step.

    A pass leaves out the remainder that does not fill a step (another one each pass), so a step
    never meets an item twice.

    Args:
        setting: the field that `count` came from, for the error.

    Raises:
        ValueError: fewer items than `count`.
    """
    if len(items) < count:
        raise ValueError(
            f"{setting} asks for {count} a step and there are only {len(items)} to choose from; "
            f"lower it to at most {len(items)}"
        )
    steps_a_pass = len(items) // count

    def stream(step: int) -> list[T]:
        number, place = divmod(step, steps_a_pass)
        order = np.random.default_rng(_mixed(seed, number)).permutation(len(items))
        return [items[i] for i in order[place * count : (place + 1) * count]]

    return stream


def _mixed(seed: int, number: int) -> int:
    """A seed of its own for each number; neighbouring seeds share none."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0])
