"""Statistics: worked by hand, and by enumerating every draw."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demyrl.analysis import stats


def rows_of(problem, correct, domain="math", answers=None, calls=1):
    answers = answers or ["right" if right else "wrong" for right in correct]
    return [
        {
            "problem_id": problem,
            "domain": domain,
            "sample": sample,
            "correct": right,
            "answer": answer,
            "calls": calls,
        }
        for sample, (right, answer) in enumerate(zip(correct, answers, strict=True))
    ]


def test_avg_at_k_is_the_mean_of_the_problems():
    correct = np.array([[True, False], [True, True]])
    assert stats.avg_at_k(correct) == 0.75


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 2, 0.5),
        (10, 3, 5, 0.916667),
        (1000, 1, 999, 0.999),
        (4, 1, 4, 1.0),
        (7, 0, 3, 0.0),
        (100_000, 50_000, 1, 0.5),
    ],
)
def test_pass_at_k_of_known_counts(n, c, k, expected):
    assert stats.pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-6)


def test_pass_at_k_is_undefined_with_fewer_than_k_samples():
    assert stats.pass_at_k(2, 0, 5) is None


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0)])
def test_pass_at_k_refuses_impossible_counts(n, c, k):
    with pytest.raises(ValueError, match="expected 0 <= c <= n"):
        stats.pass_at_k(n, c, k)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))
)
def test_pass_at_k_counts_the_draws_with_a_right_sample(numbers):
    n, c, k = numbers
    draws = list(itertools.combinations(range(n), k))
    share = sum(any(sample < c for sample in draw) for draw in draws) / len(draws)
    assert stats.pass_at_k(n, c, k) == pytest.approx(share)


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 2), (4, 1, 4), (3, 2, 3)])
def test_the_bootstrap_form_counts_the_draws_with_replacement(n, c, k):
    draws = list(itertools.product(range(n), repeat=k))
    share = sum(any(sample < c for sample in draw) for draw in draws) / len(draws)
    assert stats.pass_at_k_bootstrap_closed(n, c, k) == pytest.approx(share)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 12).flatmap(
        lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))
    )
)
def test_the_bootstrap_form_is_never_above_the_unbiased_one(numbers):
    assert stats.pass_at_k_bootstrap_closed(*numbers) <= stats.pass_at_k(*numbers) + 1e-12


@pytest.mark.parametrize(
    ("answers", "correct", "expected"),
    [
        (["7", "7", "8"], [True, True, False], 1.0),
        (["8", "8", "7"], [False, False, True], 0.0),
        (["7", "8"], [True, False], 0.5),
        ([None, None, "7"], [False, False, True], 0.0),
        ([None, "7"], [False, True], 0.5),
        ([None, None], [True, True], 0.0),
        (["7", "8", "9"], [True, False, False], 1 / 3),
    ],
)
def test_the_commonest_answer_decides(answers, correct, expected):
    assert stats.maj_at_k(answers, correct) == pytest.approx(expected)


def test_the_interval_resamples_problems_and_not_samples():
    values = np.repeat([0.0, 1.0], 50)
    low, high = stats.interval(values)
    assert low == pytest.approx(0.5 - 1.96 * 0.05, abs=0.015)
    assert high == pytest.approx(0.5 + 1.96 * 0.05, abs=0.015)


def test_the_interval_of_the_same_rows_is_the_same():
    values = np.random.default_rng(1).random(30)
    assert stats.interval(values) == stats.interval(values)


def test_the_interval_of_nothing_right_is_not_empty():
    low, high = stats.interval(np.zeros(100))
    assert (low, round(high, 3)) == (0.0, 0.036)


def test_one_problem_has_no_interval():
    assert stats.interval(np.array([0.5])) == (None, None)


def test_the_summary_weighs_problems_equally_and_splits_domains():
    rows = (
        rows_of("a", [True, False]) + rows_of("b", [True, True]) + rows_of("c", [False] * 4, "code")
    )
    found = stats.summarize(rows, k=2)["domains"]
    averages = {name: domain["avg_at_k"]["value"] for name, domain in found.items()}
    assert averages == {"all": 0.5, "code": 0.0, "math": 0.75}
    assert [found[name]["pass_at_k"]["value"] for name in ("math", "code")] == [1.0, 0.0]
    assert (found["all"]["problems"], found["all"]["samples"]) == (3, 8)


def test_the_summary_takes_the_vote_of_the_first_k_samples_by_number():
    rows = rows_of("a", [True, True, False, False, False])[::-1]
    assert stats.summarize(rows, k=3)["domains"]["all"]["maj_at_k"]["value"] == 1.0


def test_the_call_share_counts_trajectories_with_a_call():
    rows = rows_of("a", [True, True], calls=3) + rows_of("b", [True, True], calls=0)
    found = stats.summarize(rows, k=2)["domains"]["all"]
    assert (found["call_share"]["value"], found["calls"]) == (0.5, 1.5)


def test_a_problem_with_too_few_samples_is_refused_by_name():
    rows = rows_of("a", [True, True]) + rows_of("b", [True])
    with pytest.raises(ValueError, match="problem b has 1 samples"):
        stats.summarize(rows, k=2)


def test_a_sample_given_twice_is_refused():
    rows = rows_of("a", [True, True])
    with pytest.raises(ValueError, match="has a sample twice"):
        stats.summarize([*rows, rows[0]], k=2)


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="no rows"):
        stats.summarize([], k=2)
