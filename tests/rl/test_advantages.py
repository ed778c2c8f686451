# SPDX-License-Identifier: Apache-2.0
"""Advantages against values recomputed by hand, and their invariants."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from klear_jax.rl.advantages import ADVANTAGES, is_informative

ALL = sorted(ADVANTAGES)
GROUPS = [name for name in ALL if name != "batch_normalised"]
"""Estimators that compare within a group."""


def advantages(name, rewards, valid=None):
    rewards = np.atleast_2d(np.asarray(rewards, np.float64))
    valid = np.ones(rewards.shape, bool) if valid is None else np.atleast_2d(np.asarray(valid))
    return ADVANTAGES[name](rewards, valid)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("group_normalised", [1.7321, -0.5774, -0.5774, -0.5774]),
        ("group_normalised_sample", [1.5, -0.5, -0.5, -0.5]),
        ("mean_centred", [0.75, -0.25, -0.25, -0.25]),
        ("leave_one_out", [1, -0.3333, -0.3333, -0.3333]),
        # A batch of one group is that group.
        ("batch_normalised", [1.7321, -0.5774, -0.5774, -0.5774]),
    ],
)
def test_one_success_of_four(name, expected):
    """The table of faults.md (verl PR 3635)."""
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


REWARDS = np.array([[1, 0, 0, 0], [5, 5, 5, 5], [0, 2, 2, 9.0]])
VALID = np.array([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 1, 1]], bool)


def test_batch_normalised_equals_numpy():
    """(R - mean) / std over the valid samples of all groups, so a uniform group counts."""
    used = REWARDS[VALID]
    expected = np.where(VALID, (REWARDS - used.mean()) / used.std(), 0)
    got = advantages("batch_normalised", np.where(VALID, REWARDS, np.nan), VALID)
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    assert (got[1] > 0).all()


def test_batch_normalised_of_a_uniform_batch_is_exactly_zero():
    rewards = np.full((3, 4), 0.1)
    assert not advantages("batch_normalised", rewards).any()
    rewards[0, 0] = np.nan
    valid = np.isfinite(rewards)
    assert not advantages("batch_normalised", rewards, valid).any()
    assert not advantages("batch_normalised", rewards, valid & False).any()


def test_batch_normalised_compares_single_samples_of_problems():
    """With G = 1 there is no group to compare with, but there is a batch."""
    got = advantages("batch_normalised", [[1.0], [0.0], [0.0], [1.0]])
    np.testing.assert_allclose(got, [[1], [-1], [-1], [1]], rtol=1e-12)
    for name in GROUPS:
        assert not advantages(name, [[1.0], [0.0], [0.0], [1.0]]).any()


@pytest.mark.parametrize("row", range(3))
def test_leave_one_out_equals_a_loop(row):
    rewards, valid = REWARDS[row], VALID[row]
    got = advantages("leave_one_out", np.where(valid, rewards, np.nan), valid)[0]
    for i in range(4):
        others = [rewards[j] for j in range(4) if valid[j] and j != i]
        assert got[i] == pytest.approx(rewards[i] - np.mean(others) if valid[i] else 0, abs=1e-12)


def test_mean_centred_keeps_the_scale_of_rewards():
    np.testing.assert_allclose(advantages("mean_centred", [8.0, 0.0]), [[4.0, -4.0]])
    np.testing.assert_allclose(advantages("mean_centred", [0.5, 0.0]), [[0.25, -0.25]])


@pytest.mark.parametrize("name", GROUPS)
def test_groups_do_not_mix(name):
    together = advantages(name, REWARDS)
    for row, group in zip(together, REWARDS, strict=True):
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
        spread, count = np.sqrt(np.mean(result[valid] ** 2)), used.size
        scale = {
            "group_normalised_sample": ((count - 1) / count) ** 0.5,
            "mean_centred": used.std(),
            "leave_one_out": used.std() * count / (count - 1),
        }
        np.testing.assert_allclose(spread, scale.get(name, 1.0), rtol=5e-3)
        # A larger reward never has a smaller advantage.
        order = np.argsort(used)
        assert (np.diff(result[valid][order]) >= 0).all()
    else:
        assert (result == 0).all()
