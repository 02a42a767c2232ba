"""Looking rows up so that their gradient is kept for ``step``, and pooling what was looked up."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from gem_core.batch import KeyedJagged
from gem_core.ops.rows import sum_rows

PIECE = 32
"""Ids of a bag that fbgemm looks up without pooling on a GPU, at most: as many as a warp reads at once."""
Sink = list[tuple[Tensor, Tensor]]
"""What backward leaves: addresses ``[n]`` and the gradients ``[n, dim]`` of their rows, once a forward pass."""


@dataclass(frozen=True, slots=True)
class Prefetched:
    """The ids of a batch, on their way to the ranks that keep their rows; ``parts`` has what each group of tables needs to go on."""

    features: KeyedJagged
    parts: Sequence[Any]


def cut_bags(columns: KeyedJagged, piece: int) -> Tensor:
    """Offsets ``[columns * bags + 1]`` of bags of at most ``piece`` ids, for look-ups that give one vector an id, whatever the bags are.

    fbgemm gives a warp of the GPU to a bag, and one warp is slow with thousands of ids: so each column is cut evenly, across its rows, into as many
    bags as the column with the most ids needs, and no fewer than there are rows, so that single ids stay apart. The offsets are left as they are
    where no row is longer than a piece. Synchronises nothing.
    """
    if max(columns.max_lengths, default=0) <= piece:
        return columns.offsets
    most = max(end - start for start, end in zip(columns.starts, columns.starts[1:], strict=False))
    bags = max(columns.rows, -(-most // piece))
    ends = columns.offsets[:: columns.rows]  # of the columns, after the first start
    steps = torch.arange(bags, device=ends.device)
    return torch.cat([(ends[:-1, None] + ends.diff()[:, None] * steps // bags).flatten(), ends[-1:]])


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, addresses: Tensor, sink: Sink) -> Tensor:
        ctx.addresses, ctx.sink = addresses, sink
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.sink.append((ctx.addresses, grad))
        return None, None, None


def keep_gradient(rows: Tensor, addresses: Tensor, sink: Sink) -> Tensor:
    """Looked-up rows ``[unique, dim]``; backward leaves their gradient with their addresses in ``sink`` and sends nothing."""
    if not torch.is_grad_enabled():
        return rows
    out: Tensor = _Kept.apply(rows.requires_grad_(), addresses, sink)  # type: ignore[no-untyped-call]
    return out


def summed(sink: Sink, limit: int, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The addresses of a sink, ascending and each once, with their summed gradients; ``weight`` ``[rows, dim]`` says device and width."""
    if not sink:
        return torch.empty(0, dtype=torch.int64, device=weight.device), weight.new_empty(0, weight.shape[1])
    return sum_rows(torch.cat([a for a, _ in sink]), torch.cat([g for _, g in sink]), limit)


def spread(keys: Sequence[str], pooling: dict[str, str], rows: Tensor, inverse: Tensor, features: KeyedJagged) -> dict[str, Tensor]:
    """The vectors of each key from distinct rows ``[unique, dim]``; ``inverse`` gives the row of each id, key after key."""
    sizes = [features.ids(key).numel() for key in keys]
    return {key: _pool(pooling[key], rows, index, features, key) for key, index in zip(keys, torch.split(inverse, sizes), strict=True)}


def _pool(pooling: str, rows: Tensor, index: Tensor, features: KeyedJagged, key: str) -> Tensor:
    if pooling == "none":
        return rows.index_select(0, index)
    if not index.numel():  # embedding_bag refuses a batch without rows; the empty sum keeps the graph
        return rows.new_zeros(features.rows, rows.shape[1]) + rows[:0].sum(0)
    return embedding_bag(index, rows, features[key].offsets, mode=pooling, include_last_offset=True)
