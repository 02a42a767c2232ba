"""Which rows make up a batch: fixed numbers of rows, a budget of tokens, or batches of balanced cost."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gem_data.feed.balance import CostModel, EqualCost, Floats, bbs, lpt, spread
from gem_data.feed.part import Part

log = logging.getLogger("gem_data.feed")

Ints = NDArray[np.int64]
Balance = Literal["none", "bbs", "lpt", "cost"]


@dataclass(frozen=True, slots=True)
class Planned:
    """A batch to be: parts and the rows of each, and the rows of its step over all ranks (0 where other ranks' rows are not known)."""

    picked: tuple[tuple[Part, Ints], ...]
    global_rows: int


@dataclass(frozen=True, slots=True)
class Window:
    """A loaded window: its rows in the order of training, and the sizes of its batches here and over all ranks."""

    part: Part
    order: Ints
    sizes: tuple[int, ...]
    globals: tuple[int, ...]


def by_rows(windows: Iterator[Window], balance: Balance, cost: CostModel) -> Iterator[Planned]:
    """Batches of the sizes that the windows state, of balanced cost if asked for: no row leaves its window."""
    told = balance == "none"
    for window in windows:
        plain = np.split(window.order, np.cumsum(window.sizes)[:-1]) if window.sizes else []
        batches = plain if balance == "none" else _balanced(window, balance, cost)
        if not told and len(batches) > 1:
            told = True
            tell_mix(balance, _mixed(cost, [window.part]), plain, batches)
        for rows, together in zip(batches, window.globals, strict=True):
            yield Planned(((window.part, rows),), together)


def by_cost(windows: Iterator[Window], target: float, cost: CostModel, *, fill: bool) -> Iterator[Planned]:
    """Batches that cost ``target``; rows that a window has left wait for the next one."""
    cutter = EqualCost(target, fill=fill)
    parts: list[Part] = []
    told = False
    which, rows, costs = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
    coming: Window | None = next(windows, None)
    while coming is not None:
        part, order = coming.part, coming.order
        del coming  # only the parts that still have rows are kept while the next window is loaded
        parts.append(part)
        which = np.concatenate([which, np.full(order.size, len(parts) - 1)])
        rows = np.concatenate([rows, order])
        costs = np.concatenate([costs, cost.of(part.tokens, part.pairs)[order]])
        coming = next(windows, None)
        batches = cutter.cut(costs, last=coming is None)
        if fill and not told and len(batches) > 1:
            told = True
            flat = np.cumsum([0, *(part.rows for part in parts)])[which] + rows
            tell_mix("cost", _mixed(cost, parts), np.array_split(flat, len(batches)), [flat[batch] for batch in batches])
        for batch in batches:
            used = np.unique(which[batch])
            yield Planned(tuple((parts[p], rows[batch[which[batch] == p]]) for p in used.tolist()), 0)
        if batches:
            gone = np.concatenate(batches)
            which, rows, costs = np.delete(which, gone), np.delete(rows, gone), np.delete(costs, gone)
        kept, which = np.unique(which, return_inverse=True)
        parts = [parts[p] for p in kept.tolist()]


def _balanced(window: Window, balance: Balance, cost: CostModel) -> list[Ints]:
    costs = cost.of(window.part.tokens, window.part.pairs)[window.order]
    batch = (bbs if balance == "bbs" else lpt)(costs, window.sizes)
    return [window.order[batch == i] for i in range(len(window.sizes))]


def tell_mix(balance: str, columns: Mapping[str, Floats], plain: Sequence[Ints], batches: Sequence[Ints]) -> None:
    """Log what balancing does to the cost, the labels and the times of the first batches."""
    for name, values in columns.items():
        after, before = spread(values, batches), spread(values, plain)
        log.info("balance %s: spread of %s over the first %d batches %.4g, without balancing %.4g", balance, name, len(batches), after, before)


def mix_records(window: Window, cost: CostModel) -> list[dict[str, Any]]:
    """One record a quantity, with one figure for each way of balancing.

    Quantities are the slowest batch (its cost over the average, less 1), rows of a batch, and the spread over batches of the mean cost, label rates,
    numbers and time of their rows.
    """
    columns = _mixed(cost, [window.part])
    ways: dict[str, list[Ints]] = {"none": np.split(window.order, np.cumsum(window.sizes)[:-1])}
    ways |= {"bbs": _balanced(window, "bbs", cost), "lpt": _balanced(window, "lpt", cost)}
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
        columns |= {f"label {name}": c.astype(np.float64) for (role, name), c in part.scalars.items() if role == "label"}
        columns |= {name: c[:, 0].astype(np.float64) for (role, name), c in part.scalars.items() if role == "dense"}
        if ("row", "time") in part.scalars:
            columns["time (s)"] = part.scalars["row", "time"].astype(np.float64)
        return columns

    each = [of(part) for part in parts]
    return {name: np.concatenate([columns[name] for columns in each]) for name in each[0]}
