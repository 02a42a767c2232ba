"""Which tiles of a row an HSTU mask leaves over: tiles that it hides are never visited, tiles that it leaves whole need no mask.

A row of ``n`` tokens is a prefix ``[0, prefix)``, a history up to ``end`` and targets ``[end, n)``. Positions inside a row are 32-bit.
"""

# Kernels are compiled from their source: they carry no types, and branches on compile-time values keep their form.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gem_kernels.common.language import tl, triton
from gem_kernels.common.offsets import row_span


@triton.jit
def row_parts(
    offsets, contextual, targets, row, rows, total, max_length, CONTEXTUAL: tl.constexpr, TARGETS: tl.constexpr
):  # fmt: skip
    """Of one row: first token and the end of what is to be zeroed behind it (int64), tokens used, prefix and end of the history (int32)."""
    start, length = row_span(offsets, row, total)
    behind = start + length
    if row == rows - 1:
        behind = tl.maximum(behind, total)
    n = tl.minimum(length, max_length).to(tl.int32)
    prefix = n * 0
    end = n
    if CONTEXTUAL:
        prefix = tl.minimum(tl.maximum(tl.load(contextual + row), 0), n).to(tl.int32)
    if TARGETS:
        end = n - tl.minimum(tl.maximum(tl.load(targets + row), 0), n).to(tl.int32)
        end = tl.maximum(end, prefix)
    return start, behind, n, prefix, end


@triton.jit
def visible(i, j, prefix, end, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CONTEXTUAL: tl.constexpr, TARGETS: tl.constexpr):
    """Whether query ``i`` sees key ``j``; both are int32 and broadcast against each other."""
    near = i
    if TARGETS:
        near = tl.minimum(i, end)  # every target stands right behind the history
    seen = (j < end) & (i >= 0)
    if CAUSAL:
        seen = seen & (near >= j)
    if WINDOW:
        seen = seen & (near - j <= window) & (j - near <= window)
    if CONTEXTUAL:
        seen = seen | (j < prefix) | ((i < prefix) & (j < end))
    if TARGETS:
        seen = seen | ((i == j) & (i >= end))
    return seen


@triton.jit
def whole_tiles(low, high, full_low, full_high, STEP: tl.constexpr):
    """Tiles of ``[low, high)`` that lie inside ``[full_low, full_high)``, as a span of whole steps from ``low``; empty at ``low`` if none does."""
    first = low + tl.cdiv(tl.maximum(full_low - low, 0), STEP) * STEP
    last = first + tl.maximum(tl.minimum(full_high, high) - first, 0) // STEP * STEP
    none = last <= first
    return tl.where(none, low, first), tl.where(none, low, last)


@triton.jit
def key_spans(
    first, n, prefix, end, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    CONTEXTUAL: tl.constexpr, TARGETS: tl.constexpr,
):  # fmt: skip
    """Keys that a tile of queries from ``first`` on sees: ``[low, high)`` of which ``[whole, whole_end)`` needs no mask, then the keys before
    ``low`` (``[0, head)``) and its own targets ``[own, own_end)``."""
    last = tl.minimum(first + BLOCK_M, n) - 1
    low = first * 0
    full_low = low
    high = end
    full_high = end
    if CAUSAL:
        high = tl.minimum(last + 1, end)
        full_high = tl.minimum(first + 1, end)
    if WINDOW:
        low = tl.maximum(tl.minimum(first, end) - window, 0)
        full_low = tl.maximum(tl.minimum(last, end) - window, 0)
        if not CAUSAL:
            high = tl.minimum(tl.minimum(last, end) + window + 1, end)
            full_high = tl.minimum(tl.minimum(first, end) + window + 1, end)
    if CONTEXTUAL:
        inside = first < prefix
        low = tl.where(inside, 0, low)
        high = tl.where(inside, end, tl.maximum(high, prefix))
        full_high = tl.where(inside, 0, full_high)
    whole, whole_end = whole_tiles(low, high, full_low, full_high, BLOCK_N)
    head = tl.minimum(prefix, low)
    own = tl.maximum(end, first)
    own_end = own
    if TARGETS:
        own_end = last + 1
    return low, high, whole, whole_end, head, own, own_end


@triton.jit
def query_spans(
    first, n, prefix, end, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    CONTEXTUAL: tl.constexpr, TARGETS: tl.constexpr,
):  # fmt: skip
    """Queries that see a tile of keys from ``first`` on; as ``key_spans``. Queries past ``n`` are zeros and need no mask."""
    last = tl.minimum(first + BLOCK_N, n) - 1
    last_history = tl.minimum(last, end - 1)
    low = first * 0
    full_low = low
    high = n
    full_high = tl.cdiv(n, BLOCK_M) * BLOCK_M + BLOCK_M
    if CAUSAL:
        low = first
        full_low = last
    if WINDOW:
        high = tl.minimum(last_history + window + 1, end)
        full_high = tl.minimum(first + window + 1, end)
        if not CAUSAL:
            low = tl.maximum(first - window, 0)
            full_low = tl.maximum(last - window, 0)
    bound = high
    if not WINDOW:
        bound = full_high
    head = tl.minimum(prefix, low)
    own = end
    own_end = end
    if TARGETS:
        full_high = tl.where(last >= end, 0, full_high)
        if WINDOW:
            own_end = tl.where((end - last_history <= window) | (last >= end), n, end)
        alone = first >= end
        low = tl.where(alone, 0, low)
        high = tl.where(alone, 0, high)
        bound = tl.where(alone, 0, bound)
        head = tl.where(alone, 0, head)
        own = tl.where(alone, first, own)
        own_end = tl.where(alone, last + 1, own_end)
    if CONTEXTUAL:
        inside = first < prefix
        low = tl.where(inside, 0, low)
        high = tl.where(inside, n, high)
        full_high = tl.where(inside, 0, full_high)
        head = tl.where(inside, 0, head)
        own_end = tl.where(inside, own, own_end)
    whole, whole_end = whole_tiles(low, bound, full_low, full_high, BLOCK_M)
    return low, high, whole, whole_end, head, own, own_end


@triton.jit
def masked_tiles(low, high, whole, whole_end, head, own, own_end, STEP: tl.constexpr):
    """How many tiles need a mask."""
    return tl.cdiv(head, STEP) + (whole - low) // STEP + tl.cdiv(tl.maximum(high - whole_end, 0), STEP) + tl.cdiv(tl.maximum(own_end - own, 0), STEP)


@triton.jit
def masked_tile(t, low, high, whole, whole_end, head, own, own_end, STEP: tl.constexpr):
    """Start and bound of the ``t``-th tile that needs a mask."""
    start = t * STEP
    bound = head
    u = t - tl.cdiv(head, STEP)
    start = tl.where(u >= 0, low + u * STEP, start)
    bound = tl.where(u >= 0, whole, bound)
    u = u - (whole - low) // STEP
    start = tl.where(u >= 0, whole_end + u * STEP, start)
    bound = tl.where(u >= 0, high, bound)
    u = u - tl.cdiv(tl.maximum(high - whole_end, 0), STEP)
    start = tl.where(u >= 0, own + u * STEP, start)
    bound = tl.where(u >= 0, own_end, bound)
    return start, bound
