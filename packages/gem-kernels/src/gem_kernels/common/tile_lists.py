"""Lists of tiles, built on the device in two launches: where each row's tiles go, then the tiles. ``schedule`` says what a list holds.

Up to ``COUNTED`` rows each row counts the rows before it, without a sort; more are sorted by torch.
"""

# Kernels are compiled from their source and carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gem_kernels.common import launcher
from gem_kernels.common.language import tl, triton

if TYPE_CHECKING:
    from gem_kernels.common.schedule import Layout

COUNTED = 4096
"""Counting takes the square of the rows."""
ROWS, OTHERS, WARPS = 8, 512, 8
"""Of a program that counts: its rows, how many others it looks at in one step, warps."""
SLOTS = 128
"""Of a program that writes."""
_VARYING = (
    *("rows", "own_longest", "own_tokens", "other_longest", "other_tokens", "q_longest", "q_tokens", "k_longest", "k_tokens"),
    *("block", "bound", "steps"),
)


def build(layout: "Layout", axis: str, block: int, bound: int) -> tuple[Tensor, Tensor]:
    """``records`` int32 ``[bound, 8]`` and ``count`` int32 ``[1]`` of ``schedule.Tiles``; records from ``count`` on are not written."""
    device, rows = layout.device, layout.rows
    q_offsets, k_offsets = (x if x is None or x.is_contiguous() else x.contiguous() for x in (layout.q_offsets, layout.k_offsets))
    records = torch.empty(bound, 8, dtype=torch.int32, device=device)
    q, k = (q_offsets, layout.max_q, layout.q_tokens), (k_offsets, layout.max_k, layout.k_tokens)
    order, ends, count = _placed(q, k, rows, block, bound, device) if axis == "q" else _placed(k, q, rows, block, bound, device)
    launcher.launch(
        tiles_kernel, max(-(-bound // SLOTS), 1), device,
        {"q_offsets": q_offsets, "k_offsets": k_offsets, "order": order, "ends": ends, "count": count, "records": records, "rows": rows,
         "q_longest": layout.max_q, "q_tokens": layout.q_tokens, "k_longest": layout.max_k, "k_tokens": layout.k_tokens, "block": block,
         "steps": rows.bit_length(), "SLOTS": SLOTS, "num_warps": 4},
    )  # fmt: skip
    return records, count


_Axis = tuple[Tensor | None, int, int]
"""Offsets, longest row and tokens."""


def _placed(own: _Axis, other: _Axis, rows: int, block: int, bound: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Rows in the order of their tiles, int64 ``[rows + 1]`` with the one after the last, the end of each one's tiles, int64, and the count."""
    given: dict[str, Any] = dict(zip(("own", "own_longest", "own_tokens", "other", "other_longest", "other_tokens"), (*own, *other), strict=True))
    given |= {"rows": rows, "block": block, "num_warps": WARPS}
    first, second = (torch.empty(rows + 1, dtype=torch.int64, device=device) for _ in range(2))
    if rows <= COUNTED:
        count = torch.empty(1, dtype=torch.int32, device=device)
        more = {"order": first, "ends": second, "count": count, "bound": bound, "ROWS": ROWS, "OTHERS": OTHERS}
        launcher.launch(order_kernel, -(-(rows + 1) // ROWS), device, {**given, **more})
        return first, second, count
    launcher.launch(costs_kernel, -(-(rows + 1) // OTHERS), device, {**given, "costs": first, "tiles": second, "ROWS": OTHERS})
    order = first.argsort(descending=True, stable=True)
    ends = second[order].cumsum(0)
    return order, ends, ends[-1:].clamp(max=bound).int()


@triton.jit
def _spans(offsets, row, rows, longest, tokens, STEP: tl.constexpr):
    """First token, used length and whole length (int32) of each row, and of what lies after the last as row ``rows``; nothing can be said past that.

    Rows never reach outside ``[0, tokens)``, whatever the offsets say. Without offsets each row has ``longest`` tokens: its own with ``STEP``, else
    the same for all.
    """
    if offsets is None:
        start = row * (longest if STEP else 0)
        length = tl.where(row < rows, longest, 0)
        used = length
    else:
        start = tl.load(offsets + row, mask=row <= rows, other=0)
        end = tl.load(offsets + row + 1, mask=row < rows, other=tokens)
        start = tl.minimum(tl.maximum(start, 0), tokens).to(tl.int32)
        end = tl.minimum(tl.maximum(end, 0), tokens).to(tl.int32)
        length = tl.maximum(end - start, 0)
        used = tl.where(row < rows, tl.minimum(length, longest), 0)
    return start, used, length


@triton.jit
def _costs(own, other, row, rows, own_longest, own_tokens, other_longest, other_tokens, block):
    """What each tile of a row costs, and how many it has; past the last row nothing costs anything."""
    _, cost, _ = _spans(other, row, rows, other_longest, other_tokens, False)
    _, _, length = _spans(own, row, rows, own_longest, own_tokens, False)
    return cost, tl.cdiv(length, block)


@triton.jit(do_not_specialize=_VARYING)
def costs_kernel(own, other, costs, tiles, rows, own_longest, own_tokens, other_longest, other_tokens, block, ROWS: tl.constexpr):
    """Costs and tiles of ``ROWS`` rows, int64 ``[rows + 1]``."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cost, found = _costs(own, other, row, rows, own_longest, own_tokens, other_longest, other_tokens, block)
    tl.store(costs + row, cost, mask=row <= rows)
    tl.store(tiles + row, found, mask=row <= rows)


@triton.jit(do_not_specialize=_VARYING)
def order_kernel(
    own, other, order, ends, count, rows, own_longest, own_tokens, other_longest, other_tokens, block, bound, ROWS: tl.constexpr,
    OTHERS: tl.constexpr,
):  # fmt: skip
    """Each row's place, dearer ones first and of equal ones the first, and the end of its tiles there. What lies after the last row costs nothing and
    comes last, so its end is the count."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cost, own_tiles = _costs(own, other, row, rows, own_longest, own_tokens, other_longest, other_tokens, block)
    places = tl.zeros([ROWS, OTHERS], tl.int32)
    sums = tl.zeros([ROWS, OTHERS], tl.int64)  # wrong offsets may make more tiles than 32 bits count
    for begin in range(0, rows, OTHERS):
        each = begin + tl.arange(0, OTHERS)
        costs, tiles = _costs(own, other, each, rows, own_longest, own_tokens, other_longest, other_tokens, block)
        before = (costs[None, :] > cost[:, None]) | ((costs[None, :] == cost[:, None]) & (each[None, :] < row[:, None]))
        places += before.to(tl.int32)
        sums += tl.where(before, tiles[None, :], 0)
    place = tl.sum(places, 1)
    end = tl.sum(sums, 1) + own_tiles
    tl.store(order + place, row, mask=row <= rows)
    tl.store(ends + place, end, mask=row <= rows)
    tl.store(count + row * 0, tl.minimum(end, bound).to(tl.int32), mask=row == rows)


@triton.jit(do_not_specialize=_VARYING)
def tiles_kernel(
    q_offsets, k_offsets, order, ends, count, records, rows, q_longest, q_tokens, k_longest, k_tokens, block, steps, SLOTS: tl.constexpr
):  # fmt: skip
    """``SLOTS`` records. The row of each is the first in order whose tiles end behind it, found in ``steps`` halvings of ``rows + 1``."""
    slot = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    here = slot < tl.load(count)
    low = tl.zeros([SLOTS], tl.int32)
    high = low + rows
    for _ in range(steps):
        middle = (low + high) // 2
        behind = tl.load(ends + middle, mask=here, other=0) <= slot
        low = tl.where(behind, middle + 1, low)
        high = tl.where(behind, high, middle)
    row = tl.load(order + low, mask=here, other=0).to(tl.int32)
    # The last tile of a row comes first: under a causal mask it sees most.
    first = (tl.load(ends + low, mask=here, other=0) - 1 - slot) * block
    q_start, q_used, q_length = _spans(q_offsets, row, rows, q_longest, q_tokens, False)
    k_start, k_used, k_length = _spans(k_offsets, row, rows, k_longest, k_tokens, True)
    at = records + slot * 8
    tl.store(at, row, mask=here)
    tl.store(at + 1, first.to(tl.int32), mask=here)
    tl.store(at + 2, q_start, mask=here)
    tl.store(at + 3, q_used, mask=here)
    tl.store(at + 4, q_length, mask=here)
    tl.store(at + 5, k_start, mask=here)
    tl.store(at + 6, k_used, mask=here)
    tl.store(at + 7, k_length, mask=here)
