"""The tensors of a checkpoint by logical name: which part of each one this process keeps, and how torch.distributed.checkpoint plans over the parts.

Names say what a tensor is, never where it lies: ``dense/model/PARAMETER``, ``dense/optimizer/SLOT/PARAMETER``, ``dense/average/PARAMETER`` and
``tables/TABLE/TENSOR``.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from gem_core.spec import TableSlice

PIECE_BYTES = 128 << 20
"""Longer runs of rows are written as several pieces, so that several threads write and read them."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor: its first index in each dimension, and its values."""

    offsets: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Pieces:
    """What this process keeps of one tensor.

    Args:
        shape: of the whole tensor.
        dtype: of the whole tensor.
        parts: boxes that do not overlap; there may be none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[Piece] = field(default_factory=list)

    def chunks(self) -> list[ChunkStorageMetadata]:
        """Where the parts lie, as torch.distributed.checkpoint describes it."""
        return [ChunkStorageMetadata(offsets=torch.Size(part.offsets), sizes=part.tensor.shape) for part in self.parts]

    def at(self, offsets: Sequence[int] | None) -> Tensor:
        """The part that begins there."""
        return next(part.tensor for part in self.parts if part.offsets == tuple(offsets or ()))


def pieces_of(tensor: Tensor) -> Pieces:
    """A whole tensor, or this process's shard of a distributed one."""
    if isinstance(tensor, DTensor):
        held: Any = tensor.detach()
        chunks: list[ChunkStorageMetadata] = held.__create_chunk_list__()
        local: Tensor = held.to_local()
        return Pieces(tuple(tensor.shape), tensor.dtype, [Piece(tuple(chunk.offsets), local) for chunk in chunks if math.prod(chunk.sizes)])
    return Pieces(tuple(tensor.shape), tensor.dtype, [Piece((0,) * tensor.dim(), tensor.detach())])


def dense_pieces(tensors: Mapping[str, Tensor], *, leads: bool) -> dict[str, Pieces]:
    """Dense tensors to save. Plain ones are the same on every rank, so the first rank (``leads``) saves them; sharded ones are saved by all."""
    return {name: pieces_of(tensor) for name, tensor in tensors.items() if leads or isinstance(tensor, DTensor)}


def table_pieces(slices: Sequence[TableSlice]) -> dict[str, Pieces]:
    """Slices of tables by ``tables/TABLE/TENSOR``."""
    out: dict[str, Pieces] = {}
    for piece in slices:
        held = out.setdefault(f"tables/{piece.table}/{piece.name}", Pieces(piece.shape, piece.tensor.dtype))
        held.parts.append(Piece((piece.start, *(piece.column for _ in piece.shape[1:])), piece.tensor))
    return out


def divided(pieces: Mapping[str, Pieces]) -> dict[str, Pieces]:
    """The same tensors in parts of at most ``PIECE_BYTES`` (one row at least)."""
    return {name: Pieces(held.shape, held.dtype, [p for part in held.parts for p in _divide(part)]) for name, held in pieces.items()}


def _divide(part: Piece) -> Iterator[Piece]:
    if part.tensor.dim() == 0 or part.tensor.nbytes <= PIECE_BYTES:
        yield part
        return
    rows = part.tensor.shape[0]
    step = max(1, PIECE_BYTES // (part.tensor.nbytes // rows))
    for first in range(0, rows, step):
        yield Piece((part.offsets[0] + first, *part.offsets[1:]), part.tensor[first : first + step])


class HostCopy:
    """Copies of pieces in host memory, from which a background thread writes while training changes the originals.

    The memory is kept from one call to the next, and pinned where it is filled from a GPU.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def take(self, pieces: Mapping[str, Pieces]) -> dict[str, Pieces]:
        """The pieces as they are now; overwrites what the call before gave."""
        on_gpu = any(part.tensor.is_cuda for held in pieces.values() for part in held.parts)
        if on_gpu:
            torch.cuda.synchronize()  # an engine may still be writing on a stream of its own
        out = {name: Pieces(held.shape, held.dtype, [self._copy(name, part) for part in held.parts]) for name, held in pieces.items()}
        wanted = {(name, part.offsets) for name, held in pieces.items() for part in held.parts}
        self._kept = {key: kept for key, kept in self._kept.items() if key in wanted}  # ids begin elsewhere each time
        if on_gpu:
            torch.cuda.synchronize()  # the copies are asynchronous
        return out

    def _copy(self, name: str, part: Piece) -> Piece:
        source, key = part.tensor, (name, part.offsets)
        kept = self._kept.get(key)
        if kept is None or kept.shape != source.shape or kept.dtype != source.dtype:
            kept = self._kept[key] = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        kept.copy_(source, non_blocking=True)
        return Piece(part.offsets, kept)


class PiecePlanner(DefaultSavePlanner):
    """Plans the writing of ``Pieces``. The default planner leaves one copy of a part that several ranks offer, and refuses parts that overlap."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([item for name, held in self.state_dict.items() for item in _write_items(name, held)])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        held: Pieces = self.state_dict[index.fqn]
        return held.at(index.offset)


def _write_items(name: str, held: Pieces) -> list[WriteItem]:
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=held.dtype), size=torch.Size(held.shape)),
        )
        for chunk in held.chunks()
    ]


class PieceLoader(LoadPlanner):
    """Plans the filling of ``Pieces`` in place, each from the saved parts that it overlaps."""

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self._wanted: dict[str, Pieces] = state_dict
        self._saved: dict[str, Any] = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, held in self._wanted.items():
            saved = self._saved[name]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, saved, held.chunks())
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError("a checkpoint of pieces holds tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self._wanted[read_item.dest_index.fqn].at(read_item.dest_index.offset)
        return box(target, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: the tensor is the target itself."""


def box(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """The view of a tensor that begins at ``offsets`` and has the shape ``lengths``."""
    return tensor[tuple(slice(first, first + n) for first, n in zip(offsets, lengths, strict=True))] if tensor.dim() else tensor
