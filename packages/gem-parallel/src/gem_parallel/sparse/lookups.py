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


def cut_bags(offsets: Tensor, rows: int, bags: int) -> Tensor:
    """Offsets ``[columns * rows + 1]`` of columns that are cut evenly, across their rows, into so many bags each: ``[columns * bags + 1]``.

    For look-ups that give one vector an id, whatever the bags are: fbgemm gives a warp of the GPU to a bag, and one warp is slow with thousands of
    ids. Synchronises nothing.
    """
    starts = offsets[::rows]  # of the columns, and the end of the last
    steps = torch.arange(bags, device=offsets.device)
    return torch.cat([(starts[:-1, None] + starts.diff()[:, None] * steps // bags).flatten(), starts[-1:]])


def short_bags(columns: KeyedJagged, piece: int) -> Tensor:
    """Offsets ``[columns * bags + 1]`` of bags of at most ``piece`` ids; the columns' own where no row is longer.

    There are as many bags as the column with the most ids needs, and no fewer than rows, so that single ids stay apart.
    """
    if max(columns.max_lengths, default=0) <= piece:
        return columns.offsets
    most = max(end - start for start, end in zip(columns.starts, columns.starts[1:], strict=False))
    return cut_bags(columns.offsets, columns.rows, max(columns.rows, -(-most // piece)))


def shorten_bags(tbe: Any, args: tuple[Any, ...], words: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A hook before forward of an fbgemm module that looks up id by id and is called with ``indices`` and ``offsets``: longer bags are cut.

    The host does not know how many ids each column has. Where rows hold more than ``PIECE`` ids in the mean, there are as many bags as make the mean
    one half of a piece: columns of twice the mean get bags of ``PIECE`` ids.
    """
    columns = len(tbe.feature_table_map)
    rows, ids = (words["offsets"].numel() - 1) // columns, words["indices"].numel()
    if ids <= PIECE * columns * rows:
        return None
    return args, words | {"offsets": cut_bags(words["offsets"], rows, -(-2 * ids // (PIECE * columns)))}


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
