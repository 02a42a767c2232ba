"""The order of an epoch and the share of each rank.

The units, shuffled by the seed, form one line of rows. The line is cut into stripes of some whole global batches, and each stripe into one slice a
rank, as large as the rank's shares of those batches. So each rank reads its own units (it shares at most the two at the ends of a slice with a
neighbour), ranks differ by no more than their shares do, every rank sees the same number of batches, and rows in file order stay so up to a stripe.
A slice is the window in which rows are shuffled.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gem_core.spec import RequestError, Shard
from gem_data.feed.cursor import Trained
from gem_data.feed.units import Unit
from gem_data.ids.hashing import GAMMA, mix

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows ``rows`` (ascending, within the unit) of a unit."""

    unit: int
    rows: Ints


@dataclass(frozen=True, slots=True)
class Slice:
    """One rank's window: its pieces, the sizes ``[batches]`` of its shares of the global batches, and the rows of those over all ranks."""

    pieces: tuple[Piece, ...]
    sizes: tuple[int, ...]
    globals: tuple[int, ...]


def check_request(batch_size: int, shard: Shard, numbers: Mapping[str, int]) -> None:
    """Raise RequestError for a batch without rows, a rank that does not exist or a negative number."""
    if batch_size < 1:
        raise RequestError("batches", f"batch_size is {batch_size}", "Give a batch of one row or more.")
    if not 0 <= shard.rank < shard.world:
        raise RequestError("batches", f"rank {shard.rank} of {shard.world}", "Give a rank from 0 to world - 1.")
    for name, value in numbers.items():
        if value < 0:
            raise RequestError("batches", f"{name} is {value}", "Give 0 or more.")


def unit_order(units: int, seed: int | None, epoch: int) -> Ints:
    """The units in the order of an epoch: shuffled by ``(seed, epoch)``, or as they stand."""
    return np.arange(units) if seed is None else np.random.default_rng([seed, epoch]).permutation(units)


def slices(units: Sequence[Unit], order: Ints, done: Trained, *, batch_size: int, shard: Shard, window: int) -> Iterator[Slice]:
    """The windows of one rank, in order: about ``window`` rows each, one batch at least.

    Args:
        order: the units in epoch order.
        done: rows to leave out.
    """
    left = np.array([units[u].rows - done.count(u) for u in order.tolist()], dtype=np.int64)
    ends = np.cumsum(left)
    total = int(ends[-1]) if left.size else 0
    batches = max(1, window * shard.world // batch_size)
    for begin in range(0, total, batches * batch_size):
        counts = tuple(min(batch_size, total - at) for at in range(begin, min(begin + batches * batch_size, total), batch_size))
        shares = np.array([[count * r // shard.world for r in range(shard.world + 1)] for count in (counts[0], counts[-1])])
        bounds = begin + (len(counts) - 1) * shares[0] + shares[1]
        own = [int(share[shard.rank + 1] - share[shard.rank]) for share in shares]
        pieces = _pieces(units, order, done, ends, left, int(bounds[shard.rank]), int(bounds[shard.rank + 1]))
        yield Slice(pieces, (*[own[0]] * (len(counts) - 1), own[1]), counts)


def _pieces(units: Sequence[Unit], order: Ints, done: Trained, ends: Ints, left: Ints, low: int, high: int) -> tuple[Piece, ...]:
    """The rows ``low:high`` of the line of rows that are left."""
    out = []
    for i in range(int(np.searchsorted(ends, low, "right")), int(np.searchsorted(ends, high, "left")) + 1):
        if low >= high or not left[i]:
            continue
        unit, start = int(order[i]), int(ends[i] - left[i])
        first, last = max(low - start, 0), min(high - start, int(left[i]))
        out.append(Piece(unit, done.left(unit, np.arange(units[unit].rows))[first:last]))
    return tuple(out)


def shuffle_keys(rows: Ints, seed: int, epoch: int) -> NDArray[np.uint64]:
    """A pseudo-random key for each row number: sorting rows by it orders any of them alike, whichever others are left out."""
    start = np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0]
    return mix(rows.astype(np.uint64) * GAMMA + start)
