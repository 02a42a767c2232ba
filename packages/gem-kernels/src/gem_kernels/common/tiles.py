"""A tile of a list of ``schedule`` inside a Triton kernel, and which keys and queries of its row see each other."""

# Kernels are compiled from their source and carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gem_kernels.common.language import tl, triton


@triton.jit
def read_tile(records, index):
    """The columns of ``schedule.RECORD``, all int64."""
    base = records + index * 8
    row = tl.load(base).to(tl.int64)
    first = tl.load(base + 1).to(tl.int64)
    q_start = tl.load(base + 2).to(tl.int64)
    q_used = tl.load(base + 3).to(tl.int64)
    q_length = tl.load(base + 4).to(tl.int64)
    k_start = tl.load(base + 5).to(tl.int64)
    k_used = tl.load(base + 6).to(tl.int64)
    k_length = tl.load(base + 7).to(tl.int64)
    return row, first, q_start, q_used, q_length, k_start, k_used, k_length


@triton.jit
def keys_seen(first, q_used, k_used, window, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Range of the keys that queries ``[first, first + BLOCK)`` see; empty where the tile has no query that is used."""
    position = first + k_used - q_used
    begin = k_used * 0
    end = tl.where(first < q_used, k_used, 0)
    if CAUSAL:
        end = tl.minimum(end, position + BLOCK)
    if WINDOW:
        begin = tl.maximum(position - window, 0)
        end = tl.minimum(end, position + BLOCK + window)
    return begin, end


@triton.jit
def queries_seeing(first, q_used, k_used, window, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Range of the queries that see some of the keys ``[first, first + BLOCK)``; empty where the tile has no key that is used."""
    here = first + q_used - k_used
    begin = q_used * 0
    end = tl.where(first < k_used, q_used, 0)
    if CAUSAL:
        begin = tl.maximum(here, 0)
    if WINDOW:
        begin = tl.maximum(begin, here - window)
        end = tl.minimum(end, here + BLOCK + window)
    return begin, end


@triton.jit
def sees(distance, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which pairs see each other, by the position of the query less that of the key."""
    if CAUSAL and WINDOW:
        mask = (distance >= 0) & (distance <= window)
    elif CAUSAL:
        mask = distance >= 0
    else:
        mask = (distance <= window) & (distance >= -window)
    return mask
