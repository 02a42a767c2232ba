"""The last pairs of a run that guards itself, and what they say.

A pair scores the rows of one step twice with the same weights, once high and once low, so that both sides have the same base rate and the relative
difference of normalised entropy is that of the log losses, ``sum(loss low) / sum(loss high) - 1``. Its interval comes from a bootstrap over circular
blocks of consecutive pairs (Politis & Romano 1992) of length ``n^(1/3)``: steps that lie near each other have similar weights.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gem_core.spec import PairedSums

LEAST = 8
"""Pairs that an interval needs."""
DRAWS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """What the window says of one task. Differences are relative to high, as fractions.

    Args:
        pairs: how many the figures rest on.
        ne: normalised entropy, high and low; None where labels have one class.
        difference: relative rise of normalised entropy from high to low.
        low: lower end of its 95 % interval.
        high: upper end.
        verdict: ``waiting`` for more pairs, ``holds``, or ``breach``: the whole interval lies above the bound.
    """

    pairs: int
    ne: tuple[float, float] | None
    difference: float
    low: float
    high: float
    verdict: Literal["waiting", "holds", "breach"]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


class Window:
    """The last pairs by task.

    Args:
        pairs: how many are kept.
        bound: largest rise that holds.
    """

    def __init__(self, pairs: int, bound: float) -> None:
        self._keep, self._bound = pairs, bound
        self._sums: dict[str, list[list[float]]] = defaultdict(list)

    def add(self, pairs: Mapping[str, PairedSums]) -> None:
        """Take a pair in. A task without a row in it, or with a loss that is not finite, has none."""
        for task, pair in pairs.items():
            row = [pair.weight, pair.positive, *pair.loss]
            if pair.weight > 0 and pair.loss[0] > 0 and all(map(math.isfinite, row)):
                self._sums[task] = [*self._sums[task], row][-self._keep :]

    def judge(self) -> dict[str, Judged]:
        """By task, of those that have a pair."""
        return {task: self._judge(np.array(rows)) for task, rows in self._sums.items()}

    def clear(self) -> None:
        """Forget all pairs: they are of other formats."""
        self._sums.clear()

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {task: [list(row) for row in rows] for task, rows in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``."""
        self._sums = defaultdict(list, {task: [list(row) for row in rows] for task, rows in state.items()})

    def _judge(self, rows: NDArray[np.float64]) -> Judged:
        weight, positive, high, low = rows.sum(0).tolist()
        lower, upper = interval(rows[:, 2], rows[:, 3])
        verdict: Literal["waiting", "holds", "breach"] = "holds"
        if len(rows) < LEAST:
            verdict = "waiting"
        elif lower > self._bound:
            verdict = "breach"
        return Judged(pairs=len(rows), ne=_entropies(weight, positive, high, low), difference=low / high - 1, low=lower, high=upper, verdict=verdict)


def interval(high: NDArray[np.float64], low: NDArray[np.float64]) -> tuple[float, float]:
    """The 95 % interval of ``sum(low) / sum(high) - 1`` over pairs in their order: ``[pairs]`` losses each, ``high`` positive."""
    count = len(high)
    length = math.ceil(count ** (1 / 3))
    starts = np.random.default_rng(0).integers(0, count, (DRAWS, math.ceil(count / length)))
    picks = ((starts[..., None] + np.arange(length)) % count).reshape(DRAWS, -1)[:, :count]
    ends = np.quantile(low[picks].sum(1) / high[picks].sum(1) - 1, (0.025, 0.975))
    return float(ends[0]), float(ends[1])


def _entropies(weight: float, positive: float, high: float, low: float) -> tuple[float, float] | None:
    rate = positive / weight
    if not 0 < rate < 1:
        return None
    whole = -weight * (rate * math.log(rate) + (1 - rate) * math.log1p(-rate))
    return high / whole, low / whole
