"""What balancing achieves on so many ranks: costs of rows drawn from a law, each rank balancing its own window, the slowest rank against the mean."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gem_core.spec import RequestError
from gem_data.feed.balance import EqualCost, Floats, bbs, imbalance, lpt

AT_ONCE = 128
"""Ranks whose rows are held at a time."""
METHODS = ("none", "bbs", "lpt", "cost")


def _uniform(draw: np.random.Generator, shape: tuple[int, int]) -> Floats:
    return draw.uniform(0.0, 2.0, shape)


def _lognormal(draw: np.random.Generator, shape: tuple[int, int]) -> Floats:
    return draw.lognormal(0.0, np.sqrt(np.log1p(1.45**2)), shape)


def _pareto(draw: np.random.Generator, shape: tuple[int, int]) -> Floats:
    return 1.0 + draw.pareto(1.0 + np.sqrt(1.0 + 1.8**-2), shape)  # CV^2 = 1 / (a (a - 2))


LAWS: dict[str, Callable[[np.random.Generator, tuple[int, int]], Floats]] = {
    "uniform, CV 0.58": _uniform,
    "lognormal, CV 1.45": _lognormal,
    "Pareto, CV 1.80": _pareto,
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the simulation.

    Args:
        law: of the cost of a row.
        ranks: that wait for the slowest at each step.
        method: none, bbs, lpt (fixed rows, within a window), or cost (equal cost, any number of rows).
        imbalance: max / mean - 1 over ranks, averaged over steps.
        rows_cv: coefficient of variation of the rows of a batch.
        steps: that were averaged.
    """

    law: str
    ranks: int
    method: str
    imbalance: float
    rows_cv: float
    steps: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def simulate(ranks: Sequence[int], *, rows: int = 1024, window: int = 8, seed: int = 0) -> Iterator[Figure]:
    """All laws, ranks and methods.

    Args:
        rows: of a rank's batch, on average.
        window: batches of the window in which a rank balances.

    Raises:
        RequestError: a number is below 1, or the window is below 2.
    """
    if min([*ranks, rows], default=0) < 1 or window < 2:
        raise RequestError("simulating balance", f"ranks {list(ranks)}, rows {rows}, window {window}", "Give 1 or more, a window of 2.")
    for law, draw in LAWS.items():
        for count in ranks:
            costs, sizes = _costs(draw, count, rows, window, np.random.default_rng(seed))
            for method in METHODS:
                spread = float(np.std(sizes[method]) / np.mean(sizes[method]))
                yield Figure(law, count, method, imbalance(costs[method]), spread, costs[method].shape[0])


def _costs(
    law: Callable[[np.random.Generator, tuple[int, int]], Floats], ranks: int, rows: int, window: int, draw: np.random.Generator
) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """``{method: [steps, ranks]}`` costs and rows of every batch."""
    target = float(law(np.random.default_rng(1), (1, 1 << 20)).mean()) * rows
    fixed = [rows] * window
    costs: dict[str, list[Floats]] = {method: [] for method in METHODS}
    counts: dict[str, list[Floats]] = {method: [] for method in METHODS}
    for begin in range(0, ranks, AT_ONCE):
        drawn = law(draw, (min(AT_ONCE, ranks - begin), rows * window))
        plain = np.broadcast_to(np.repeat(np.arange(window), rows), drawn.shape)
        for method, batch in (("none", plain), ("bbs", bbs(drawn, fixed)), ("lpt", lpt(drawn, fixed))):
            costs[method].append(_sums(drawn, batch, window))
            counts[method].append(np.full((len(drawn), window), float(rows)))
        for own in drawn:
            batches = EqualCost(target, fill=True).cut(own, last=False)
            costs["cost"].append(np.array([[own[b].sum() for b in batches]]))
            counts["cost"].append(np.array([[float(b.size) for b in batches]]))
    return {m: _steps(parts) for m, parts in costs.items()}, {m: _steps(parts) for m, parts in counts.items()}


def _sums(cost: Floats, batch: np.ndarray[Any, Any], batches: int) -> Floats:
    """``[ranks, batches]`` cost of each batch."""
    at = batch + np.arange(len(cost))[:, None] * batches
    sums: Floats = np.bincount(at.ravel(), cost.ravel(), minlength=len(cost) * batches).astype(np.float64)
    return sums.reshape(len(cost), batches)


def _steps(parts: Sequence[Floats]) -> Floats:
    """``[steps, ranks]`` of the steps that every rank takes."""
    shortest = min(part.shape[1] for part in parts)
    return np.concatenate([part[:, :shortest] for part in parts]).T
