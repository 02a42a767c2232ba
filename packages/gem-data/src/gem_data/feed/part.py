"""Rows in memory, decoded: what a window is made of and batches are gathered from."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lists:
    """Aligned list columns: row ``r`` owns ``begin[r] : begin[r] + length[r]`` of each of ``values``. Rows may share values.

    Args:
        begin: ``[rows]`` int64.
        length: ``[rows]`` int64.
        values: ``{column: [total, ...]}``: ids and times int64, numbers float32.
    """

    begin: Tensor
    length: Tensor
    values: dict[str, Tensor]

    def take(self, at: Tensor) -> "Lists":
        """Only the rows ``at``, over the values from the first to the last that they own."""
        begin, length = self.begin[at], self.length[at]
        if not at.numel():
            return Lists(begin, length, {name: column[:0] for name, column in self.values.items()})
        low, high = int(begin.min()), int((begin + length).max())
        return Lists(begin - low, length, {name: column[low:high] for name, column in self.values.items()})


@dataclass(frozen=True, slots=True)
class Part:
    """Decoded rows.

    Args:
        origin: ``[rows]`` int64 numbers of the rows in their split.
        scalars: ``{column: [rows, ...]}``, named by ``(role, name)``: ``("id", "item")``, ``("label", "ctr")``, ...
        lists: ``{group: Lists}``; a multi-valued id is a group of its own.
        tokens: ``[rows]`` int64 events of all histories.
        pairs: ``[rows]`` int64 sum of the squares of their lengths.
    """

    origin: Tensor
    scalars: dict[tuple[str, str], Tensor]
    lists: dict[str, Lists]
    tokens: Ints
    pairs: Ints

    @property
    def rows(self) -> int:
        return self.origin.numel()

    def take(self, rows: Ints) -> "Part":
        """Only these rows, which ascend; values of lists are shared, not copied."""
        if rows.size == self.rows:
            return self
        at = torch.from_numpy(rows)
        lists = {name: group.take(at) for name, group in self.lists.items()}
        scalars = {name: column.index_select(0, at) for name, column in self.scalars.items()}
        return Part(self.origin[at], scalars, lists, self.tokens[rows], self.pairs[rows])


def join(parts: Sequence[Part]) -> Part:
    """All rows of one part or more, in order."""
    first = parts[0]
    if len(parts) == 1:
        return first
    return Part(
        torch.cat([p.origin for p in parts]),
        {name: torch.cat([p.scalars[name] for p in parts]) for name in first.scalars},
        {name: _join_lists([p.lists[name] for p in parts]) for name in first.lists},
        np.concatenate([p.tokens for p in parts]),
        np.concatenate([p.pairs for p in parts]),
    )


def _join_lists(groups: Sequence[Lists]) -> Lists:
    begins, base = [], 0
    for group in groups:
        begins.append(group.begin + base)
        base += next(iter(group.values.values())).shape[0]
    values = {name: torch.cat([group.values[name] for group in groups]) for name in groups[0].values}
    return Lists(torch.cat(begins), torch.cat([group.length for group in groups]), values)
