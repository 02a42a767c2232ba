"""Reading ahead: units are read and decoded, and batches gathered, in threads; batches come out in the order in which they were planned.

Threads, not processes: decoding (Arrow) and gathering (torch) release the interpreter lock, and batches need not be sent from one process to another.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")


def ahead(jobs: Iterator[Callable[[], T]], pool: ThreadPoolExecutor | None, depth: int) -> Iterator[T]:
    """The results of ``jobs`` in their order, up to ``depth`` of them begun before they are asked for; without a pool one by one.

    An exception of a job is raised in its place.
    """
    if pool is None:
        for job in jobs:
            yield job()
        return
    waiting: deque[Future[T]] = deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(job))
            if len(waiting) > depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
