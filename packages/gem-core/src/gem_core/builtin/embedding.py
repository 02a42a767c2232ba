"""Embedding tables in plain torch: whole tables on one device, exact sparse updates.

A look-up keeps the ids and the gradient of its output instead of a dense or sparse gradient tensor. ``step`` sums duplicates and changes only the
rows that were looked up. With several ranks every rank holds all tables; ``step`` exchanges the summed rows, so that the replicas stay equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag

from gem_core.batch import KeyedJagged
from gem_core.builtin.recorder import Recorder
from gem_core.ops.first_weights import draw_rows
from gem_core.ops.rows import sum_rows, update_rows
from gem_core.spec import SparseOptimizer, TableSlice, TableSpec, check_import, check_lr, check_tables, table_seed, table_state

RECORDER = Recorder()


@dataclass
class _Gradients:
    """What backward left for one table of ``limit`` rows: look-up ``i`` of row ``ids[i]`` has the gradient ``rows[i]``."""

    limit: int
    ids: list[Tensor] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)

    def take(self) -> tuple[Tensor, Tensor] | None:
        """The rows that were looked up, ascending, and their summed gradients; then forget them."""
        if not self.ids:
            return None
        ids, rows = _join(self.ids), _join(self.rows)
        self.clear()
        return sum_rows(ids, rows, self.limit)

    def clear(self) -> None:
        self.ids.clear()
        self.rows.clear()


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class _LookUp(torch.autograd.Function):
    """``weight[ids]``, pooled over bags if there are ``offsets``; backward hands ids and gradients to ``sink`` and leaves ``weight.grad`` alone."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, offsets: Tensor | None, pooling: str, sink: _Gradients) -> Tensor:
        ctx.save_for_backward(ids, offsets)
        ctx.pooling, ctx.sink = pooling, sink
        if offsets is None:
            return weight.index_select(0, ids)
        if not ids.numel():  # embedding_bag refuses a batch without rows
            return weight.new_zeros(offsets.numel() - 1, weight.shape[1])
        return embedding_bag(ids, weight, offsets, mode=pooling, include_last_offset=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ids, offsets = ctx.saved_tensors
        if offsets is not None:
            lengths = offsets.diff()
            if ctx.pooling == "mean":
                grad = grad / lengths.clamp(min=1)[:, None]
            bags = torch.repeat_interleave(torch.arange(lengths.numel(), device=ids.device), lengths, output_size=ids.numel())
            ids, grad = sum_rows(ids, grad, ctx.sink.limit, bags)
        ctx.sink.ids.append(ids)
        ctx.sink.rows.append(grad)
        return None, None, None, None, None


class TorchEmbeddings(nn.Module):
    """The ``torch`` engine (``gem_core.spec.Embeddings``).

    Ids are checked on the CPU; on a GPU an id without a row stops the run with torch's own device assertion.

    Args:
        tables: the tables; each feature belongs to one of them.
        optimizer: the update rule.
        device: where the tables live.
        seed: of the first weights, which depend on it and on the table's name alone.

    Raises:
        RequestError: the tables or the optimiser are not sound (``gem_core.spec.check_tables``).
    """

    updates_in_step = True
    recorder = RECORDER

    def __init__(self, tables: Sequence[TableSpec], optimizer: SparseOptimizer, *, device: torch.device | str, seed: int) -> None:
        super().__init__()
        check_tables(tables, optimizer)
        self._tables = tuple(tables)
        self._optimizer = optimizer
        self._lr = optimizer.lr
        self._updates = 0
        self._limits = {feature: (table.name, table.rows) for table in tables for feature in table.features}
        self._gradients = {table.name: _Gradients(table.rows) for table in tables}
        self.weights = nn.ParameterList(_first_weights(table, seed, device) for table in tables)
        self._slots: dict[str, dict[str, Tensor]] = {table.name: {} for table in tables}
        self._reset_slots()

    def forward(self, features: KeyedJagged) -> dict[str, Tensor]:
        """``{feature: [ids, dim] or [rows, dim]}``, float32.

        Raises:
            RequestError: a feature is missing, or an id has no row; the message names feature, table and id.
        """
        features.check_ids(self._limits)
        out: dict[str, Tensor] = {}
        for table, weight in zip(self._tables, self.weights):
            if table.pooling == "none":
                parts = [features.ids(key) for key in table.features]
                ids, offsets, sizes = _join(parts), None, [part.numel() for part in parts]
            else:
                columns = features if features.keys == table.features else features.select(table.features)
                ids, offsets, sizes = columns.values, columns.offsets, [features.rows] * len(table.features)
            vectors: Tensor = _LookUp.apply(weight, ids, offsets, table.pooling, self._gradients[table.name])  # type: ignore[no-untyped-call]
            out.update(zip(table.features, torch.split(vectors, sizes)))
        return out

    def set_lr(self, lr: float) -> None:
        """Learning rate of the next ``step``; RequestError if it is negative or not finite."""
        check_lr(lr)
        self._lr = lr

    @torch.no_grad()
    def step(self) -> None:
        """Update the rows looked up since the last call. Collective: with several ranks, all call it equally often."""
        self._updates += 1
        gradients = [self._gradients[table.name].take() for table in self._tables]
        if dist.is_initialized() and dist.get_world_size() > 1:
            gradients = _exchange(gradients, self._tables, list(self.weights))
        for table, weight, entry in zip(self._tables, self.weights, gradients):
            if entry is not None:
                update_rows(self._optimizer, weight.data, self._slots[table.name], *entry, lr=self._lr, updates=self._updates)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients gathered since the last ``step``."""
        for entry in self._gradients.values():
            entry.clear()

    def table_names(self) -> Sequence[str]:
        return [table.name for table in self._tables]

    def table_slices(self) -> Sequence[TableSlice]:
        """Every rank keeps the whole tables; the first one saves them."""
        saves = not dist.is_initialized() or dist.get_rank() == 0
        held = [(table.name, {"weight": weight.detach(), **self._slots[table.name]}) for table, weight in zip(self._tables, self.weights)]
        return [
            TableSlice(table=table, name=name, shape=tuple(tensor.shape), start=0, tensor=tensor, saves=saves)
            for table, tensors in held
            for name, tensor in tensors.items()
        ]

    def table_updates(self) -> int:
        return self._updates

    def tables_loaded(self, updates: int) -> None:
        self.zero_grad()
        self._updates = updates

    def export_tables(self) -> dict[str, dict[str, Tensor]]:
        """Copies on the CPU, as ``gem_core.spec.table_state`` says. Every rank has the whole tables, so nothing is exchanged."""
        out = {}
        for table, weight in zip(self._tables, self.weights):
            state = {"weight": weight.detach(), **self._slots[table.name]}
            if self._optimizer.name == "adam":
                state["step"] = torch.tensor(self._updates)
            out[table.name] = {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}
        return out

    @torch.no_grad()
    def import_tables(self, tables: dict[str, dict[str, Tensor]]) -> None:
        """Load the export of any engine and forget pending gradients.

        Raises:
            RequestError: tables, shapes or optimiser state do not fit (``gem_core.spec.check_import``); nothing has changed then.
        """
        check_import(self._tables, self._optimizer, tables)
        self.zero_grad()
        self._reset_slots()
        for table, weight in zip(self._tables, self.weights):
            entry = tables[table.name]
            weight.copy_(entry["weight"])
            for name, slot in self._slots[table.name].items():
                if name in entry:
                    slot.copy_(entry[name])
            self._updates = int(entry.get("step", 0))

    def _reset_slots(self) -> None:
        self._updates = 0
        for table, weight in zip(self._tables, self.weights):
            shapes = table_state(table, self._optimizer)
            self._slots[table.name] = {name: weight.new_zeros(shape) for name, shape in shapes.items() if name not in ("weight", "step")}


def _first_weights(table: TableSpec, seed: int, device: torch.device | str) -> Tensor:
    weight = torch.empty(table.rows, table.dim, device=device)
    draw_rows(weight, seed=table_seed(seed, table.name), scale=table.init_scale)
    return weight


def _exchange(
    gradients: Sequence[tuple[Tensor, Tensor] | None], tables: Sequence[TableSpec], weights: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor] | None]:
    """Average the summed rows of all ranks, as DDP averages dense gradients.

    Three collectives whatever the number of tables: how many rows each rank has for each table, their ids, their gradients. Ranks send different
    amounts, so shorter buffers are padded. All ranks sum in rank order and get the same bits.
    """
    if not tables:
        return []
    device = weights[0].device
    none = torch.empty(0, dtype=torch.int64, device=device)
    local = [(none, none.new_empty(0, table.dim, dtype=torch.float32)) if entry is None else entry for entry, table in zip(gradients, tables)]
    sizes = torch.stack(_all_gather("tables: row counts", torch.tensor([ids.numel() for ids, _ in local], device=device))).tolist()
    widths = [table.dim for table in tables]
    ids = _all_gather_padded("tables: ids", torch.cat([ids for ids, _ in local]), [sum(counts) for counts in sizes])
    every = [sum(n * width for n, width in zip(counts, widths)) for counts in sizes]
    grads = _all_gather_padded("tables: gradients", torch.cat([rows.reshape(-1) for _, rows in local]), every)
    ids_of = [torch.split(part, counts) for part, counts in zip(ids, sizes)]
    grads_of = [torch.split(part, [n * width for n, width in zip(counts, widths)]) for part, counts in zip(grads, sizes)]
    out: list[tuple[Tensor, Tensor] | None] = []
    for i, table in enumerate(tables):
        every_id, every_grad = torch.cat([part[i] for part in ids_of]), torch.cat([part[i] for part in grads_of])
        rows, total = sum_rows(every_id, every_grad.view(-1, table.dim), table.rows)
        out.append((rows, total / len(sizes)))
    return out


def _all_gather(name: str, values: Tensor) -> list[Tensor]:
    ranks = dist.get_world_size()
    parts = [torch.empty_like(values) for _ in range(ranks)]
    with RECORDER.recorded(name, "all_gather", (ranks - 1) * values.nbytes, "world", ranks, values.device):
        dist.all_gather(parts, values)
    return parts


def _all_gather_padded(name: str, values: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    padded = values.new_zeros(max(sizes))
    padded[: values.numel()] = values
    return [part[:size] for part, size in zip(_all_gather(name, padded), sizes)]
