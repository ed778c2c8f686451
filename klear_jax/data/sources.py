# SPDX-License-Identifier: Apache-2.0
"""Which problems a training step sees: a pure function of the seed and the step number.

Since nothing is remembered between steps, a resumed run needs no position: it asks for the next
step and gets what the uninterrupted run would have got.
"""

from collections.abc import Callable, Sequence

import numpy as np

from klear_jax.data.problems import Problem
from klear_jax.data.tasks import draw_problems

ProblemStream = Callable[[int], list[Problem]]
"""Step number -> the problems of that step, all different."""


def task_stream(names: Sequence[str], count: int, *, seed: int) -> ProblemStream:
    """Fresh training questions of the embedded tasks at every step."""
    draw_problems(names, count, split="train", seed=seed)  # unknown names fail here, not at step 0

    def stream(step: int) -> list[Problem]:
        return draw_problems(names, count, split="train", seed=_mixed(seed, step))

    return stream


def file_stream(problems: Sequence[Problem], count: int, *, seed: int) -> ProblemStream:
    """Shuffled passes over a list of problems, `count` a step.

    A pass leaves out the remainder that does not fill a step (another one each pass), so a step
    never meets a problem twice.

    Raises:
        ValueError: fewer problems than `count`.
    """
    if len(problems) < count:
        raise ValueError(
            f"{count} problems a step and only {len(problems)} to choose from; lower "
            f"problems_per_step to at most {len(problems)}"
        )
    steps_a_pass = len(problems) // count

    def stream(step: int) -> list[Problem]:
        number, place = divmod(step, steps_a_pass)
        order = np.random.default_rng(_mixed(seed, number)).permutation(len(problems))
        return [problems[i] for i in order[place * count : (place + 1) * count]]

    return stream


def _mixed(seed: int, number: int) -> int:
    """A seed of its own for each number; neighbouring seeds share none."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0])
