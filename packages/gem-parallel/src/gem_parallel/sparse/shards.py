"""Slices of tables as views of fbgemm's buffers, and their way to and from whole tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gem_core.ops.first_weights import draw_rows
from gem_core.spec import ADAM_BETAS, SparseOptimizer, TableSlice, TableSpec, table_seed, table_state

_SLOTS = {"sgd": (), "rowwise_adagrad": ("state",), "adam": ("exp_avg", "exp_avg_sq")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A part of a table held by this process: views of its weights and optimiser state, by the names of ``table_state``.

    Args:
        table: the table's name.
        start: the first row; the part has as many rows as its weights.
        tensors: the views.
        column: the first column of the weights, and of state that has their width.
        saves: False where another process holds the same part and hands it over.
    """

    table: str
    start: int
    tensors: dict[str, Tensor]
    column: int = 0
    saves: bool = True

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.tensors["weight"].shape[0])

    def region(self, tensor: Tensor) -> tuple[slice, ...]:
        """Where one of the views lies in its whole tensor."""
        return (self.rows, *(slice(self.column, self.column + width) for width in tensor.shape[1:]))


def slices_of(tbe: Any, tables: Sequence[tuple[str, int, int]], optimizer: SparseOptimizer, *, saves: bool) -> list[Slice]:
    """The slices in one fbgemm module; ``tables`` gives name, first row and first column of each of its tables."""
    names = _SLOTS[optimizer.name]
    states = tbe.split_optimizer_states() if names else [()] * len(tables)
    return [
        Slice(table=name, start=start, column=column, saves=saves, tensors={"weight": weight.detach(), **dict(zip(names, slots, strict=True))})
        for (name, start, column), weight, slots in zip(tables, tbe.split_embedding_weights(), states, strict=True)
    ]


def tbe_options(optimizer: SparseOptimizer, dtype: str) -> dict[str, Any]:
    """Keywords of an fbgemm module for the update rule. An id beyond its table aborts; fbgemm's default reads row 0 instead and goes on.

    Vectors come out in float32 whatever the rows' format, and updates of 16-bit rows are rounded stochastically.
    """
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode

    rules = {"sgd": EmbOptimType.EXACT_SGD, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "adam": EmbOptimType.ADAM}
    return {
        "optimizer": rules[optimizer.name],
        "learning_rate": optimizer.lr,
        "eps": optimizer.eps,
        "beta1": ADAM_BETAS[0],
        "beta2": ADAM_BETAS[1],
        "bounds_check_mode": BoundsCheckMode.FATAL,
        "output_dtype": SparseType.FP32,
        "stochastic_rounding": dtype != "fp32",
    }


def table_slices(slices: Sequence[Slice], tables: Sequence[TableSpec]) -> list[TableSlice]:
    """The slices tensor by tensor, as a checkpoint takes and fills them."""
    sizes = {table.name: (table.rows, table.dim) for table in tables}
    return [
        TableSlice(
            table=piece.table,
            name=name,
            shape=sizes[piece.table][: tensor.dim()],
            start=piece.start,
            tensor=tensor,
            column=piece.column,
            saves=piece.saves,
        )
        for piece in slices
        for name, tensor in piece.tensors.items()
    ]


def draw(slices: Sequence[Slice], tables: Sequence[TableSpec], seed: int) -> None:
    """Fill the slices with the first weights of ``gem_core.spec.table_seed``, where they lie: no rank draws what it does not keep."""
    specs = {table.name: table for table in tables}
    for piece in slices:
        table = specs[piece.table]
        weight = piece.tensors["weight"]
        draw_rows(weight, seed=table_seed(seed, table.name), scale=table.init_scale, row=piece.start, column=piece.column)


@torch.no_grad()
def scatter(slices: Sequence[Slice], tables: Mapping[str, Mapping[str, Tensor]]) -> int:
    """Copy whole tables into the slices; optimiser state that is not given starts at zero. Returns the updates that the tables have had."""
    for piece in slices:
        whole = tables[piece.table]
        for name, tensor in piece.tensors.items():
            if name in whole:
                tensor.copy_(whole[name][piece.region(tensor)])
            else:
                tensor.zero_()
    return max((int(entry.get("step", 0)) for entry in tables.values()), default=0)


@torch.no_grad()
def gather(
    slices: Sequence[Slice], tables: Sequence[TableSpec], optimizer: SparseOptimizer, world: int, updates: int
) -> dict[str, dict[str, Tensor]]:
    """Whole tables after so many updates, on the CPU of every rank. Collective over host tensors when ``world`` exceeds 1.

    Each rank writes its rows into zeros, and the ranks' sums are exact.
    """
    out: dict[str, dict[str, Tensor]] = {}
    for table in tables:
        shapes = {name: shape for name, shape in table_state(table, optimizer).items() if name != "step"}
        out[table.name] = {name: torch.zeros(shape) for name, shape in shapes.items()}
        for piece in (piece for piece in slices if piece.table == table.name and piece.saves):
            for name, tensor in piece.tensors.items():
                out[table.name][name][piece.region(tensor)] = tensor.cpu()
        if world > 1:
            for whole in out[table.name].values():
                dist.all_reduce(whole)
        if optimizer.name == "adam":
            out[table.name]["step"] = torch.tensor(updates)
    return out
