"""The ``sharded_2d`` engine: tables and optimiser state fully sharded over a grid of ranks, with the result of one process.

Forward gathers the replicas' slices to a whole shard, answers the look-ups of the ranks of the shard group, and drops it. Backward keeps the summed
gradients of the rows that were looked up. ``step`` sends them to the shard's rank, from there to the rank that keeps the row, and updates it. Every
gradient arrives once, so the update is that of one-dimensional model parallelism and no replica drifts. It is the fully sharded 2-D scheme of the GEM
article with row gradients exchanged in place of weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from gem_core.batch import KeyedJagged
from gem_core.ops.rows import sum_rows, update_rows
from gem_core.spec import RequestError, SparseOptimizer, TableSlice, TableSpec, check_import, check_lr, check_tables
from gem_parallel.comm.collectives import Collectives, Gathering, Traffic
from gem_parallel.comm.ledger import LEDGER
from gem_parallel.sparse.banks import Bank, Grid
from gem_parallel.sparse.lookups import Prefetched, Sink, keep_gradient, spread, summed
from gem_parallel.sparse.shards import draw, gather, scatter, table_slices


@dataclass(frozen=True, slots=True)
class _Asked:
    """The distinct rows that a rank wants of one bank, and those that are wanted of it.

    Args:
        addresses: ``[n]``, ascending, of the wanted rows.
        inverse: the place among them of each id of the batch.
        here: rows of the shard that the ranks of the group ask for.
        send: how many rows are asked of each rank.
        receive: how many each rank asks for.
    """

    addresses: Tensor
    inverse: Tensor
    here: Tensor
    send: list[int]
    receive: list[int]


class Sharded2DEmbeddings(nn.Module):
    """The ``sharded_2d`` engine (``gem_core.spec.Embeddings``). Forward under every mode, ``step``, export and import are collective.

    Args:
        tables: the tables.
        optimizer: the update rule.
        device: where the rows live.
        seed: of the first weights, which depend on it and on the table's name alone.
        replicas: ranks that share one shard, neighbours in rank order: inside a host. 1 is one-dimensional model parallelism.
        prefetch: start to gather the next step's shards at the end of ``step``, behind whatever follows; costs their memory from then on.

    Raises:
        RequestError: the tables or the optimiser are not sound, or the ranks cannot be divided by ``replicas``.
    """

    updates_in_step = True
    recorder = LEDGER

    def __init__(
        self,
        tables: Sequence[TableSpec],
        optimizer: SparseOptimizer,
        *,
        device: torch.device | str,
        seed: int,
        replicas: int = 1,
        prefetch: bool = True,
    ) -> None:
        super().__init__()
        check_tables(tables, optimizer)
        device = torch.empty(0, device=device).device  # "cuda" gets its index
        self._tables, self._optimizer, self._prefetch = tuple(tables), optimizer, prefetch
        self._lr, self._updates = optimizer.lr, 0
        self._limits = {feature: (table.name, table.rows) for table in tables for feature in table.features}
        self._pooling = {feature: table.pooling for table in tables for feature in table.features}
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self.traffic = Traffic()
        self.grid, self._shard, self._replicas = _groups(self._world, replicas, device, self.traffic)
        self._banks = [Bank([t for t in tables if t.dim == dim], optimizer, self.grid, device) for dim in sorted({t.dim for t in tables})]
        self._slices = [piece for bank in self._banks for piece in bank.slices()]
        self._sinks: list[Sink] = [[] for _ in self._banks]
        self._gathering: list[Gathering] | None = None
        draw(self._slices, tables, seed)

    def prefetch(self, features: KeyedJagged) -> Prefetched:
        """Ask the ranks of the shard group for the distinct rows of these ids. Collective.

        Raises:
            RequestError: a feature is missing, or (on the CPU) an id has no row; the message names feature, table and id.
        """
        features.check_ids(self._limits)
        wanted = [torch.unique(bank.addresses(features), return_inverse=True) for bank in self._banks]
        sizes = [bank.shard_rows for bank in self._banks]
        send, receive = _split_counts(self._shard, "tables: ask, counts", [addresses for addresses, _ in wanted], sizes)
        asked = [
            _Asked(addresses, inverse, self._shard.all_to_all("tables: ask", addresses % sizes[i], send[i], receive[i]), send[i], receive[i])
            for i, (addresses, inverse) in enumerate(wanted)
        ]
        return Prefetched(features, asked)

    def forward(self, features: KeyedJagged | Prefetched) -> dict[str, Tensor]:
        """``{feature: [ids, dim] or [rows, dim]}``, float32.

        Raises:
            RequestError: as ``prefetch``, if that was not called before.
        """
        ids = features if isinstance(features, Prefetched) else self.prefetch(features)
        gathering, self._gathering = self._gathering or self._gather(), None
        out: dict[str, Tensor] = {}
        for bank, asked, shards, sink in zip(self._banks, ids.parts, gathering, self._sinks):
            shard = shards.wait()
            answer = shard.view(-1, shard.shape[-1]).index_select(0, asked.here)
            rows = self._shard.all_to_all("tables: answer", answer, asked.receive, asked.send)
            kept = keep_gradient(rows, asked.addresses, sink)
            out.update(spread(bank.keys, self._pooling, kept, asked.inverse, ids.features))
        return out

    def _gather(self) -> list[Gathering]:
        return [self._replicas.all_gather("tables: gather shards", bank.weight) for bank in self._banks]

    def _stop_gathering(self) -> None:
        """Drop what ``step`` started: its weights may be about to change, or this process about to end."""
        for shards in self._gathering or ():
            shards.wait()
        self._gathering = None

    def set_lr(self, lr: float) -> None:
        """Learning rate of the next ``step``; RequestError if it is negative or not finite."""
        check_lr(lr)
        self._lr = lr

    @torch.no_grad()
    def step(self) -> None:
        """Bring the gradients gathered since the last call to the ranks that keep the rows, and update them. Collective."""
        self._updates += 1
        gradients = [summed(sink, bank.shard_rows * self.grid.groups, bank.weight) for bank, sink in zip(self._banks, self._sinks)]
        self.zero_grad()
        gradients = self._pass_on(self._shard, "tables: gradients", gradients, [bank.shard_rows for bank in self._banks])
        gradients = self._pass_on(self._replicas, "tables: gradients to owner", gradients, [bank.rows for bank in self._banks])
        for bank, (rows, grad) in zip(self._banks, gradients):
            if rows.numel():
                update_rows(self._optimizer, bank.weight, bank.slots, rows, grad / self._world, lr=self._lr, updates=self._updates)
        if self._prefetch:
            self._gathering = self._gather()

    def _pass_on(
        self, ranks: Collectives, name: str, gradients: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int]
    ) -> list[tuple[Tensor, Tensor]]:
        """Send each bank's summed gradients to the rank ``address // size``; the result has the addresses ``address % size``, summed again."""
        send, receive = _split_counts(ranks, f"{name}, counts", [addresses for addresses, _ in gradients], sizes)
        out = []
        for i, (addresses, grads) in enumerate(gradients):
            here = ranks.all_to_all(f"{name}, rows", addresses % sizes[i], send[i], receive[i])
            values = ranks.all_to_all(name, grads, send[i], receive[i])
            out.append(sum_rows(here, values, sizes[i]))
        return out

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients gathered since the last ``step``."""
        for sink in self._sinks:
            sink.clear()

    def table_names(self) -> Sequence[str]:
        return [table.name for table in self._tables]

    def table_slices(self) -> Sequence[TableSlice]:
        """The rows that this rank keeps."""
        return table_slices(self._slices, self._tables)

    def table_updates(self) -> int:
        return self._updates

    def tables_loaded(self, updates: int) -> None:
        self.zero_grad()
        self._stop_gathering()
        self._updates = updates

    def export_tables(self) -> dict[str, dict[str, Tensor]]:
        """Whole tables on the CPU of every rank, as ``gem_core.spec.table_state`` says."""
        self._stop_gathering()
        return gather(self._slices, self._tables, self._optimizer, self._world, self._updates)

    def import_tables(self, tables: dict[str, dict[str, Tensor]]) -> None:
        """Load the export of any engine and forget pending gradients; every rank is given the whole tables and keeps its part.

        Raises:
            RequestError: tables, shapes or optimiser state do not fit (``gem_core.spec.check_import``); nothing has changed then.
        """
        check_import(self._tables, self._optimizer, tables)
        self.zero_grad()
        self._stop_gathering()
        self._updates = scatter(self._slices, tables)


def _groups(world: int, replicas: int, device: torch.device, traffic: Traffic) -> tuple[Grid, Collectives, Collectives]:
    """The grid, the collectives of this rank's shard group (one rank of each shard) and those of its replica group (the ranks of one shard)."""
    if replicas < 1 or world % replicas:
        fits = [n for n in range(1, world + 1) if world % n == 0]
        so = f"{world} ranks cannot be divided by it"
        raise RequestError(f"engine 'sharded_2d' with replicas = {replicas}", so, f"Choose one of {', '.join(map(str, fits))}.")
    if world == 1:
        return Grid(groups=1, replicas=1, group=0, replica=0), Collectives(None, traffic), Collectives(None, traffic)
    mesh = init_device_mesh(device.type, (world // replicas, replicas), mesh_dim_names=("sparse_shard", "sparse_replicate"))
    group, replica = mesh.get_local_rank("sparse_shard"), mesh.get_local_rank("sparse_replicate")
    grid = Grid(groups=world // replicas, replicas=replicas, group=group, replica=replica)
    sharded = mesh.get_group("sparse_shard") if grid.groups > 1 else None
    replicated = mesh.get_group("sparse_replicate") if replicas > 1 else None
    return grid, Collectives(sharded, traffic), Collectives(replicated, traffic)


def _split_counts(ranks: Collectives, name: str, addresses: Sequence[Tensor], sizes: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
    """How many of each bank's ascending addresses go to each rank (``address // size``), and how many come from each: ``[banks][ranks]`` twice."""
    device = addresses[0].device
    counts = []
    for part, size in zip(addresses, sizes):
        edges = torch.arange(ranks.size + 1, device=device) * size
        counts.append(torch.searchsorted(part, edges).diff())
    table = torch.stack(counts, dim=1)
    told = ranks.exchange_counts(name, table)
    return table.T.tolist(), [list(column) for column in zip(*told)]
