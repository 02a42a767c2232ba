"""Gluon, and what the Hopper kernels share: tiles of a list, ragged copies, matrix layouts, scores.

Copies are *ragged*: one descriptor serves all rows, and yet a copy ends at its row. Four coordinates address ``[start + i, column]`` of a tensor with
token stride t as ``2^30 (2^34 - t) + (start + length) t + (2^30 - length + i) t``: the multiple of 2^64 bytes vanishes, and the third axis ends where
the row does. Loads past the end give zeros, which no NaN of a neighbour can touch; stores there do nothing.
"""

# Kernels are compiled from their source and carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gem_kernels.common.hopper.gluon import gl, gluon, mbarrier, tma

END = gl.constexpr(2**30)


@gluon.jit
def read_tile(records, item, heads):
    """The columns of ``schedule.RECORD`` of an item, which is a tile and a head, and the head."""
    base = records + item // heads * 8
    row = gl.load(base)
    first = gl.load(base + 1)
    q_start = gl.load(base + 2)
    q_used = gl.load(base + 3)
    q_length = gl.load(base + 4)
    k_start = gl.load(base + 5)
    k_used = gl.load(base + 6)
    k_length = gl.load(base + 7)
    return row, first, q_start, q_used, q_length, k_start, k_used, k_length


@gluon.jit
def keys_seen(first, q_used, k_used, window, BLOCK: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """First and past-the-last key that queries ``[first, first + BLOCK)`` see; none where no query of the tile is used."""
    position = first + k_used - q_used
    begin = k_used * 0
    end = gl.where(first < q_used, k_used, 0)
    if CAUSAL:
        end = gl.minimum(end, position + BLOCK)
    if WINDOW:
        begin = gl.maximum(position - window, 0)
        end = gl.minimum(end, position + BLOCK + window)
    return begin, end


@gluon.jit
def queries_seeing(first, q_used, k_used, window, BLOCK: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """First and past-the-last query that sees some of the keys ``[first, first + BLOCK)``; none where no key of the tile is used."""
    here = first + q_used - k_used
    begin = q_used * 0
    end = gl.where(first < k_used, q_used, 0)
    if CAUSAL:
        begin = gl.maximum(here, 0)
    if WINDOW:
        begin = gl.maximum(begin, here - window)
        end = gl.minimum(end, here + BLOCK + window)
    return begin, end


@gluon.jit
def copies(begin, end, BLOCK: gl.constexpr):
    """How many blocks cover ``[begin, end)``."""
    return gl.maximum(end - begin + BLOCK - 1, 0) // BLOCK


@gluon.jit
def load(desc, start, length, i, column, barrier, buffer):
    """Ragged copy of a block from token ``i`` of a row into shared memory; ``barrier`` expects all its bytes, zeros included."""
    tma.async_copy_global_to_shared(desc, [END, start + length, END - length + i, column], barrier, buffer)


@gluon.jit
def store(desc, start, length, i, column, buffer):
    """Ragged copy of a block from shared memory to token ``i`` of a row and on."""
    tma.async_copy_shared_to_global(desc, [END, start + length, END - length + i, column], buffer)


@gluon.jit
def release(free, buffer, used):
    """Give back the memory through which the results of the tile before left, once they have."""
    tma.store_wait(0)
    mbarrier.arrive(free.index(buffer), count=1, pred=used)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """``COUNT`` barriers that wait for ``ARRIVALS`` each."""
    found = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(found.index(i), count=ARRIVALS)
    return found


@gluon.jit
def hide(s, queries, keys, k_used, window, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, value):
    """``value`` where a query (by its position) does not see a key."""
    seen = keys < k_used
    distance = queries - keys
    if CAUSAL:
        seen = seen & (distance >= 0)
    if WINDOW:
        seen = seen & (distance <= window) & (distance >= -window)
    return gl.where(seen, s, value)


@gluon.constexpr_function
def accumulator(N):
    """Registers of a ``[64, N]`` result of one warpgroup."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
