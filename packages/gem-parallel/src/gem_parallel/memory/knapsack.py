"""The exact choice of one option for each block: least seconds within a budget of bytes (the multiple-choice knapsack problem).

Blocks are taken one by one, and of all partial choices only those stay that no other beats in bytes and seconds at once. Two bounds keep them few:
the least bytes that the other blocks can take, and the least seconds that they need within what is left, from the relaxation in which a block may
mix options (Sinha and Zoltners 1979). Both only drop what cannot become the best, so the result is exact.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from gem_core.spec import RequestError

State = tuple[int, float, Any]
"""Bytes, seconds, and the options taken so far: ``(index of the last, those before)`` or None."""
_ROUNDING = 1e-9
"""Relative slack of the bounds, so that rounding drops nothing."""


@dataclass(frozen=True, slots=True)
class Option:
    """What a block may do: bytes that it holds until its backward, seconds that it costs."""

    bytes: int
    seconds: float


def choose(blocks: Sequence[Sequence[Option]], budget: int) -> list[int]:
    """The index of the chosen option of each block, with the least sum of seconds of all choices whose bytes sum to at most ``budget``.

    Raises:
        RequestError: no choice fits.
    """
    least = [min(option.bytes for option in options) for options in blocks]
    if sum(least) > budget:
        so = f"the blocks hold at least {sum(least):,} bytes, whatever is done"
        raise RequestError(f"a budget of {budget:,} bytes for activations", so, "Raise it, allow more policies, or take fewer rows a batch.")
    suffix_least = [sum(least[i:]) for i in range(len(blocks) + 1)]
    fronts = [_front(options) for options in blocks]
    bounds = [_Bound(fronts[i:]) for i in range(len(blocks) + 1)]
    best = bounds[0].reached(budget)
    states: list[State] = [(0, 0.0, None)]
    for i, options in enumerate(fronts):
        grown: list[State] = []
        for held, seconds, path in states:
            for index, option in options:
                total, spent = held + option.bytes, seconds + option.seconds
                left = budget - total
                if left < suffix_least[i + 1] or spent + bounds[i + 1].seconds(left) > best * (1 + _ROUNDING) + 1e-15:
                    continue
                grown.append((total, spent, (index, path)))
        states = _unbeaten(grown)
    path = min(states, key=lambda state: state[1])[2]
    chosen = []
    while path is not None:
        index, path = path
        chosen.append(index)
    return chosen[::-1]


def _front(options: Sequence[Option]) -> list[tuple[int, Option]]:
    """The options that no other beats in both, most bytes (and least seconds) first."""
    front: list[tuple[int, Option]] = []
    for index, option in sorted(enumerate(options), key=lambda item: (item[1].bytes, item[1].seconds)):
        if not front or option.seconds < front[-1][1].seconds:
            front.append((index, option))
    return front[::-1]


def _unbeaten(states: list[State]) -> list[State]:
    kept: list[State] = []
    for state in sorted(states, key=lambda s: s[:2]):
        if not kept or state[1] < kept[-1][1]:
            kept.append(state)
    return kept


class _Bound:
    """Least seconds of some blocks within any budget, where each may mix its options."""

    def __init__(self, fronts: Sequence[Sequence[tuple[int, Option]]]) -> None:
        self._quickest = sum(options[0][1].seconds for options in fronts)
        self._most = sum(options[0][1].bytes for options in fronts)
        steps = sorted((price, saved) for options in fronts for price, saved in _descent([option for _, option in options]))
        self._prices = [price for price, _ in steps]
        self._saved = [0, *accumulate(saved for _, saved in steps)]
        self._spent = [0.0, *accumulate(price * saved for price, saved in steps)]

    def seconds(self, budget: int) -> float:
        """A lower bound; infinite where even the least bytes are too many."""
        need = self._most - budget
        if need <= 0:
            return self._quickest
        if need > self._saved[-1]:
            return float("inf")
        at = bisect_left(self._saved, need) - 1
        return self._quickest + self._spent[at] + self._prices[at] * (need - self._saved[at])

    def reached(self, budget: int) -> float:
        """Seconds of a choice that fits and mixes nothing: whole steps of the descent until the bytes fit. An upper bound of the best."""
        need = self._most - budget
        return self._quickest + self._spent[0 if need <= 0 else bisect_left(self._saved, need)]


def _descent(options: Sequence[Option]) -> list[tuple[float, int]]:
    """``(seconds a byte, bytes saved)`` from option to option along the lower convex hull; prices rise."""
    hull: list[Option] = []
    for option in options:
        while len(hull) > 1 and _price(hull[-2], hull[-1]) >= _price(hull[-1], option):
            hull.pop()
        hull.append(option)
    return [(_price(a, b), a.bytes - b.bytes) for a, b in pairwise(hull)]


def _price(before: Option, after: Option) -> float:
    return (after.seconds - before.seconds) / (before.bytes - after.bytes)
