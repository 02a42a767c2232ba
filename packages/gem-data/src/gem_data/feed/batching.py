"""Which rows make up a batch: fixed numbers of rows, a budget of tokens, or batches of balanced cost."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from gem_data.feed.balance import CostModel, EqualCost, Floats, bbs, lpt_by_group, spread
from gem_data.feed.part import Ints, Part, Picked

log = logging.getLogger("gem_data.feed")

Balance = Literal["none", "bbs", "lpt", "cost"]


@dataclass(frozen=True, slots=True)
class Planned:
    """A batch to be: parts and the rows of each, and the rows of its step over all ranks (0 where other ranks' rows are not known)."""

    picked: Picked
    global_rows: int


@dataclass(frozen=True, slots=True)
class Window:
    """A loaded window.

    Args:
        parts: its units, one or more.
        order: its rows in the order of training, counted over all parts.
        sizes: rows of its batches here; ``globals`` over all ranks.
    """

    parts: tuple[Part, ...]
    order: Ints
    sizes: tuple[int, ...]
    globals: tuple[int, ...]

    def plain(self) -> list[Ints]:
        """The batches as they come."""
        return np.split(self.order, np.cumsum(self.sizes)[:-1]) if self.sizes else []

    def balanced(self, balance: Balance, cost: CostModel) -> list[Ints]:
        """The batches with their rows exchanged so that they cost about the same."""
        costs = costs_of(self.parts, cost)[self.order]
        batch = bbs(costs, self.sizes) if balance == "bbs" else lpt_by_group(costs, _lengths_of(self.parts)[self.order], self.sizes)
        return [self.order[batch == i] for i in range(len(self.sizes))]


def costs_of(parts: Sequence[Part], cost: CostModel) -> Floats:
    """``[rows]`` of all parts."""
    return np.concatenate([cost.of(part.tokens, part.pairs) for part in parts])


def _lengths_of(parts: Sequence[Part]) -> Ints:
    """``[rows, lists]`` of all parts: events of each history, ids of each multi-valued id."""
    return np.concatenate(
        [np.array([group.length for group in part.lists.values()], np.int64).reshape(len(part.lists), part.rows).T for part in parts]
    )


def pick(parts: Sequence[Part], rows: Ints) -> Picked:
    """``rows``, counted over all parts, as the rows of each part; a batch without rows names a part all the same, for its columns."""
    starts = np.cumsum([0, *(part.rows for part in parts)])
    which = np.searchsorted(starts, rows, "right") - 1
    used = np.unique(which).tolist() or [0]
    return tuple((parts[p], rows[which == p] - starts[p]) for p in used)


def by_rows(windows: Iterator[Window], balance: Balance, cost: CostModel) -> Iterator[Planned]:
    """Batches of the sizes that the windows state, of balanced cost if asked for: no row leaves its window."""
    told = balance == "none"
    for window in windows:
        batches = window.plain() if balance == "none" else window.balanced(balance, cost)
        if not told and len(batches) > 1:
            told = True
            tell_mix(balance, _mixed(cost, window.parts), window.plain(), batches)
        for rows, together in zip(batches, window.globals, strict=True):
            yield Planned(pick(window.parts, rows), together)


def by_cost(windows: Iterator[Window], target: float, cost: CostModel, *, fill: bool) -> Iterator[Planned]:
    """Batches that cost ``target``; rows that a window has left wait for the next one."""
    cutter, told = EqualCost(target, fill=fill), not fill
    parts: tuple[Part, ...] = ()
    rows = np.zeros(0, np.int64)
    coming: Window | None = next(windows, None)
    while coming is not None:
        rows = np.concatenate([rows, coming.order + sum(part.rows for part in parts)])
        parts += coming.parts
        del coming  # only the parts that still have rows are kept while the next window is loaded
        coming = next(windows, None)
        batches = [rows[batch] for batch in cutter.cut(costs_of(parts, cost)[rows], last=coming is None)]
        if not told and len(batches) > 1:
            told = True
            tell_mix("cost", _mixed(cost, parts), np.array_split(rows, len(batches)), batches)
        for batch in batches:
            yield Planned(pick(parts, batch), 0)
        if batches:
            rows = rows[~np.isin(rows, np.concatenate(batches))]
        parts, rows = _still_needed(parts, rows)


def _still_needed(parts: Sequence[Part], rows: Ints) -> tuple[tuple[Part, ...], Ints]:
    """The parts that have some of the rows, and the rows counted over those."""
    starts = np.cumsum([0, *(part.rows for part in parts)])
    which = np.searchsorted(starts, rows, "right") - 1
    kept, place = np.unique(which, return_inverse=True)
    left = tuple(parts[p] for p in kept.tolist())
    return left, rows - starts[which] + np.cumsum([0, *(part.rows for part in left)])[place]


def tell_mix(balance: str, columns: Mapping[str, Floats], plain: Sequence[Ints], batches: Sequence[Ints]) -> None:
    """Log what balancing does to the cost, the histories, the labels and the times of the first batches."""
    for name, values in columns.items():
        after, before = spread(values, batches), spread(values, plain)
        log.info("balance %s: spread of %s over the first %d batches %.4g, without balancing %.4g", balance, name, len(batches), after, before)


def mix_records(window: Window, cost: CostModel) -> list[dict[str, Any]]:
    """One record a quantity, with one figure for each way of balancing.

    Quantities are the slowest batch (its cost over the average, less 1), rows of a batch, and the spread over batches of the mean cost, entries of
    histories and of multi-valued ids, label rates, numbers and time of their rows.
    """
    columns = _mixed(cost, window.parts)
    ways: dict[str, list[Ints]] = {"none": window.plain(), "bbs": window.balanced("bbs", cost), "lpt": window.balanced("lpt", cost)}
    target = float(columns["cost"].sum()) / len(window.sizes)
    ways["cost"] = [window.order[rows] for rows in EqualCost(target, fill=True).cut(columns["cost"][window.order], last=True)]
    costs = {way: np.array([columns["cost"][rows].sum() for rows in batches]) for way, batches in ways.items()}
    records: list[dict[str, Any]] = [
        {"what": "batches", **{way: len(batches) for way, batches in ways.items()}},
        {"what": "slowest over average - 1", **{way: float(c.max() / c.mean() - 1) for way, c in costs.items()}},
        {"what": "spread of rows", **{way: float(np.std([rows.size for rows in batches])) for way, batches in ways.items()}},
    ]
    return records + [
        {"what": f"spread of {what}", **{way: spread(values, batches) for way, batches in ways.items()}} for what, values in columns.items()
    ]


def _mixed(cost: CostModel, parts: Sequence[Part]) -> dict[str, Floats]:
    """What the mix of batches is told by, ``[rows]`` each, part after part."""

    def of(part: Part) -> dict[str, Floats]:
        columns: dict[str, Floats] = {"cost": cost.of(part.tokens, part.pairs)}
        columns |= {f"entries of {name}": group.length.astype(np.float64) for name, group in part.lists.items()}
        columns |= {f"label {name}": c.astype(np.float64) for (role, name), c in part.scalars.items() if role == "label"}
        columns |= {name: c[:, 0].astype(np.float64) for (role, name), c in part.scalars.items() if role == "dense"}
        if ("row", "time") in part.scalars:
            columns["time (s)"] = part.scalars["row", "time"].astype(np.float64)
        return columns

    each = [of(part) for part in parts]
    return {name: np.concatenate([columns[name] for columns in each]) for name in each[0]}
