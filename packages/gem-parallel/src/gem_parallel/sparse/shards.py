"""Slices of tables as views of fbgemm's buffers, and their way to and from whole tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gem_core.spec import ADAM_BETAS, SparseOptimizer, TableSpec, table_seed, table_state

_SLOTS = {"sgd": (), "rowwise_adagrad": ("state",), "adam": ("exp_avg", "exp_avg_sq")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """The rows ``[start, start + n)`` of a table held by this process: views of its weights and optimiser state, by the names of ``table_state``."""

    table: str
    start: int
    tensors: dict[str, Tensor]

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.tensors["weight"].shape[0])


def slices_of(tbe: Any, tables: Sequence[tuple[str, int]], optimizer: SparseOptimizer) -> list[Slice]:
    """The slices in one fbgemm module; ``tables`` gives name and first row of each of its tables."""
    names = _SLOTS[optimizer.name]
    states = tbe.split_optimizer_states() if names else [()] * len(tables)
    return [
        Slice(table=name, start=start, tensors={"weight": weight.detach(), **dict(zip(names, slots, strict=True))})
        for (name, start), weight, slots in zip(tables, tbe.split_embedding_weights(), states, strict=True)
    ]


def tbe_options(optimizer: SparseOptimizer) -> dict[str, Any]:
    """Keywords of an fbgemm module for the update rule. An id beyond its table aborts; fbgemm's default reads row 0 instead and goes on."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode

    rules = {"sgd": EmbOptimType.EXACT_SGD, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "adam": EmbOptimType.ADAM}
    return {
        "optimizer": rules[optimizer.name],
        "learning_rate": optimizer.lr,
        "eps": optimizer.eps,
        "beta1": ADAM_BETAS[0],
        "beta2": ADAM_BETAS[1],
        "bounds_check_mode": BoundsCheckMode.FATAL,
    }


@torch.no_grad()
def draw(slices: Sequence[Slice], tables: Sequence[TableSpec], seed: int) -> None:
    """Fill the slices with the first weights of ``gem_core.spec.table_seed``, one whole table in memory at a time."""
    for table in tables:
        mine = [piece for piece in slices if piece.table == table.name]
        if mine:
            generator = torch.Generator().manual_seed(table_seed(seed, table.name))
            whole = torch.empty(table.rows, table.dim).uniform_(-table.init_scale, table.init_scale, generator=generator)
            for piece in mine:
                piece.tensors["weight"].copy_(whole[piece.rows])


@torch.no_grad()
def scatter(slices: Sequence[Slice], tables: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Copy whole tables into the slices; optimiser state that is not given starts at zero."""
    for piece in slices:
        whole = tables[piece.table]
        for name, tensor in piece.tensors.items():
            if name in whole:
                tensor.copy_(whole[name][piece.rows])
            else:
                tensor.zero_()


@torch.no_grad()
def gather(slices: Sequence[Slice], tables: Sequence[TableSpec], optimizer: SparseOptimizer, world: int) -> dict[str, dict[str, Tensor]]:
    """Whole tables on the CPU of every rank. Collective over host tensors when ``world`` exceeds 1.

    Each rank writes its rows into zeros, and the ranks' sums are exact.
    """
    out: dict[str, dict[str, Tensor]] = {}
    for table in tables:
        shapes = {name: shape for name, shape in table_state(table, optimizer).items() if name != "step"}
        out[table.name] = {name: torch.zeros(shape) for name, shape in shapes.items()}
        for piece in (piece for piece in slices if piece.table == table.name):
            for name, tensor in piece.tensors.items():
                out[table.name][name][piece.rows] = tensor.cpu()
        if world > 1:
            for whole in out[table.name].values():
                dist.all_reduce(whole)
    return out
