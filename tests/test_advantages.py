"""Group advantages: deviation with divisor G - 1, exact zeros, nothing from what is ungraded."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demyrl.learn.advantages import group_advantages, spread

NAN = np.nan


def advantages_of(*groups):
    return group_advantages(np.array(groups, np.float32))


@pytest.mark.parametrize(
    "rewards, want",
    [
        ([1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),  # divisor G would give 1.732 and -0.577
        ([1, 1, -1, -1], [0.866, 0.866, -0.866, -0.866]),
        ([1, -1], [0.7071, -0.7071]),
        ([3, 1, 2], [1, -1, 0]),
    ],
)
def test_the_deviation_is_that_of_a_sample(rewards, want):
    np.testing.assert_allclose(advantages_of(rewards)[0], want, atol=1e-4)


@pytest.mark.parametrize("reward, count", [(0.95, 7), (-0.6, 6), (0.1, 3), (-1.1, 16), (1, 2)])
def test_equal_rewards_give_exact_zeros_in_float32(reward, count):
    assert advantages_of([reward] * count).tolist() == [[0.0] * count]


def test_differences_of_rounding_are_no_differences():
    third = np.float32(1) / np.float32(3)
    assert not advantages_of([third, np.nextafter(third, np.float32(1)), third]).any()


def test_a_group_of_one_gets_zero():
    assert advantages_of([5.0]).tolist() == [[0.0]]


@pytest.mark.parametrize("ungraded", [NAN, np.inf, -np.inf])
def test_an_ungraded_trajectory_is_in_neither_mean_nor_deviation(ungraded):
    np.testing.assert_allclose(
        advantages_of([1, ungraded, 0, 0, 0])[0], [1.5, 0, -0.5, -0.5, -0.5], atol=1e-4
    )


@pytest.mark.parametrize("group", [[NAN, NAN, NAN], [NAN, 1, NAN], [np.inf, 1, -np.inf]])
def test_a_group_with_fewer_than_two_graded_members_gets_zeros(group):
    assert advantages_of(group).tolist() == [[0.0] * 3]


def test_groups_do_not_see_each_other():
    both = advantages_of([1, 0], [0, 0])
    np.testing.assert_allclose(both, [[0.7071, -0.7071], [0, 0]], atol=1e-4)
    np.testing.assert_array_equal(advantages_of([0, 0], [1, 0]), both[::-1])


def test_the_spread_is_that_of_the_graded_members():
    rewards = np.array([[1, NAN, -1], [NAN, 2, NAN], [NAN, NAN, NAN], [3, 3, 3]])
    assert spread(rewards).tolist() == [2.0, 0.0, 0.0, 0.0]


REWARDS = st.one_of(st.sampled_from([1.0, -1.0, NAN]), st.floats(-2, 2, width=32))


@given(st.lists(REWARDS, min_size=1, max_size=8), st.randoms())
@settings(max_examples=60, deadline=None)
def test_advantages_sum_to_zero_and_follow_their_rewards(rewards, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    (got,) = advantages_of(rewards)
    assert abs(got.sum()) < 1e-6
    np.testing.assert_allclose(advantages_of([rewards[i] for i in order])[0], got[order], atol=1e-9)


@given(st.lists(st.floats(-2, 2, width=32), min_size=2, max_size=8))
@settings(max_examples=60, deadline=None)
def test_a_higher_reward_never_has_the_lower_advantage(rewards):
    (got,) = advantages_of(rewards)
    by_reward = got[np.argsort(rewards, kind="stable")]
    assert np.all(np.diff(by_reward) >= 0)
