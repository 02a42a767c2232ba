"""Which rows of an epoch have been trained: small, independent of the number of ranks, exact."""

import hashlib
from collections.abc import Mapping, Sequence
from copy import copy
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gem_core.spec import RequestError
from gem_data.feed.units import Unit

Ints = NDArray[np.int64]
Bits = NDArray[np.bool_]


class Trained:
    """Rows of a split that have been trained: units that are done, and one bit a row of those that are begun."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._rows = [unit.rows for unit in units]
        self._first = np.array([unit.first for unit in units], dtype=np.int64)
        self._whole: set[int] = set()
        self._some: dict[int, Bits] = {}

    def add(self, origin: Ints) -> None:
        """These rows of the split have been trained."""
        rows = np.sort(origin)
        at = np.searchsorted(self._first, rows, "right") - 1
        for begin, end in pairwise([0, *(np.flatnonzero(np.diff(at)) + 1).tolist(), rows.size]):
            if begin < end:
                unit = int(at[begin])
                self._mark(unit, rows[begin:end] - self._first[unit])

    def _mark(self, unit: int, which: Ints | Bits) -> None:
        if unit in self._whole:
            return
        bits = self._some.setdefault(unit, np.zeros(self._rows[unit], dtype=np.bool_))
        bits[which] = True
        if bits.all():
            self._whole.add(unit)
            del self._some[unit]

    def count(self, unit: int) -> int:
        """How many rows of a unit have been trained."""
        return self._rows[unit] if unit in self._whole else int(self._some[unit].sum()) if unit in self._some else 0

    def left(self, unit: int, rows: Ints) -> Ints:
        """Those of the rows of a unit that have not been trained."""
        if unit in self._whole:
            return rows[:0]
        return rows[~self._some[unit][rows]] if unit in self._some else rows

    def copy(self) -> "Trained":
        other = copy(self)
        other._whole, other._some = set(self._whole), {unit: bits.copy() for unit, bits in self._some.items()}
        return other

    def state(self) -> dict[str, Any]:
        """Ranges ``[first, last]`` of units that are done, and the rows of the others as bits in hexadecimal digits."""
        ranges: list[list[int]] = []
        for unit in sorted(self._whole):
            if ranges and ranges[-1][1] == unit - 1:
                ranges[-1][1] = unit
            else:
                ranges.append([unit, unit])
        return {"whole": ranges, "some": {str(unit): np.packbits(bits).tobytes().hex() for unit, bits in sorted(self._some.items())}}

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add what ``state`` says."""
        for first, last in state["whole"]:
            for unit in range(first, last + 1):
                self._whole.add(unit)
                self._some.pop(unit, None)
        for name, digits in state["some"].items():
            bits = np.frombuffer(bytes.fromhex(digits), dtype=np.uint8)
            self._mark(int(name), np.unpackbits(bits, count=self._rows[int(name)]).astype(np.bool_))


class Cursor:
    """What this rank has trained of an epoch, and what had been trained when the rows of the epoch were dealt.

    Resuming with the same ranks and the same window deals from the same rows as before and leaves out what has been trained since, so that the run
    goes on exactly as if it had not been cut. In any other case what is left of all ranks is dealt anew.

    Args:
        units: of the training split.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        about = repr([(unit.path.name, unit.index, unit.rows) for unit in units])
        self._data = hashlib.sha256(about.encode()).hexdigest()[:16]
        self._restored: Sequence[Mapping[str, Any]] = ()
        self._epoch, self._plan = 0, [1, 0, 0, 0]
        self._base, self._own = Trained(units), Trained(units)

    def begin(self, epoch: int, rank: int, plan: Sequence[int]) -> tuple[Trained, Trained]:
        """Start or go on with an epoch.

        Args:
            plan: number of ranks, batch size, window, and seed + 1 (0 without shuffling): what the dealing of rows depends on.

        Returns:
            The rows that had been trained before the rows were dealt, and those that this rank has trained since.
        """
        states, self._restored = self._restored, ()
        self._epoch, self._plan = epoch, list(plan)
        self._base, self._own = Trained(self._units), Trained(self._units)
        if states and states[0]["epoch"] == epoch:
            self._base.merge(states[0]["base"])
            if states[0]["plan"] == self._plan:
                self._own.merge(states[rank]["trained"])
            else:
                for state in states:
                    self._base.merge(state["trained"])
        return self._base.copy(), self._own.copy()

    def trained(self, origin: Ints) -> None:
        self._own.add(origin)

    def state(self, rank: int) -> dict[str, Any]:
        """Plain values. The rows trained before the dealing are the same on all ranks; the first one keeps them."""
        base = self._base.state() if rank == 0 else None
        return {"epoch": self._epoch, "data": self._data, "plan": self._plan, "base": base, "trained": self._own.state()}

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from the states of all ranks at the next ``begin``.

        Raises:
            RequestError: they were written over other files.
        """
        for state in states:
            if state["data"] != self._data:
                so = "its cursor was written over other files, or files of other row groups"
                raise RequestError("resuming the data source", so, "Give the same training files, or start a new run.")
        self._restored = list(states)
