# SPDX-License-Identifier: Apache-2.0
"""Figures over repeated samples: avg@k, pass@k, majority@k and an interval. Numpy only."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike


def avg_at_k(correct: ArrayLike) -> float:
    """Mean accuracy over all samples of all problems; `correct` is bool [n, k]."""
    return float(_outcomes(correct).mean())


def pass_at_k(correct: ArrayLike, *, k: int) -> float:
    """Chance that at least one of k samples is right, unbiased, from m >= k samples a problem.

    Mean over problems of 1 - C(m-c, k) / C(m, k), with c right ones of m (Chen et al. 2021, eq.
    1). The quotient is taken as a product of k factors below 1: no factorial overflows.

    Args:
        correct: bool [n, m].
        k: from 1 to m.
    """
    outcomes = _outcomes(correct)
    m = outcomes.shape[1]
    if not 1 <= k <= m:
        raise ValueError(f"k={k} with {m} samples a problem; k must be from 1 to {m}")
    wrong = m - outcomes.sum(axis=1)
    drawn = np.arange(k)
    # A factor below 0 only follows a factor that is 0, so clamping keeps the product right.
    all_wrong = np.prod(np.maximum(wrong[:, None] - drawn, 0) / (m - drawn), axis=1)
    return float(np.mean(1.0 - all_wrong))


def majority_at_k(answers: Sequence[Sequence[str | None]], correct: ArrayLike) -> float:
    """Accuracy of the most frequent answer of each problem.

    Args:
        answers: n lists of k answers, normalised so that equal answers are equal text; None for
        none.
        correct: bool [n, k], the grade of each. Answers of one text count by the majority of
        their grades.
    Returns:
        The mean over problems. Tied answers share: two tied, one right gives 0.5. No answer gives
        0.
    """
    outcomes = _outcomes(correct)
    shape = (len(answers), *{len(row) for row in answers})
    if shape != outcomes.shape:
        raise ValueError(
            f"answers are of shape {shape}, correct of {outcomes.shape}; they must agree"
        )
    scores: list[float] = []
    for row, grades in zip(answers, outcomes, strict=True):
        counts = Counter(answer for answer in row if answer is not None)
        top = max(counts.values(), default=0)
        tied = [answer for answer, count in counts.items() if count == top]
        right = [2 * sum(g for a, g in zip(row, grades, strict=True) if a == t) > top for t in tied]
        scores.append(sum(right) / len(tied) if tied else 0.0)
    return float(np.mean(scores))


def bootstrap_interval(
    values: ArrayLike, *, level: float = 0.95, samples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean, resampling problems.

    Samples of one problem are not independent, so problems are what is drawn: [n, k] values are
    averaged over k first (a cluster bootstrap).

    Args:
        values: [n] or [n, k] finite numbers.
        level: coverage, between 0 and 1.
        samples: how many resamples.
        seed: of the resampling.
    Returns:
        Lower and upper end.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim not in (1, 2) or array.size == 0 or not np.isfinite(array).all():
        raise ValueError(f"values of shape {array.shape}; expected finite [n] or [n, k], not empty")
    if not 0 < level < 1 or samples < 1:
        raise ValueError(f"{level=}, {samples=}; level must be between 0 and 1, samples 1 or more")
    problems = array if array.ndim == 1 else array.mean(axis=1)
    n = problems.shape[0]
    rng = np.random.default_rng(seed)
    means = np.empty(samples)
    block = max(1, 1_000_000 // n)
    for start in range(0, samples, block):
        stop = min(start + block, samples)
        means[start:stop] = problems[rng.integers(n, size=(stop - start, n))].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _outcomes(correct: ArrayLike) -> np.ndarray:
    """Check and convert to bool [n, m]."""
    array = np.asarray(correct)
    if array.ndim != 2 or array.size == 0:
        raise ValueError(
            f"correct has shape {array.shape}; expected [problems, samples], not empty"
        )
    if not np.isin(array, (0, 1)).all():
        raise ValueError("correct holds values other than 0 and 1; drop invalid verdicts first")
    return array.astype(bool)
