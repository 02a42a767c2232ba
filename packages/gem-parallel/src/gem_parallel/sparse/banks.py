"""How the rows of fully sharded tables lie on ranks.

The ranks form a grid of ``groups`` shards by ``replicas``. Rank ``r = g * replicas + m`` keeps the slice of rows ``[r * s, (r + 1) * s)`` of every
table, with ``s = ceil(rows / ranks)``, and of its optimiser state. The slices of the replicas of ``g`` together form shard ``g``. The tables of one
width form a *bank*: one buffer a rank, gathered and exchanged at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from gem_core.batch import KeyedJagged
from gem_core.spec import SparseOptimizer, TableSpec, table_state
from gem_parallel.sparse.shards import Slice


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """This rank's place: shard group ``group`` of ``groups``, replica ``replica`` of ``replicas``."""

    groups: int
    replicas: int
    group: int
    replica: int


class Bank:
    """The tables of one width on one rank.

    Args:
        tables: tables of equal ``dim``.
        optimizer: decides which state the rows have.
        grid: this rank's place.
        device: where the rows live.
    """

    def __init__(self, tables: Sequence[TableSpec], optimizer: SparseOptimizer, grid: Grid, device: torch.device) -> None:
        self.tables = tuple(tables)
        self.dim = tables[0].dim
        self.keys = tuple(feature for table in tables for feature in table.features)
        self._grid = grid
        self._rows = [math.ceil(table.rows / (grid.groups * grid.replicas)) for table in tables]
        """Rows of each table in one rank's slice; the last ranks' slices may reach beyond the table."""
        self._first = list(accumulate(self._rows, initial=0))
        self.rows = self._first[-1]
        """Rows that a rank keeps."""
        self._of = {feature: i for i, table in enumerate(tables) for feature in table.features}
        self.weight = torch.zeros(self.rows, self.dim, device=device)
        shapes = table_state(tables[0], optimizer)
        self.slots = {name: torch.zeros((self.rows, *shape[1:]), device=device) for name, shape in shapes.items() if shape and name != "weight"}

    @property
    def shard_rows(self) -> int:
        """Rows of a gathered shard."""
        return self.rows * self._grid.replicas

    def slices(self) -> list[Slice]:
        """What this rank keeps, as views; slices wholly beyond their table are left out."""
        out = []
        for table, count, first in zip(self.tables, self._rows, self._first):
            start = (self._grid.group * self._grid.replicas + self._grid.replica) * count
            end = first + max(0, min(count, table.rows - start))
            if end > first:
                held = {"weight": self.weight, **self.slots}
                out.append(Slice(table=table.name, start=start, tensors={name: tensor[first:end] for name, tensor in held.items()}))
        return out

    def addresses(self, features: KeyedJagged) -> Tensor:
        """Where the ids of ``keys`` lie, feature after feature: ``rank * rows + row in the rank's buffer``.

        Divided by ``shard_rows`` that is the shard, with the row of the gathered shard as remainder.
        """
        parts = []
        for key in self.keys:
            table = self._of[key]
            count = self._rows[table]
            owner, row = torch.div(features.ids(key), count, rounding_mode="floor"), features.ids(key) % count
            parts.append(owner * self.rows + self._first[table] + row)
        return torch.cat(parts)
