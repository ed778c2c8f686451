# SPDX-License-Identifier: Apache-2.0
"""Advantages against values recomputed by hand, and their invariants."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from klear_jax.rl.advantages import ADVANTAGES, is_informative

ALL = sorted(ADVANTAGES)


def advantages(name, rewards, valid=None):
    rewards = np.atleast_2d(np.asarray(rewards, np.float64))
    valid = np.ones(rewards.shape, bool) if valid is None else np.atleast_2d(np.asarray(valid))
    return ADVANTAGES[name](rewards, valid)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("group_normalised", [1.7321, -0.5774, -0.5774, -0.5774]),
        ("group_normalised_sample", [1.5, -0.5, -0.5, -0.5]),
    ],
)
def test_one_success_of_four(name, expected):
    np.testing.assert_allclose(advantages(name, [1, 0, 0, 0])[0], expected, atol=1e-4)


def test_population_std_is_exact_and_sample_std_has_the_released_epsilon():
    np.testing.assert_allclose(advantages("group_normalised", [3, 1]), [[1, -1]], rtol=1e-12)
    expected = 1 / (np.sqrt(2) + 1e-6)
    np.testing.assert_allclose(
        advantages("group_normalised_sample", [3, 1]), [[expected, -expected]], rtol=1e-12
    )


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -2.0, 1 / 3])
@pytest.mark.parametrize("size", [1, 2, 7, 8])
def test_uniform_and_singleton_groups_are_exactly_zero(name, value, size):
    result = advantages(name, np.full(size, value))
    np.testing.assert_array_equal(result, np.zeros((1, size)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e9])
@pytest.mark.parametrize("name", ALL)
def test_invalid_members_leave_the_statistics(name, bad):
    result = advantages(name, [1, bad, 0, 0, 0, bad], [True, False, True, True, True, False])
    np.testing.assert_array_equal(result[0, [1, 5]], 0)
    np.testing.assert_array_equal(result[0, [0, 2, 3, 4]], advantages(name, [1, 0, 0, 0])[0])


@pytest.mark.parametrize("name", ALL)
def test_one_or_no_valid_member(name):
    np.testing.assert_array_equal(advantages(name, [1, 0, 5], [True, False, False]), 0.0)
    np.testing.assert_array_equal(advantages(name, [np.nan] * 3, [False] * 3), 0.0)
    # All valid members equal, an invalid one differs.
    np.testing.assert_array_equal(advantages(name, [1, 1, 0], [True, True, False]), 0.0)


@pytest.mark.parametrize("name", ALL)
def test_groups_do_not_mix(name):
    rewards = np.array([[1, 0, 0, 0], [5, 5, 5, 5], [0, 2, 2, 9.0]])
    together = advantages(name, rewards)
    for row, group in zip(together, rewards, strict=True):
        np.testing.assert_array_equal(row, advantages(name, group)[0])


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(data=st.data(), name=st.sampled_from(ALL))
def test_invariants(data, name):
    size = data.draw(st.integers(1, 16))
    reward = st.integers(-2000, 2000).map(lambda n: n / 1000)
    rewards = np.array([data.draw(st.lists(reward, min_size=size, max_size=size))])
    valid = np.array([data.draw(st.lists(st.booleans(), min_size=size, max_size=size))])
    result = advantages(name, np.where(valid, rewards, np.nan), valid)
    assert np.isfinite(result).all()
    assert abs(result.sum()) < 1e-9
    assert (result[~valid] == 0).all()
    used = rewards[valid]
    informative = used.size > 0 and used.min() < used.max()
    assert is_informative(rewards, valid)[0] == informative
    if informative:
        spread = np.sqrt(np.mean(result[valid] ** 2))
        ddof = used.size / (used.size - 1) if name.endswith("sample") else 1.0
        np.testing.assert_allclose(spread, ddof**-0.5, rtol=5e-3)
        # A larger reward never has a smaller advantage.
        order = np.argsort(used)
        assert (np.diff(result[valid][order]) >= 0).all()
    else:
        assert (result == 0).all()
