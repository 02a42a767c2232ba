"""Tables of which every rank holds a copy. torchrec leaves the update of such tables to an optimiser outside; here it is the engine's own rule.

Ranks exchange the gradients of the rows that were looked up, in ``step``, and all apply the same sum in the same order, so that copies stay equal.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gem_core.batch import KeyedJagged
from gem_core.ops.rows import sum_rows, update_rows
from gem_core.spec import SparseOptimizer, TableSpec, table_state
from gem_parallel.comm.collectives import Collectives
from gem_parallel.sparse.lookups import Sink, keep_gradient, spread, summed
from gem_parallel.sparse.shards import Slice


class ReplicatedGroup:
    """Copies of whole tables, in plain torch.

    Args:
        tables: the tables.
        optimizer: the update rule.
        device: where the rows live.
        ranks: all ranks that hold a copy.
    """

    def __init__(self, tables: Sequence[TableSpec], optimizer: SparseOptimizer, device: torch.device, ranks: Collectives) -> None:
        self._tables, self._optimizer, self._ranks = tuple(tables), optimizer, ranks
        self.keys = tuple(feature for table in tables for feature in table.features)
        self._pooling = {feature: table.pooling for table in tables for feature in table.features}
        shapes = {table.name: {name: shape for name, shape in table_state(table, optimizer).items() if shape} for table in tables}
        self._held = {table: {name: torch.zeros(shape, device=device) for name, shape in of.items()} for table, of in shapes.items()}
        self._sinks: dict[str, Sink] = {table.name: [] for table in tables}
        self.slices = [Slice(table=name, start=0, tensors=held, saves=ranks.rank == 0) for name, held in self._held.items()]

    def __call__(self, features: KeyedJagged) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}
        for table in self._tables:
            ids, inverse = torch.unique(torch.cat([features.ids(key) for key in table.features]).long(), return_inverse=True)
            rows = keep_gradient(self._held[table.name]["weight"].index_select(0, ids), ids, self._sinks[table.name])
            out.update(spread(table.features, self._pooling, rows, inverse, features))
        return out

    @torch.no_grad()
    def step(self, lr: float, updates: int) -> None:
        """Average the ranks' gradients and update. Collective."""
        own = [summed(self._sinks[table.name], table.rows, self._held[table.name]["weight"]) for table in self._tables]
        self.zero_grad()
        for table, (ids, grads) in zip(self._tables, self._exchange(own), strict=True):
            if ids.numel():
                slots = dict(self._held[table.name])
                update_rows(self._optimizer, slots.pop("weight"), slots, ids, grads / self._ranks.size, lr=lr, updates=updates)

    def zero_grad(self) -> None:
        """Forget the gradients gathered since the last ``step``."""
        for sink in self._sinks.values():
            sink.clear()

    def _exchange(self, own: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """The sum over ranks of each table's ``(ids, gradients)``; buffers are padded to the longest rank's."""
        if self._ranks.size == 1:
            return list(own)
        counts = torch.tensor([ids.numel() for ids, _ in own], device=own[0][0].device)
        sizes = self._ranks.all_gather("replicated tables: counts", counts).wait().tolist()
        ids = self._padded("replicated tables: rows", torch.cat([ids for ids, _ in own]), [sum(of) for of in sizes])
        widths = [table.dim for table in self._tables]
        flat = [[n * width for n, width in zip(of, widths, strict=True)] for of in sizes]
        grads = self._padded("replicated tables: gradients", torch.cat([grads.reshape(-1) for _, grads in own]), [sum(of) for of in flat])
        ids_of = [torch.split(part, of) for part, of in zip(ids, sizes, strict=True)]
        grads_of = [torch.split(part, of) for part, of in zip(grads, flat, strict=True)]
        return [
            sum_rows(torch.cat([part[i] for part in ids_of]), torch.cat([part[i].view(-1, table.dim) for part in grads_of]), table.rows)
            for i, table in enumerate(self._tables)
        ]

    def _padded(self, name: str, values: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        padded = values.new_zeros(max(sizes))
        padded[: values.numel()] = values
        return [part[:size] for part, size in zip(self._ranks.all_gather(name, padded).wait(), sizes, strict=True)]
