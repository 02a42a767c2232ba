"""The ``torchrec`` engine: fbgemm tables whose update is fused into backward, in one process or sharded over ranks."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gem_core.batch import KeyedJagged
from gem_core.spec import MachineError, RequestError, SparseOptimizer, TableSpec, check_import, check_lr, check_tables
from gem_parallel.sparse.local import LocalGroup, local_groups
from gem_parallel.sparse.placement import place
from gem_parallel.sparse.sharded import ShardedGroup, sharded_groups
from gem_parallel.sparse.shards import draw, gather, scatter


class _Together(torch.autograd.Function):
    """Identity of all look-ups of a step: if one of them gets a gradient, all do, and at the same time.

    The collectives of sharded tables run in backward. A rank without rows may leave look-ups out of its loss, and would then skip collectives that
    the other ranks wait in, or start them in another order.
    """

    @staticmethod
    def forward(ctx: Any, *vectors: Tensor) -> tuple[Tensor, ...]:
        return vectors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


class TorchRecEmbeddings(nn.Module):
    """The ``torchrec`` engine (``gem_core.spec.Embeddings``).

    Backward updates the tables, so ``step`` and ``zero_grad`` have nothing to do, each micro-batch of an accumulated step is an update of its own,
    and the learning rate must be set before the forward pass. With several ranks the gradients of all ranks are averaged, as DDP does.

    Args:
        tables: the tables; widths are multiples of 4, as fbgemm demands.
        optimizer: the update rule; fbgemm has ``adam`` on CUDA only.
        device: where the tables live.
        seed: of the first weights, which depend on it and on the table's name alone.
        sharding: ``auto``, ``table_wise`` or ``row_wise``, for several ranks.

    Raises:
        RequestError: the tables or the optimiser are not sound, or a width does not fit.
        MachineError: fbgemm or torchrec is missing or does not fit this torch; no Adam on the CPU.
    """

    places: dict[str, int | None]
    """The rank of each table; None where all ranks hold some of its rows."""

    def __init__(
        self, tables: Sequence[TableSpec], optimizer: SparseOptimizer, *, device: torch.device | str, seed: int, sharding: str = "auto"
    ) -> None:
        super().__init__()
        check_tables(tables, optimizer)
        device = torch.empty(0, device=device).device  # "cuda" gets its index
        _check_fit(tables, optimizer, device)
        self._tables, self._optimizer = tuple(tables), optimizer
        self._lr, self._updates, self._under_way = optimizer.lr, 0, False
        self._limits = {feature: (table.name, table.rows) for table in tables for feature in table.features}
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self.places = place(tables, self._world, sharding)
        self._groups: Sequence[LocalGroup] | Sequence[ShardedGroup]
        if self._world == 1:
            self._groups = local_groups(tables, optimizer, device)
        else:
            self._groups = sharded_groups(tables, self.places, optimizer, device)
        self._tbes: list[Any] = [tbe for group in self._groups for tbe in group.tbes]
        self._slices = [piece for group in self._groups for piece in group.slices]
        draw(self._slices, tables, seed)

    def forward(self, features: KeyedJagged) -> dict[str, Tensor]:
        """``{feature: [ids, dim] or [rows, dim]}``, float32. Collective when sharded.

        Raises:
            RequestError: a feature is missing, or (on the CPU) an id has no row; the message names feature, table and id.
        """
        features.check_ids(self._limits)
        self._count_updates()
        out: dict[str, Tensor] = {}
        started = [(group, group(features)) for group in self._groups]
        for group, found in started:
            out.update(group.finish(*found) if isinstance(group, ShardedGroup) else found)
        if torch.is_grad_enabled():
            self._updates += 1
            self._under_way = True
            if self._world > 1 and out:
                out = dict(zip(out, _Together.apply(*out.values())))  # type: ignore[no-untyped-call]
        return out

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
            tbe.set_learning_rate(lr)

    def step(self) -> None:
        """Nothing to apply: backward has done it."""
        self._under_way = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to drop: backward has applied the gradients."""
        self._under_way = False

    def table_names(self) -> Sequence[str]:
        return [table.name for table in self._tables]

    def export_tables(self) -> dict[str, dict[str, Tensor]]:
        """Whole tables on the CPU of every rank, as ``gem_core.spec.table_state`` says. Collective when sharded."""
        whole = gather(self._slices, self._tables, self._optimizer, self._world)
        if self._optimizer.name == "adam":
            for tensors in whole.values():
                tensors["step"] = torch.tensor(self._updates)
        return whole

    def import_tables(self, tables: dict[str, dict[str, Tensor]]) -> None:
        """Load the export of any engine; every rank is given the whole tables and keeps its part.

        Raises:
            RequestError: tables, shapes or optimiser state do not fit (``gem_core.spec.check_import``); nothing has changed then.
        """
        check_import(self._tables, self._optimizer, tables)
        scatter(self._slices, tables)
        self._updates = max((int(entry.get("step", 0)) for entry in tables.values()), default=0)


def _check_fit(tables: Sequence[TableSpec], optimizer: SparseOptimizer, device: torch.device) -> None:
    """What fbgemm itself would refuse with an assertion."""
    narrow = [f"{table.name!r} ({table.dim})" for table in tables if table.dim % 4]
    if narrow:
        so = f"the width of {', '.join(narrow)} is no multiple of 4"
        raise RequestError("engine 'torchrec'", so, "Choose widths that are multiples of 4, or --set embedding.engine=torch.")
    if optimizer.name == "adam" and device.type == "cpu":
        so = "fbgemm has no Adam on the CPU"
        raise MachineError("engine 'torchrec' with optimiser 'adam'", so, "Use optimiser rowwise_adagrad or sgd, engine 'torch', or a GPU.")
