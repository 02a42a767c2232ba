"""The ``torchrec`` engine: fbgemm tables whose update is fused into backward, in one process or sharded over ranks."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gem_core.batch import KeyedJagged
from gem_core.spec import RequestError, SparseOptimizer, TableSlice, TableSpec, check_import, check_lr, check_tables
from gem_parallel.comm.collectives import Collectives, Traffic
from gem_parallel.sparse.copies import average, copies_of, gradient_scale, group_cluster
from gem_parallel.sparse.layout import check_fit, lay_out
from gem_parallel.sparse.local import local_groups
from gem_parallel.sparse.lookups import Prefetched
from gem_parallel.sparse.options import TorchRecOptions
from gem_parallel.sparse.placement import Place, wishes
from gem_parallel.sparse.replicated import ReplicatedGroup
from gem_parallel.sparse.sharded import Storage, sharded_groups
from gem_parallel.sparse.shards import draw, gather, scatter, table_slices


class _Together(torch.autograd.Function):
    """Identity of all look-ups of a step: if one of them gets a gradient, all do, and at the same time. Gradients are divided by ``scale``.

    The collectives of sharded tables run in backward. A rank without rows may leave look-ups out of its loss, and would then skip collectives that
    the other ranks wait in, or start them in another order.
    """

    @staticmethod
    def forward(ctx: Any, scale: float, *vectors: Tensor) -> tuple[Tensor, ...]:
        ctx.scale = scale
        return vectors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(grads if ctx.scale == 1.0 else (grad / ctx.scale for grad in grads)))


class TorchRecEmbeddings(nn.Module):
    """The ``torchrec`` engine (``gem_core.spec.Embeddings``).

    Backward updates the tables, so each micro-batch of an accumulated step is an update of its own, and the learning rate must be set before the
    forward pass. Only copies (``data_parallel`` tables, and ``replicas``) have work left for ``step``. With several ranks the gradients of all ranks
    are averaged, as DDP does.

    Args:
        specs: the tables; widths are multiples of 4, as fbgemm demands.
        optimizer: the update rule; fbgemm has ``adam`` on CUDA only.
        device: where the tables live.
        seed: of the first weights, which depend on it and on the table's name alone.
        options: fields of ``TorchRecOptions``.

    Raises:
        RequestError: the tables or the optimiser are not sound, a width does not fit, or a layout does not work for a table here.
        MachineError: fbgemm or torchrec is missing or does not fit this torch; something that fbgemm has on CUDA only.
    """

    places: dict[str, Place]
    """Where each table lies; with replicas, within a group. Empty in a single process without a plan."""

    def __init__(self, specs: Sequence[TableSpec], optimizer: SparseOptimizer, /, *, device: torch.device | str, seed: int, **options: Any) -> None:
        super().__init__()
        chosen = TorchRecOptions(**options)
        check_tables(specs, optimizer)
        device = torch.empty(0, device=device).device  # "cuda" gets its index
        check_fit(specs, optimizer, device.type, chosen)
        self._tables, self._optimizer = tuple(specs), optimizer
        self._lr, self._updates, self._under_way = optimizer.lr, 0, False
        self._limits = {feature: (table.name, table.rows) for table in specs for feature in table.features}
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        cluster = group_cluster(self._world, int(os.environ.get("LOCAL_WORLD_SIZE", self._world)), device.type, chosen.replicas, optimizer)
        self.places = lay_out(specs, optimizer, cluster, chosen)
        self._copies = copies_of(cluster, chosen.replicas)
        self._scale = gradient_scale(chosen.replicas, optimizer)
        self.traffic = Traffic()
        memory = {name: memory for name, (_, memory) in wishes(specs, chosen.sharding, chosen.memory, chosen.tables).items()}
        memory |= {name: placed.memory for name, placed in self.places.items()}
        self._build(device, chosen, memory)
        self._tbes: list[Any] = [tbe for group in self._groups for tbe in group.tbes]
        self._fused = [piece for group in self._groups for piece in group.slices]
        self._slices = [*self._fused, *(self._replicated.slices if self._replicated else ())]
        self._caches = self._tbes if "uvm_cached" in memory.values() else []
        draw(self._slices, specs, seed)
        self._drop_caches()

    def _build(self, device: torch.device, options: TorchRecOptions, memory: Mapping[str, str]) -> None:
        """Make the groups of tables: copies apart, the rest on fbgemm in this process or sharded."""
        copied = [table for table in self._tables if self.places and self.places[table.name].sharding == "data_parallel"]
        others = [table for table in self._tables if table not in copied]
        optimizer = replace(self._optimizer, lr=self._lr * self._scale)
        self._groups: Sequence[Any]
        if self._copies.cluster.world == 1:
            self._groups = local_groups(others, optimizer, device, dtype=options.dtype, memory=memory, saves=self._copies.saves)
        else:
            storage = Storage(dtype=options.dtype, forward_comm=options.forward_comm, backward_comm=options.backward_comm)
            self._groups = sharded_groups(others, self.places, optimizer, device, storage, self._copies)
        everyone = Collectives(dist.group.WORLD if self._world > 1 else None, self.traffic)
        self._replicated = ReplicatedGroup(copied, self._optimizer, device, everyone) if copied else None

    def prefetch(self, features: KeyedJagged) -> Prefetched:
        """Send the ids of sharded tables to the ranks that keep their rows. Collective when sharded.

        Raises:
            RequestError: a feature is missing, or (on the CPU) an id has no row; the message names feature, table and id.
        """
        features.check_ids(self._limits)
        return Prefetched(features, [group.start(features) for group in self._groups])

    def forward(self, features: KeyedJagged | Prefetched) -> dict[str, Tensor]:
        """``{feature: [ids, dim] or [rows, dim]}``, float32. Collective when sharded.

        Raises:
            RequestError: as ``prefetch``, if that was not called before.
        """
        ids = features if isinstance(features, Prefetched) else self.prefetch(features)
        self._count_updates()
        out: dict[str, Tensor] = {}
        for group, found in [(group, group.look_up(part)) for group, part in zip(self._groups, ids.parts, strict=True)]:
            out.update(group.finish(found))
        if torch.is_grad_enabled():
            self._updates += 1
            self._under_way = True
            if self._world > 1 and out:
                out = dict(zip(out, _Together.apply(self._scale, *out.values()), strict=True))  # type: ignore[no-untyped-call]
        return out if self._replicated is None else out | self._replicated(ids.features)

    def _count_updates(self) -> None:
        """Tell fbgemm how many updates were made: its own counter, which corrects Adam's bias, also counts look-ups of an evaluation."""
        if self._optimizer.name == "adam":
            for tbe in self._tbes:
                tbe.iter.fill_(self._updates)
                tbe.iter_cpu.fill_(self._updates)

    def set_lr(self, lr: float) -> None:
        """Learning rate of the next update.

        Raises:
            RequestError: it is negative or not finite, or it changes between forward and ``step``: fbgemm reads it in forward.
        """
        check_lr(lr)
        if self._under_way and lr != self._lr:
            so = "it was changed after the forward pass, which has taken the old one already"
            raise RequestError("learning rate of the tables", so, "Call set_lr before the forward pass.")
        self._lr = lr
        for tbe in self._tbes:
            tbe.set_learning_rate(lr * self._scale)

    def step(self) -> None:
        """Backward has updated the sharded tables; update and average copies, which is collective."""
        self._under_way = False
        if self._replicated is not None:
            self._replicated.step(self._lr, self._updates)
        if self._copies.mesh is not None:
            self._flush_caches()
            average(self._fused, self._copies, self.traffic)
            self._drop_caches()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of ``data_parallel`` tables; backward has applied the others."""
        self._under_way = False
        if self._replicated is not None:
            self._replicated.zero_grad()

    def table_names(self) -> Sequence[str]:
        return [table.name for table in self._tables]

    def table_slices(self) -> Sequence[TableSlice]:
        """What this rank keeps."""
        self._flush_caches()
        return table_slices(self._slices, self._tables)

    def table_updates(self) -> int:
        return self._updates

    def tables_loaded(self, updates: int) -> None:
        self.zero_grad()
        self._drop_caches()
        self._updates = updates

    def export_tables(self) -> dict[str, dict[str, Tensor]]:
        """Whole tables on the CPU of every rank, as ``gem_core.spec.table_state`` says. Collective when sharded."""
        self._flush_caches()
        return gather(self._slices, self._tables, self._optimizer, self._world, self._updates)

    def import_tables(self, tables: dict[str, dict[str, Tensor]]) -> None:
        """Load the export of any engine; every rank is given the whole tables and keeps its part.

        Raises:
            RequestError: tables, shapes or optimiser state do not fit (``gem_core.spec.check_import``); nothing has changed then.
        """
        check_import(self._tables, self._optimizer, tables)
        self._flush_caches()
        self._updates = scatter(self._slices, tables)
        self._drop_caches()

    def _flush_caches(self) -> None:
        """Bring rows that were updated in a cache on the GPU to host memory, of which the slices are views."""
        for tbe in self._caches:
            tbe.flush()

    def _drop_caches(self) -> None:
        """Forget cached rows: host memory was written to."""
        for tbe in self._caches:
            tbe.reset_cache_states()
