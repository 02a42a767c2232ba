"""What was known before a row: the events of one key (a user, an item) with an earlier time, and running statistics over them."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class PastIndex:
    """Events sorted by (key, time, order of arrival), asked for the part of a key's events that comes before a time.

    Args:
        keys: ``[events]`` int64, 0 or more.
        times: ``[events]``, any ordered number; equal times keep the order of arrival.
    """

    def __init__(self, keys: Ints, times: NDArray[np.generic]) -> None:
        self.order: Ints = np.lexsort((times, keys))
        self._stamps, rank = np.unique(times, return_inverse=True)
        self._codes = self._code(keys, rank)[self.order]

    def _code(self, keys: Ints, rank: Ints) -> Ints:
        codes: Ints = keys.astype(np.int64) * (self._stamps.size + 1) + rank
        return codes

    def before(self, keys: Ints, times: NDArray[np.generic]) -> tuple[Ints, Ints]:
        """For each query ``(begin, end)`` in sorted order: all events of the key, and of them those with a strictly earlier time."""
        end = np.searchsorted(self._codes, self._code(keys, np.searchsorted(self._stamps, times)))
        return self.first(keys), end

    def first(self, keys: Ints) -> Ints:
        """Where each key's events begin in sorted order."""
        return np.searchsorted(self._codes, self._code(keys, np.zeros_like(keys)))

    def positions(self) -> Ints:
        """``[events]``: the place of each event in sorted order."""
        places = np.empty(self.order.size, np.int64)
        places[self.order] = np.arange(self.order.size)
        return places


class RunningSum:
    """Sums of ``values`` ``[events, ...]`` over any part ``begin:end`` of the sorted order, in constant time each."""

    def __init__(self, index: PastIndex, values: Floats) -> None:
        self._prefix = np.concatenate([np.zeros((1, *values.shape[1:])), np.cumsum(values[index.order], axis=0)])

    def over(self, begin: Ints, end: Ints) -> Floats:
        return np.asarray(self._prefix[end] - self._prefix[begin])

    def shrunk_mean(self, begin: Ints, end: Ints, strength: float) -> Floats:
        """The mean pulled towards 0 as if ``strength`` more events had the value 0; 0 where there is no event."""
        counts = (end - begin).astype(np.float64).reshape(-1, *(1,) * (self._prefix.ndim - 1))
        return np.asarray(self.over(begin, end) / (counts + strength))
