"""Which tiles an attention kernel computes, in which order: non-empty ones only, longest first.

A list is built on the device from the offsets (``tile_lists``), without a host synchronisation: its length there is an upper bound, the true count
stays in device memory. It depends on lengths alone, so the layers of a model share it, and both directions where they tile the same axis by the same
size: ``tiles`` keeps the lists of the last few offset tensors. Calls that one CUDA graph captures share lists among themselves.

Besides the rows there is one more, numbered ``rows``: the tokens after the last row. No kernel finds anything to attend to there, so it writes zeros;
the same holds for tokens of a row beyond the given maximum. Every token thus belongs to exactly one tile.
"""

import os
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gem_core.spec import RequestError
from gem_kernels.common.capture import current

RECORD = ("row", "first", "q_start", "q_used", "q_length", "k_start", "k_used", "k_length")
"""Columns of a record, int32: the row, the first token of the tile within it, and where the row's tokens lie; ``used`` stops at the given maximum."""
MAX_TOKENS = 2**30
"""Numbers of tokens and tiles are 32-bit, and the copy engine of Hopper counts rows up to this."""
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
        RequestError: more tokens or tiles than a record can address.
    """
    bound = _bound(layout, axis, block)
    largest = max(layout.q_tokens, layout.k_tokens)
    if max(largest, bound) > MAX_TOKENS:
        asked = f"attention over {largest} tokens in up to {bound} tiles"
        raise RequestError(asked, f"tile lists address {MAX_TOKENS} of each", "Split the batch.")
    key = _key(layout, axis, block)
    if key is None:
        return _build(layout, axis, block, bound)
    _forget_other_captures(key[0])
    found = _kept.get(key)
    if found is None:
        for old in [old for old, (owners, _) in _kept.items() if any(owner.expired() for owner in owners)]:  # type: ignore[no-untyped-call]
            del _kept[old]
        owners = tuple(StorageWeakRef(offsets.untyped_storage()) for offsets in _offsets(layout))  # type: ignore[no-untyped-call]
        found = _kept[key] = owners, _build(layout, axis, block, bound)
        if len(_kept) > KEPT:
            _kept.popitem(last=False)
    _kept.move_to_end(key)
    return found[1]


_kept: "OrderedDict[Any, tuple[tuple[StorageWeakRef, ...], Tiles]]" = OrderedDict()
_last_capture = 0
"""Of the last call that had a key."""


def _forget_other_captures(capture: int) -> None:
    """Drop what is kept of captures other than the one a call belongs to, so that their graphs' memory is not held longer."""
    global _last_capture
    if capture != _last_capture:
        for old in [key for key in _kept if key[0] not in (0, capture)]:
            del _kept[old]
        _last_capture = capture


def _offsets(layout: Layout) -> list[Tensor]:
    return [offsets for offsets in (layout.q_offsets, layout.k_offsets) if offsets is not None]


def _key(layout: Layout, axis: str, block: int) -> Any:
    """What a list depends on, by identity and version of the offsets; None where none is kept: of inference tensors, which count no versions, and
    where ``capture`` says so.

    The first item is the capture, 0 where there is none. A list that is built while a graph is captured is filled at each replay, from what the
    offsets hold then: it is right for the calls of the same capture and for no others.

    The weak references that are kept beside a list hold the storage's address, so that no other tensor can take it.
    """
    found: list[Any] = []
    for offsets in _offsets(layout):
        if offsets.is_inference():
            return None
        found.append((offsets.untyped_storage()._cdata, offsets.storage_offset(), offsets.stride(0), offsets._version))
    stream, capture = current(layout.device)
    if capture is None:
        return None
    sizes = (layout.rows, layout.max_q, layout.max_k, layout.q_tokens, layout.k_tokens)
    return (capture, layout.q_offsets is None, *found, *sizes, layout.device, stream, axis, block)


def _build(layout: Layout, axis: str, block: int, bound: int) -> Tiles:
    return Tiles(*_lists().build(layout, axis, block, bound))


@cache
def _lists() -> Any:
    return import_module("gem_kernels.common.tile_lists")


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
