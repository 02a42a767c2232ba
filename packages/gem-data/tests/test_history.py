"""Earlier events and running statistics against a loop over all pairs."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_data.history import PastIndex, RunningSum

EVENTS = st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 4)), min_size=1, max_size=12)
QUERIES = st.lists(st.tuples(st.integers(0, 5), st.integers(-4, 6)), min_size=1, max_size=8)


def arrays(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    keys, times = (np.asarray(column, dtype=np.int64) for column in zip(*pairs, strict=True))
    return keys, times


@settings(max_examples=50, deadline=None, derandomize=True)
@given(events=EVENTS, queries=QUERIES)
def test_only_strictly_earlier_events_of_the_key_count(events: list[tuple[int, int]], queries: list[tuple[int, int]]) -> None:
    index = PastIndex(*arrays(events))
    begin, end = index.before(*arrays(queries))
    for query, (key, time) in enumerate(queries):
        found = sorted(index.order[begin[query] : end[query]].tolist())
        assert found == [place for place, (k, t) in enumerate(events) if k == key and t < time]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(events=EVENTS)
def test_equal_times_keep_the_order_of_arrival(events: list[tuple[int, int]]) -> None:
    index = PastIndex(*arrays(events))
    assert index.order.tolist() == sorted(range(len(events)), key=lambda place: (*events[place], place))
    assert [index.order[place] for place in index.positions()] == list(range(len(events)))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(events=EVENTS, queries=QUERIES, strength=st.floats(0.5, 9))
def test_running_means_are_means_of_the_part(events: list[tuple[int, int]], queries: list[tuple[int, int]], strength: float) -> None:
    values = np.linspace(-1, 2, len(events))
    index = PastIndex(*arrays(events))
    begin, end = index.before(*arrays(queries))
    means = RunningSum(index, values).shrunk_mean(begin, end, strength)
    for query, (key, time) in enumerate(queries):
        part = [values[place] for place, (k, t) in enumerate(events) if k == key and t < time]
        np.testing.assert_allclose(means[query], sum(part) / (len(part) + strength), atol=1e-12)


def test_sums_of_vectors_are_taken_by_column() -> None:
    index = PastIndex(np.zeros(3, np.int64), np.array([3, 1, 2]))
    begin, end = index.before(np.array([0]), np.array([3]))
    sums = RunningSum(index, np.array([[100.0, 1.0], [10.0, 2.0], [1.0, 4.0]])).over(begin, end)
    assert sums.tolist() == [[11.0, 6.0]]
    assert RunningSum(index, np.ones((3, 2))).shrunk_mean(begin, end, 2.0).tolist() == [[0.5, 0.5]]


def test_large_keys_and_times_do_not_wrap() -> None:
    keys = np.array([2**40, 2**40, 3], dtype=np.int64)
    index = PastIndex(keys, np.array([2**50, 2**50 + 1, 5], dtype=np.int64))
    begin, end = index.before(np.array([2**40]), np.array([2**50 + 1]))
    assert index.order[begin[0] : end[0]].tolist() == [0]


def test_times_may_be_fractions() -> None:
    index = PastIndex(np.zeros(2, np.int64), np.array([0.5, 0.25]))
    begin, end = index.before(np.array([0]), np.array([0.5]))
    assert index.order[begin[0] : end[0]].tolist() == [1]
