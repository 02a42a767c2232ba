"""Looking rows up so that their gradient is kept for ``step``, and pooling what was looked up."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from gem_core.batch import KeyedJagged
from gem_core.ops.rows import sum_rows

Sink = list[tuple[Tensor, Tensor]]
"""What backward leaves: addresses ``[n]`` and the gradients ``[n, dim]`` of their rows, once a forward pass."""


@dataclass(frozen=True, slots=True)
class Prefetched:
    """The ids of a batch, on their way to the ranks that keep their rows; ``parts`` has what each group of tables needs to go on."""

    features: KeyedJagged
    parts: Sequence[Any]


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
