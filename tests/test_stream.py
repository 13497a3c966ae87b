"""The order of problems: what it uses, and that resuming never changes it."""

import json
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demyrl.data import stream as stream_module
from demyrl.data.stream import ProblemStream, RowStream
from demyrl.types import Problem


def problems_of(count, answer="1"):
    return [Problem(f"p{i}", "made", "math", f"{i}?", answer, "number") for i in range(count)]


def numpy_shuffler(count, seed):
    """Any permutation per epoch, at a cost that does not grow as the count shrinks."""
    return lambda epoch: np.random.default_rng([seed, epoch]).permutation(count)


def steps_of(stream, count):
    return [stream.next().tolist() for _ in range(count)]


@pytest.mark.parametrize("done", [1, 59, 60, 61])
def test_resuming_around_an_epochs_end_repeats_the_uninterrupted_order(done):
    whole = steps_of(RowStream(240, 4, seed=7), 125)
    first = RowStream(240, 4, seed=7)
    steps_of(first, done)
    resumed = RowStream(240, 4, seed=7)
    resumed.restore(json.loads(json.dumps(first.state())))
    assert steps_of(resumed, 125 - done) == whole[done:]


def test_resuming_twice_within_an_epoch_repeats_the_uninterrupted_order():
    whole = steps_of(RowStream(60, 4, seed=1), 15)
    stream = RowStream(60, 4, seed=1)
    got = []
    for steps in (3, 5, 7):
        again = RowStream(60, 4, seed=1)
        again.restore(stream.state())
        stream = again
        got += steps_of(stream, steps)
    assert got == whole


@mock.patch.object(stream_module, "_shuffler", numpy_shuffler)
@given(st.integers(1, 24), st.integers(1, 24), st.integers(0, 3), st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_any_stream_resumes_exactly_at_any_step(count, per_step, seed, done):
    per_step = min(count, per_step)
    whole = steps_of(RowStream(count, per_step, seed), done + 6)
    resumed = RowStream(count, per_step, seed)
    position = done * per_step
    resumed.restore({"position": position, "count": count, "per_step": per_step, "seed": seed})
    assert steps_of(resumed, 6) == whole[done:]


@mock.patch.object(stream_module, "_shuffler", numpy_shuffler)
@given(st.integers(1, 24), st.integers(1, 24), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_each_row_is_used_exactly_once_in_each_epoch(count, per_step, seed):
    per_step = min(count, per_step)
    steps = steps_of(RowStream(count, per_step, seed), -(-5 * count // per_step))
    rows = [row for step in steps for row in step]
    for epoch in range(5):
        assert sorted(rows[epoch * count : (epoch + 1) * count]) == list(range(count))


@mock.patch.object(stream_module, "_shuffler", numpy_shuffler)
@given(st.integers(1, 24), st.integers(1, 24), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_no_row_stands_twice_in_a_step(count, per_step, seed):
    per_step = min(count, per_step)
    for step in steps_of(RowStream(count, per_step, seed), 40):
        assert len(set(step)) == per_step


def test_each_epoch_has_its_own_order():
    steps = steps_of(RowStream(50, 50, seed=0), 2)
    assert steps[0] != steps[1]


def test_the_second_epoch_of_a_seed_is_not_the_first_of_the_next_seed():
    second = steps_of(RowStream(50, 50, seed=0), 2)[1]
    assert second != steps_of(RowStream(50, 50, seed=1), 1)[0]


def test_more_rows_in_a_step_than_there_are_is_refused():
    with pytest.raises(ValueError, match="takes 5 different rows, but there are 4"):
        RowStream(4, 5, seed=0)


def test_fewer_problems_than_a_step_takes_is_refused():
    with pytest.raises(ValueError, match="takes 8 different problems, but there are 3"):
        ProblemStream(problems_of(3), 8, seed=0)


def test_problems_come_in_the_order_of_the_rows():
    stream = ProblemStream(problems_of(12), 5, seed=2)
    rows = RowStream(12, 5, seed=2)
    for _ in range(6):
        assert [problem.id for problem in stream.next()] == [f"p{row}" for row in rows.next()]


def test_a_problem_stream_resumes_from_its_json_state():
    whole = ProblemStream(problems_of(12), 5, seed=2)
    whole.next()
    resumed = ProblemStream(problems_of(12), 5, seed=2)
    resumed.restore(json.loads(json.dumps(whole.state())))
    assert resumed.next() == whole.next()


def test_a_state_of_other_problems_is_refused():
    state = ProblemStream(problems_of(12), 4, seed=0).state()
    with pytest.raises(ValueError, match="problems, or their order, have changed"):
        ProblemStream(problems_of(12, answer="2"), 4, seed=0).restore(state)


def test_a_state_of_another_seed_is_refused():
    state = RowStream(12, 4, seed=0).state()
    with pytest.raises(ValueError, match="seed 0, this run has seed 1"):
        RowStream(12, 4, seed=1).restore(state)
