"""Which rows of an epoch have been trained: small, independent of the number of ranks, exact."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gem_core.spec import RequestError
from gem_data.feed.units import Unit

Bits = NDArray[np.bool_]


class Trained:
    """Rows that have been trained, by unit."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._rows = [unit.rows for unit in units]
        self._first = np.array([unit.first for unit in units], dtype=np.int64)
        self.done: dict[int, Bits] = {}

    def add(self, origin: NDArray[np.int64]) -> None:
        """These rows of the split have been trained."""
        at = np.searchsorted(self._first, origin, "right") - 1
        for unit in np.unique(at).tolist():
            self._bits(unit)[origin[at == unit] - self._first[unit]] = True

    def _bits(self, unit: int) -> Bits:
        return self.done.setdefault(unit, np.zeros(self._rows[unit], dtype=np.bool_))

    def copy(self) -> dict[int, Bits]:
        return {unit: bits.copy() for unit, bits in self.done.items()}

    def state(self) -> dict[str, Any]:
        """Ranges ``[first, last]`` of units that are done, and the rows of the others as bits in hexadecimal digits."""
        whole = sorted(unit for unit, bits in self.done.items() if bits.all())
        ranges: list[list[int]] = []
        for unit in whole:
            if ranges and ranges[-1][1] == unit - 1:
                ranges[-1][1] = unit
            else:
                ranges.append([unit, unit])
        some = {str(unit): np.packbits(bits).tobytes().hex() for unit, bits in sorted(self.done.items()) if not bits.all()}
        return {"whole": ranges, "some": some}

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add what ``state`` says."""
        for first, last in state["whole"]:
            for unit in range(first, last + 1):
                self._bits(unit)[:] = True
        for name, digits in state["some"].items():
            bits = np.frombuffer(bytes.fromhex(digits), dtype=np.uint8)
            self._bits(int(name))[:] |= np.unpackbits(bits, count=self._rows[int(name)]).astype(np.bool_)


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

    def begin(self, epoch: int, rank: int, plan: Sequence[int]) -> tuple[dict[int, Bits], dict[int, Bits]]:
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

    def trained(self, origin: NDArray[np.int64]) -> None:
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
