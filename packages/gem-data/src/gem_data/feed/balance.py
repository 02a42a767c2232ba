"""Balance of cost between batches: the cost of a row, ways to share out a window's rows, and what a way does to the mix of labels and times.

A row with histories of lengths ``L`` costs ``a * sum L + b * sum L^2 + c``: linear layers and look-ups, full attention, and the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gem_core.spec import RequestError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

SUB_BATCH = 128
"""Rows of the sub-batches that BBS moves as one."""
LOOK = 64
"""Rows after the last fitting one among which an equal-cost batch looks for some that fill its gap."""
EVEN = 3e-4
"""Batches are even whose loads are this near to the average, as a share of it."""
TURNS = 8
"""Exchanges of a batch, at most, for the sake of each load."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """``a * tokens + b * pairs + c`` of a row; by default its tokens."""

    a: float = 1.0
    b: float = 0.0
    c: float = 0.0

    def __post_init__(self) -> None:
        if min(self.a, self.b, self.c) < 0 or not 0 < self.a + self.b + self.c < float("inf"):
            raise RequestError("cost model", f"a, b, c are {self.a}, {self.b}, {self.c}", "Give finite numbers of 0 or more, one of them above 0.")

    def of(self, tokens: Ints, pairs: Ints) -> Floats:
        """``[rows]``."""
        return self.a * tokens + self.b * pairs + self.c

    @classmethod
    def fit(cls, tokens: Ints, pairs: Ints, rows: Ints, seconds: Floats) -> "CostModel":
        """The model that fits measured steps best (least squares; a term that would be negative is left out), in seconds.

        Args:
            tokens: ``[steps]``, as pairs, rows and seconds: sums over the rows of the step.

        Raises:
            RequestError: fewer than 4 steps, or steps that do not tell the terms apart.
        """
        terms = np.stack([tokens, pairs, rows], axis=1).astype(np.float64)
        scale = terms.max(axis=0, initial=0.0)
        if len(seconds) < 4 or not bool((scale > 0).all()):
            raise RequestError("fitting a cost model", f"{len(seconds)} steps with largest terms {scale.tolist()}", "Measure 4 steps or more.")
        kept = [0, 1, 2]
        while True:
            found, _, rank, _ = np.linalg.lstsq(terms[:, kept] / scale[kept], seconds, rcond=None)
            if rank < len(kept):
                so = "tokens, pairs and rows of the steps move together"
                raise RequestError("fitting a cost model", so, "Measure steps of different numbers of rows and different lengths.")
            if found.min() >= 0 or len(kept) == 1:
                break
            kept.pop(int(found.argmin()))
        abc = np.zeros(3)
        abc[kept] = found / scale[kept]
        return cls(*abc.tolist())


def lpt(cost: Floats, sizes: Sequence[int]) -> Ints:
    """Batches of given sizes and nearly equal cost: heaviest rows first, each round one row a batch, the heaviest to the lightest batch.

    Longest processing time first (Graham 1969) under the constraint that batch ``i`` gets ``sizes[i]`` rows.

    Args:
        cost: ``[..., rows]``; leading axes are independent windows.
        sizes: rows of each batch; they add up to ``rows``.

    Returns:
        ``[..., rows]``: the batch of each row.
    """
    order = np.argsort(-cost, axis=-1, kind="stable")
    heavy_first = np.take_along_axis(cost, order, -1)
    wanted, load = np.asarray(sizes), np.zeros((*cost.shape[:-1], len(sizes)))
    batch = np.empty_like(order)
    at = 0
    for turn in range(max(sizes, default=0)):
        open_batches = np.flatnonzero(wanted > turn)
        lightest = open_batches[np.argsort(load[..., open_batches], axis=-1, kind="stable")]
        taken = slice(at, at + open_batches.size)
        batch[..., taken] = lightest
        np.put_along_axis(load, lightest, np.take_along_axis(load, lightest, -1) + heavy_first[..., taken], -1)
        at += open_batches.size
    out = np.empty_like(batch)
    np.put_along_axis(out, order, batch, -1)
    return out


def lpt_by_group(cost: Floats, events: Ints, sizes: Sequence[int]) -> Ints:
    """As ``lpt``, and as even in the events of each group of histories as the rows allow without batches of less even cost.

    Two batches exchange the rows of one place in their order of cost, which cost about the same: the exchange that brings their loads (cost and
    events, as shares of the averages) nearest to each other by the sum of squares, unless it would part their costs, by more than ``EVEN``. All
    batches do so in pairs, the one with the most of a load with the one with the least and so on inwards, for each load in turn.

    Costs that are whole numbers are dealt out alike by all machines, as ranks do that share out the same rows: nothing depends on an order of sums.

    Args:
        cost: ``[rows]``.
        events: ``[rows, groups]``.
        sizes: rows of each batch; they add up to ``rows``.

    Returns:
        ``[rows]``: the batch of each row.
    """
    batch = lpt(cost, sizes)
    loads = [each * (len(sizes) / each.sum()) for each in (cost, *events.T) if each.any()]
    if len(sizes) < 2 or not loads:
        return batch
    row = _by_cost(batch, cost, sizes)
    there = row >= 0
    load: Floats = np.stack([np.bincount(batch, each, len(sizes)) for each in loads])
    part = np.stack(loads)[:, row]
    for turn in range(TURNS * len(loads)):
        if bool((np.abs(load - 1.0) <= EVEN).all()):
            break
        order = np.argsort(load[turn % len(loads)], kind="stable")
        low, high = order[: len(sizes) // 2], order[::-1][: len(sizes) // 2]
        place, gains = _best_exchange(load[:, high] - load[:, low], part[:, high] - part[:, low], there[high] & there[low])
        place, low, high = place[gains], low[gains], high[gains]
        moved = part[:, high, place] - part[:, low, place]
        load[:, high] -= moved
        load[:, low] += moved
        part[:, high, place], part[:, low, place] = part[:, low, place], part[:, high, place]
        row[high, place], row[low, place] = row[low, place], row[high, place]
    batch[row[there]] = np.nonzero(there)[0]
    return batch


def _by_cost(batch: Ints, cost: Floats, sizes: Sequence[int]) -> Ints:
    """``[batches, places]``: the rows of each batch, the costliest first, and -1 after the last of them."""
    taken = np.arange(max(sizes)) < np.asarray(sizes)[:, None]
    row = np.full(taken.shape, -1)
    row[taken] = np.lexsort((-cost, batch))
    return row


def _best_exchange(gap: Floats, step: Floats, both: NDArray[np.bool_]) -> tuple[Ints, NDArray[np.bool_]]:
    """For pairs of batches, the place whose rows they best exchange, and whether that gains anything.

    Args:
        gap: ``[loads, pairs]`` how much more the first of a pair has; cost comes first.
        step: ``[loads, pairs, places]`` the same of its row of a place.
        both: ``[pairs, places]`` whether both have such a row.
    """
    # an exchange of rows that differ by x turns a gap g into g - 2 x, whose square is less by 4 x (g - x)
    gain = sum(x * (g[:, None] - x) for g, x in zip(gap, step, strict=True))
    cost = gap[0][:, None]
    gain = np.where(both & (np.abs(cost - 2 * step[0]) <= np.maximum(np.abs(cost), EVEN)), gain, 0.0)
    best = gain.argmax(-1)
    return best, gain[np.arange(best.size), best] > 0


def bbs(cost: Floats, sizes: Sequence[int], sub_batch: int = SUB_BATCH) -> Ints:
    """Balanced batch sampling: sub-batches of neighbouring rows are sorted by cost and dealt to the batches there and back, heavy with light.

    Batches of any sizes but the first one's (a short last batch), and the rows that fill no sub-batch, keep their places.

    Args:
        cost: ``[..., rows]``; leading axes are independent windows.
        sizes: rows of each batch; they add up to ``rows``.

    Returns:
        ``[..., rows]``: the batch of each row.
    """
    batch = np.broadcast_to(np.repeat(np.arange(len(sizes)), sizes), cost.shape).copy()
    alike = [i for i, size in enumerate(sizes) if size == sizes[0]] if sizes and sizes[0] else []
    if len(alike) < 2 or alike[-1] != len(alike) - 1:
        return batch
    pieces = -(-sizes[0] // sub_batch)
    rows = sizes[0] // pieces
    # Rows by batch, then cut into pieces; what does not fill a piece stays where it is.
    place = (np.arange(len(alike))[:, None] * sizes[0] + np.arange(pieces * rows)).reshape(-1, rows)
    total = cost[..., place].sum(-1)
    rank = np.argsort(np.argsort(-total, axis=-1, kind="stable"), axis=-1, kind="stable")
    turn, step = np.divmod(rank, len(alike))
    dealt = np.where(turn % 2 == 0, step, len(alike) - 1 - step)
    batch[..., place] = dealt[..., None]
    return batch


class EqualCost:
    """Batches of any number of rows that cost ``target`` each. What a batch misses or exceeds is made up by the next one.

    Args:
        target: cost of a batch.
        fill: whether rows further on may fill the gap that the next row leaves; without it rows keep their order and batches stay at or below target.
    """

    def __init__(self, target: float, *, fill: bool) -> None:
        self.target, self.fill = target, fill
        self._owed = 0.0

    def cut(self, cost: Floats, *, last: bool) -> list[Ints]:
        """The batches that ``cost`` ``[rows]`` is enough for, each as its rows; with ``last``, all rows. The others wait for the next call."""
        left, out = np.arange(cost.size), []
        while left.size:
            running = np.cumsum(cost[left])
            aim = self.target + max(self._owed, -self.target / 2)
            if running[-1] < aim and not last:
                break
            count = max(1, int(np.searchsorted(running, aim, "right")))
            chosen = np.arange(count)
            gap = aim - float(running[count - 1])
            if self.fill:
                more, gap = _filling(cost[left[count : count + LOOK]], gap)
                chosen = np.concatenate([chosen, count + more])
                self._owed = gap
            out.append(left[chosen])
            left = np.delete(left, chosen)
        return out


def _filling(cost: Floats, gap: float) -> tuple[Ints, float]:
    """The entries that fit into a gap, taken in order, and the gap that stays."""
    taken = []
    for i, value in enumerate(cost.tolist()):
        if value <= gap:
            taken.append(i)
            gap -= value
    return np.array(taken, dtype=np.int64), gap


def imbalance(cost: Floats) -> float:
    """``max / mean - 1`` of ranks' costs ``[..., ranks]``, averaged over the leading axes (steps)."""
    return float((cost.max(-1) / cost.mean(-1) - 1).mean())


def spread(values: Floats, batches: Sequence[Ints]) -> float:
    """Standard deviation over batches of the mean of ``values`` ``[rows]``: how far batches differ in their mix."""
    means = [values[rows].mean() for rows in batches if rows.size]
    return float(np.std(means)) if means else 0.0
