"""Rows in memory, decoded: what a window is made of and batches are gathered from.

Columns are numpy arrays, most of them over Arrow's memory: gathering runs in threads of its own, where torch's own threads would only be in the way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Column = NDArray[Any]

WEIGHTS = ""
"""The column of the ids' weights in a multi-valued id's group: no feature has an empty name."""


@dataclass(frozen=True, slots=True)
class Lists:
    """Aligned list columns: row ``r`` owns ``begin[r] : begin[r] + length[r]`` of each of ``values``. Rows may share values.

    Args:
        begin: ``[rows]``.
        length: ``[rows]``.
        values: ``{column: [total]}``: ids and times int64, numbers float32.
    """

    begin: Ints
    length: Ints
    values: dict[str, Column]

    def take(self, at: Ints) -> "Lists":
        """Only the rows ``at``, over the values from the first to the last that they own."""
        begin, length = self.begin[at], self.length[at]
        low = int(begin.min()) if at.size else 0
        high = int((begin + length).max()) if at.size else 0
        return Lists(begin - low, length, {name: column[low:high] for name, column in self.values.items()})


@dataclass(frozen=True, slots=True)
class Part:
    """Decoded rows.

    Args:
        origin: ``[rows]`` numbers of the rows in their split.
        scalars: ``{column: [rows, ...]}``, named by ``(role, name)``: ``("id", "item")``, ``("label", "ctr")``, ...
        lists: ``{group: Lists}``; a multi-valued id is a group of its own.
        tokens: ``[rows]`` events of all histories.
        pairs: ``[rows]`` sum of the squares of their lengths.
    """

    origin: Ints
    scalars: dict[tuple[str, str], Column]
    lists: dict[str, Lists]
    tokens: Ints
    pairs: Ints

    @property
    def rows(self) -> int:
        return self.origin.size

    def take(self, rows: Ints) -> "Part":
        """Only these rows, which ascend; values of lists are shared, not copied."""
        if rows.size == self.rows:
            return self
        lists = {name: group.take(rows) for name, group in self.lists.items()}
        scalars = {name: column[rows] for name, column in self.scalars.items()}
        return Part(self.origin[rows], scalars, lists, self.tokens[rows], self.pairs[rows])


Picked = Sequence[tuple[Part, Ints]]
"""Parts, and the rows wanted of each: what a batch is gathered from."""
