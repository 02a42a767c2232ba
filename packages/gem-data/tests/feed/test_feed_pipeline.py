"""Reading ahead: order, bounds, errors in their place."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from gem_data.feed.pipeline import ahead


def jobs(count: int, begun: list[int], fail: int = -1) -> Iterator[Callable[[], int]]:
    def job(i: int) -> Callable[[], int]:
        def run() -> int:
            begun.append(i)
            time.sleep(0.002 * (i % 3))
            if i == fail:
                raise ValueError(f"job {i}")
            return i

        return run

    return (job(i) for i in range(count))


@pytest.mark.parametrize(("threads", "depth"), [(0, 0), (1, 1), (3, 1), (3, 7)])
def test_results_come_in_the_order_of_the_jobs(threads: int, depth: int) -> None:
    if not threads:
        assert list(ahead(jobs(20, []), None, depth)) == list(range(20))
        return
    with ThreadPoolExecutor(threads) as pool:
        assert list(ahead(jobs(20, []), pool, depth)) == list(range(20))


def test_no_more_than_depth_jobs_are_begun_ahead() -> None:
    begun: list[int] = []
    with ThreadPoolExecutor(4) as pool:
        results = ahead(jobs(50, begun), pool, 3)
        assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
        time.sleep(0.05)
        assert len(begun) == 5 + 3
        results.close()
    assert len(begun) == 8


def test_jobs_that_wait_are_cancelled_when_nobody_wants_them() -> None:
    begun: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        results = ahead((lambda i=i: time.sleep(0.02) or begun.append(i) or i for i in range(9)), pool, 6)
        assert next(results) == 0
        results.close()
    assert len(begun) <= 3


def test_without_a_pool_nothing_is_begun_before_it_is_asked_for() -> None:
    begun: list[int] = []
    results = ahead(jobs(5, begun), None, 3)
    next(results)
    assert begun == [0]


def test_an_error_comes_in_its_place_and_ends_the_rest() -> None:
    begun: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        results = ahead(jobs(50, begun, fail=2), pool, 2)
        assert [next(results), next(results)] == [0, 1]
        with pytest.raises(ValueError, match="job 2"):
            next(results)
    assert len(begun) < 8


def test_jobs_run_in_the_pool() -> None:
    with ThreadPoolExecutor(2, thread_name_prefix="worker") as pool:
        names = set(ahead((lambda: threading.current_thread().name for _ in range(6)), pool, 2))
    assert all(name.startswith("worker") for name in names)
