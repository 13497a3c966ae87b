from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from demyrl.rollout import agent
from demyrl.rollout.agent import Visit, together
from demyrl.rollout.episode import Episode
from demyrl.rollout.sampler import Feed, feed_batches, merged
from demyrl.rollout.seating import Slot, Waiting, seat


def episodes(problems, samples):
    return [Episode(f"p{i}", j, [i, 9], None) for i in range(problems) for j in range(samples)]


def slots(shards, rows):
    return [Slot(row, row // rows) for row in range(shards * rows)]


def seated(places):
    """The problem in each row, None where it is free."""
    return [slot.episode and slot.episode.problem_id for slot in places]


def test_a_group_is_seated_in_one_shard_and_prefilled_once():
    places = slots(shards=2, rows=3)
    work = seat(places, Waiting(episodes(2, 3), 3))
    assert seated(places) == ["p0"] * 3 + ["p1"] * 3
    assert work.prefills == 2
    assert work.late == [(0, 1), (3, 4), (0, 2), (3, 5)]


def test_a_slot_that_would_stay_empty_gets_the_prompt_of_another_shard_again():
    places = slots(shards=2, rows=2)
    work = seat(places, Waiting(episodes(1, 3), 3))
    assert seated(places) == ["p0", "p0", "p0", None]
    assert [feed.row for feed in work.feeds] == [0, 2]


def test_samples_that_fit_in_their_shard_leave_the_other_one_empty():
    places = slots(shards=2, rows=2)
    work = seat(places, Waiting(episodes(1, 2), 2))
    assert seated(places) == ["p0", "p0", None, None] and work.prefills == 1


def test_a_prompt_that_is_in_the_shard_is_copied_before_its_row_is_overwritten():
    places, waiting = slots(shards=1, rows=2), Waiting(episodes(2, 3), 3)
    seat(places, waiting)
    places[0].episode = places[1].episode = None
    work = seat(places, waiting)
    assert seated(places) == ["p0", "p1"]
    assert (work.early, [feed.row for feed in work.feeds]) == ([], [1])
    places[0].episode = places[1].episode = None
    assert seat(places, waiting).early == [(1, 0)]


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 5), st.integers(1, 4), st.randoms())
@settings(max_examples=60, deadline=None)
def test_every_row_holds_the_prompt_of_its_episode(shards, rows, problems, samples, random):
    """Whatever is free when: copies and feeds, in their order, put each prompt where it is used."""
    places, waiting = slots(shards, rows), Waiting(episodes(problems, samples), samples)
    held, count = [None] * len(places), 0
    while waiting.count or any(slot.episode for slot in places):
        work = seat(places, waiting)
        for source, target in work.early:
            held[target] = held[source]
        for feed in work.feeds:
            held[feed.row] = feed.tokens[0]
        for source, target in work.late:
            held[target] = held[source]
        assert waiting.count == 0 or all(slot.episode for slot in places)
        busy = [slot for slot in places if slot.episode]
        assert all(f"p{held[slot.row]}" == slot.episode.problem_id for slot in busy)
        for slot in random.sample(busy, random.randint(1, len(busy))):
            slot.episode, count = None, count + 1
    assert count == problems * samples


@given(st.lists(st.integers(1, 40), max_size=9), st.integers(1, 4))
def test_the_chunks_of_a_row_come_in_order_and_the_longest_first(lengths, size):
    feeds = [Feed(row, 3, list(range(n))) for row, n in enumerate(lengths)]
    batches = feed_batches(feeds, (4, 16), size)
    got = {feed.row: [] for feed in feeds}
    for batch in batches:
        assert len(batch) <= size and len({feed.row for feed in batch}) == len(batch)
        for feed in batch:
            assert feed.start == 3 + len(got[feed.row])
            got[feed.row] += feed.tokens
    assert got == {feed.row: feed.tokens for feed in feeds}
    most = [max(len(feed.tokens) for feed in batch) > 4 for batch in batches]
    assert most == sorted(most, reverse=True)


def test_rounds_are_as_many_and_as_long_as_any_needs():
    assert merged([[64, 16], [16, 16, 16], []]) == [64, 16, 16]


def test_processes_agree_on_a_visit(monkeypatch):
    other = np.array([0, 1, 3, 2, 5, 2, 0], np.int32)  # and two rounds of the short length
    monkeypatch.setattr(
        agent,
        "processes",
        SimpleNamespace(count=lambda: 2, exchange=lambda own: np.stack([own, other])),
    )
    visit = together(Visit(1, 0, 4, 0, 7, (64,)), (16, 64))
    assert visit == Visit(1, 1, 7, 2, 12, (64, 16))
