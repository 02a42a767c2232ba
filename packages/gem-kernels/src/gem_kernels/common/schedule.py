"""Which tiles an attention kernel computes, in which order: non-empty ones only, longest first.

A list is built on the device from the offsets, without a host synchronisation: its length there is an upper bound, the true count stays in device
memory. It depends on lengths alone, so the layers of a model share it, and both directions where they tile the same axis by the same size: ``tiles``
keeps the lists of the last few offset tensors.

Besides the rows there is one more, numbered ``rows``: the tokens after the last row. No kernel finds anything to attend to there, so it writes zeros;
the same holds for tokens of a row beyond the given maximum. Every token thus belongs to exactly one tile.
"""

import os
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gem_core.spec import RequestError

RECORD = ("row", "first", "q_start", "q_used", "q_length", "k_start", "k_used", "k_length")
"""Columns of a record, int32: the row, the first token of the tile within it, and where the row's tokens lie; ``used`` stops at the given maximum."""
MAX_TOKENS = 2**30
"""Token numbers are 32-bit, and the copy engine of Hopper counts rows up to this."""
KEPT = 32
"""Lists that are kept. A batch has a few: queries and keys, for each tile size in use."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Rows of queries and keys.

    Args:
        q_offsets: int64 ``[rows + 1]``, or None for ``max_q`` queries that every row shares.
        k_offsets: int64 ``[rows + 1]``, or None for ``max_k`` keys in every row, one row after the other.
        rows: number of rows.
        max_q: queries of a row that are used at most.
        max_k: keys of a row that are used at most.
        q_tokens: tokens of q.
        k_tokens: tokens of k, over all rows.
        device: where the list is built.
    """

    q_offsets: Tensor | None
    k_offsets: Tensor | None
    rows: int
    max_q: int
    max_k: int
    q_tokens: int
    k_tokens: int
    device: torch.device


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """``records`` int32 ``[bound, 8]`` (see ``RECORD``), of which the first ``count`` (int32 ``[1]``, on the device) are tiles."""

    records: Tensor
    count: Tensor

    @property
    def bound(self) -> int:
        return self.records.shape[0]


def tiles(layout: Layout, axis: str, block: int) -> Tiles:
    """The list of tiles of ``block`` tokens of ``axis`` (``q`` or ``k``), built or remembered.

    Raises:
        RequestError: more tokens than a record can address.
    """
    largest = max(layout.q_tokens, layout.k_tokens)
    if largest > MAX_TOKENS:
        raise RequestError(f"attention over {largest} tokens", f"tile lists address {MAX_TOKENS} tokens", "Split the batch.")
    key = _key(layout, axis, block)
    if key is None:
        return _build(layout, axis, block)
    found = _kept.get(key)
    if found is None:
        for old in [old for old, (owners, _) in _kept.items() if any(owner.expired() for owner in owners)]:  # type: ignore[no-untyped-call]
            del _kept[old]
        owners = tuple(StorageWeakRef(offsets.untyped_storage()) for offsets in _offsets(layout))  # type: ignore[no-untyped-call]
        found = _kept[key] = owners, _build(layout, axis, block)
        if len(_kept) > KEPT:
            _kept.popitem(last=False)
    _kept.move_to_end(key)
    return found[1]


_kept: "OrderedDict[Any, tuple[tuple[StorageWeakRef, ...], Tiles]]" = OrderedDict()


def _offsets(layout: Layout) -> list[Tensor]:
    return [offsets for offsets in (layout.q_offsets, layout.k_offsets) if offsets is not None]


def _key(layout: Layout, axis: str, block: int) -> Any:
    """What a list depends on, by identity and version of the offsets; None where that says nothing: while a CUDA graph is captured, whose replays
    read new values, and for inference tensors, which count no versions.

    The weak references that are kept beside a list hold the storage's address, so that no other tensor can take it.
    """
    found: list[Any] = []
    for offsets in _offsets(layout):
        if offsets.is_inference():
            return None
        found.append((offsets.untyped_storage()._cdata, offsets.storage_offset(), offsets._version))
    stream = None
    if layout.device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return None
        stream = torch.cuda.current_stream(layout.device).cuda_stream
    sizes = (layout.rows, layout.max_q, layout.max_k, layout.q_tokens, layout.k_tokens)
    return (layout.q_offsets is None, *found, *sizes, layout.device, stream, axis, block)


def _build(layout: Layout, axis: str, block: int) -> Tiles:
    q = _spans(layout.q_offsets, layout, layout.max_q, layout.q_tokens, step=0)
    k = _spans(layout.k_offsets, layout, layout.max_k, layout.k_tokens, step=layout.max_k)
    own, other = (q, k) if axis == "q" else (k, q)
    # A tile costs what the other axis of its row holds: ordering the rows orders the tiles.
    order = other[1].argsort(descending=True, stable=True)
    ends = ((own[2] + (block - 1)) // block)[order].cumsum(0)
    slots = torch.arange(_bound(layout, axis, block), device=layout.device)
    at = torch.searchsorted(ends, slots, right=True).clamp_(max=layout.rows)
    # The last tile of a row comes first: under a causal mask it sees most.
    first = (ends[at] - 1 - slots) * block
    columns = torch.stack((torch.arange(layout.rows + 1, device=layout.device), *q, *k), 1)[order][at]
    records = torch.cat((columns[:, :1], first[:, None], columns[:, 1:]), 1).int()
    return Tiles(records, ends[-1:].clamp(max=slots.shape[0]).int())


def _spans(offsets: Tensor | None, layout: Layout, longest: int, tokens: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """First token, used length and whole length (int64 ``[rows + 1]``) of each row and of what lies after the last.

    Rows never reach outside ``[0, tokens)``, whatever the offsets say.
    """
    if offsets is None:
        index = torch.arange(layout.rows + 1, device=layout.device)
        length = torch.where(index < layout.rows, longest, 0)
        return index * step, length, length
    edges = F.pad(offsets.clamp(0, tokens), (0, 1), value=tokens)
    length = edges.diff().clamp_(min=0)
    used = length.clamp(max=longest)
    used[-1:] = 0
    return edges[:-1], used, length


def _bound(layout: Layout, axis: str, block: int) -> int:
    """Most tiles that lengths of this total can make."""
    offsets, longest, tokens = (layout.q_offsets, layout.max_q, layout.q_tokens) if axis == "q" else (layout.k_offsets, layout.max_k, layout.k_tokens)
    return layout.rows * -(-longest // block) if offsets is None else tokens // block + layout.rows + 1


@cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def programs(items: int, resident: int, device: torch.device, *, persistent: bool = False) -> int:
    """Grid of a kernel over ``items``: one program each, or, ``persistent`` or with reserved SMs, as many as the SMs left to it hold at once.

    ``GEM_RESERVED_SMS=n`` in the environment keeps the room of ``n`` SMs free, so that a collective gets to run beside a long kernel.

    Args:
        items: tiles times heads.
        resident: programs that one SM holds.
        device: where the kernel runs.
        persistent: programs stride over the items in any case.

    Raises:
        RequestError: ``GEM_RESERVED_SMS`` is no number of SMs that leaves one.
    """
    if device.type != "cuda":
        return items
    text = os.environ.get("GEM_RESERVED_SMS", "0")
    if text == "0" and not persistent:
        return items
    here = _processors(torch.cuda.current_device() if device.index is None else device.index)
    return min(items, available(text, here) * resident)


def available(text: str, processors: int) -> int:
    """SMs that ``GEM_RESERVED_SMS=text`` leaves of ``processors``."""
    if not text.isdecimal() or int(text) >= processors:
        raise RequestError(f"GEM_RESERVED_SMS={text}", f"the device has {processors} SMs", f"Give a number from 0 to {processors - 1}.")
    return processors - int(text)
