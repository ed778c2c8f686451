# SPDX-License-Identifier: Apache-2.0
"""Figures over samples, by values worked by hand and values that other systems got wrong."""

import math

import numpy as np
import pytest

from klear_jax.evals.metrics import avg_at_k, bootstrap_interval, majority_at_k, pass_at_k


def outcomes(n: int, c: int) -> np.ndarray:
    return np.arange(n)[None, :] < c


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 4, 1.0),
        (16, 4, 8, 0.96154),
        (1, 1, 1, 1.0),
        (1, 0, 1, 0.0),
        (4, 1, 1, 0.25),
        (4, 0, 4, 0.0),
        (5, 2, 2, 0.7),
    ],
)
def test_pass_at_k(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(outcomes(n, c), k=k) == pytest.approx(expected, abs=5e-6)


def test_pass_at_k_equals_the_binomials_and_survives_large_counts() -> None:
    exact = 1 - math.comb(1000 - 3, 500) / math.comb(1000, 500)
    assert pass_at_k(outcomes(1000, 3), k=500) == pytest.approx(exact, rel=1e-12)
    assert pass_at_k(outcomes(10_000, 1), k=5_000) == pytest.approx(0.5)


def test_pass_at_k_averages_over_problems() -> None:
    both = np.concatenate([outcomes(4, 1), outcomes(4, 2)])
    assert pass_at_k(both, k=2) == pytest.approx((0.5 + 5 / 6) / 2)
    assert pass_at_k(both, k=1) == pytest.approx(avg_at_k(both)) == pytest.approx(0.375)


@pytest.mark.parametrize("k", [0, 5])
def test_k_out_of_range(k: int) -> None:
    with pytest.raises(ValueError, match=rf"k={k} with 4 samples a problem; k must be from 1 to 4"):
        pass_at_k(outcomes(4, 1), k=k)


@pytest.mark.parametrize(
    ("answers", "correct", "expected"),
    [
        (["5", "5", "3"], [1, 1, 0], 1.0),
        (["5", "3", "3"], [1, 0, 0], 0.0),
        (["5", "3"], [1, 0], 0.5),
        ([None, None, "5"], [0, 0, 1], 1.0),
        ([None, None], [0, 0], 0.0),
        (["1", "2", "3"], [0, 0, 1], 1 / 3),
    ],
)
def test_majority(answers: list[str | None], correct: list[int], expected: float) -> None:
    assert majority_at_k([answers], [correct]) == pytest.approx(expected)


def test_majority_averages_over_problems() -> None:
    assert majority_at_k([["5", "5"], ["3", "3"]], [[1, 1], [0, 0]]) == 0.5


@pytest.mark.parametrize("answers", [[["5"]], [["5", "5"], ["3"]], [["5", "5"]] * 3])
def test_majority_shapes_must_agree(answers: list[list[str | None]]) -> None:
    with pytest.raises(ValueError, match="they must agree"):
        majority_at_k(answers, [[1, 1], [0, 0]])


@pytest.mark.parametrize("bad", [[], [1, 0], np.zeros((0, 3)), np.zeros((3, 0))])
def test_empty_or_flat_outcomes_are_refused(bad: object) -> None:
    with pytest.raises(ValueError, match=r"expected \[problems, samples\], not empty"):
        avg_at_k(bad)  # pyright: ignore[reportArgumentType]


def test_invalid_grades_are_refused() -> None:
    with pytest.raises(ValueError, match="other than 0 and 1; drop invalid verdicts"):
        avg_at_k([[1.0, math.nan]])


def test_interval_matches_the_normal_one_for_many_problems() -> None:
    values = np.arange(400) % 2
    low, high = bootstrap_interval(values, samples=4000, seed=1)
    # mean .5, standard error .5 / 20
    assert (low, high) == (pytest.approx(0.451, abs=0.006), pytest.approx(0.549, abs=0.006))
    assert bootstrap_interval(values, samples=4000, seed=1) == (low, high)
    narrow = bootstrap_interval(values, level=0.5, samples=4000, seed=1)
    assert low < narrow[0] < narrow[1] < high


def test_interval_resamples_problems_not_samples() -> None:
    clustered = np.repeat([[0.0], [1.0]] * 10, 50, axis=1)
    flat = bootstrap_interval(clustered[:, 0], samples=2000)
    assert bootstrap_interval(clustered, samples=2000) == flat
    assert flat[1] - flat[0] > 0.35


def test_interval_of_equal_values_is_a_point() -> None:
    assert bootstrap_interval([0.25] * 3, samples=100) == (0.25, 0.25)
    assert bootstrap_interval([0.25], samples=100) == (0.25, 0.25)


@pytest.mark.parametrize("bad", [[], [math.nan], [[[1.0]]]])
def test_bad_values_are_refused(bad: list) -> None:
    with pytest.raises(ValueError, match="values of shape"):
        bootstrap_interval(bad)
    with pytest.raises(ValueError, match=r"level=1.0"):
        bootstrap_interval([1.0], level=1.0)
