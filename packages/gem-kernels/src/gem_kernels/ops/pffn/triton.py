"""The norms around the personalised feed-forward block: y = RMSNorm(o + LayerNorm(q0)) + q0, and its gradients, a pass over memory each.

The norms are over whole tokens, ``WIDTH`` values of all heads, without scale and shift; all tensors of tokens are contiguous ``[total, WIDTH]``.
A tile is ``ROWS`` tokens of the whole batch, whatever rows they belong to. Only the first pass looks for the row of a token, among the offsets,
while the token itself is on its way from memory; what the other passes need of it is the sign of a number that they read anyway. A list of tiles, as
attention has, ends a tile where a row ends: rows of 50 tokens would leave a part of every tile empty.

``stats`` float32 ``[2, total]`` holds what LayerNorm multiplies each token by and the mean that it takes off before, so that no other pass sums for
them. The first is ``UNUSED`` of a token that is past the given maximum of its row or outside every row: it gives zeros and gets zero gradients.
"""

# Kernels are compiled from their source and carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gem_kernels.common.language import tl, triton
from gem_kernels.common.offsets import load_rows, store_rows
from gem_kernels.ops.norm_linear.rows import norm_grad, normalise

_VARYING = ["rows", "total", "max_q", "span", "tiles"]
UNUSED = tl.constexpr(-1.0)
NOWHERE = tl.constexpr(2**62)
PROBES = tl.constexpr(16)


@triton.jit
def _used(token, offsets, rows, max_q, span, ROWS: tl.constexpr):
    """Whether each token is among the first ``max_q`` of its row: the first row that ends behind it.

    Rows are counted off ``span`` at a time, then a ``PROBES``-th of that, down to one. For 1,024 rows three loads wait for each other; eleven
    halvings held the pass at 3.0 TB/s on an H200, where the others, which look for nothing, move 4.1 to 4.4.
    """
    low = tl.zeros([ROWS], tl.int64)  # as many rows end before the token at least
    while span > 0:
        probe = low[:, None] + tl.arange(1, PROBES + 1)[None, :] * span
        ends = tl.load(offsets + probe, mask=probe <= rows, other=NOWHERE)
        low += tl.sum((ends <= token[:, None]).to(tl.int32), 1) * span
        span = span // PROBES
    start = tl.load(offsets + low, mask=low < rows, other=NOWHERE)
    return (token >= start) & (token - start < max_q)


@triton.jit
def _centred(x, mean, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    x = x - mean[:, None]
    if WIDTH != BLOCK:
        x = tl.where((tl.arange(0, BLOCK) < WIDTH)[None, :], x, 0.0)
    return x


@triton.jit
def _layer_norm(x, stats, first, total, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """``LayerNorm(x)``, zero from column ``WIDTH`` on, what it multiplied each token by, and whether the token is used, ``[ROWS, 1]``."""
    token = first + tl.arange(0, ROWS)
    factor = tl.load(stats + token, mask=token < total, other=0.0)
    mean = tl.load(stats + total + token, mask=token < total, other=0.0)
    return _centred(x, mean, WIDTH, BLOCK) * factor[:, None], factor, (factor != UNUSED)[:, None]


@triton.jit(do_not_specialize=_VARYING)
def norm_kernel(
    q0, offsets, ln, stats, rows, total, max_q, span, tiles, eps,
    HALVES: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``ln = LayerNorm(q0)`` and ``stats``.

    HALVES: ``ln`` is ``[total, heads, 2 DIM]``, of each head what rounding makes of it, and beside that what rounding has lost.
    """
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        first = tile * ROWS
        token = first + tl.arange(0, ROWS)
        x = load_rows(q0, first, total, WIDTH, ROWS, WIDTH, BLOCK).to(tl.float32)
        used = _used(token, offsets, rows, max_q, span, ROWS)
        mean = tl.sum(x, 1) * (1.0 / WIDTH)
        n, factor = normalise(_centred(x, mean, WIDTH, BLOCK), eps, False, WIDTH, BLOCK)
        tl.store(stats + token, tl.where(used, factor, UNUSED), mask=token < total)
        tl.store(stats + total + token, mean, mask=token < total)
        if HALVES:
            c = tl.arange(0, BLOCK)
            at = ln + token[:, None] * (2 * WIDTH) + (c + c // DIM * DIM)[None, :]
            mask = (token < total)[:, None] & (c < WIDTH)[None, :]
            high = n.to(ln.dtype.element_ty)
            tl.store(at, high, mask=mask)
            tl.store(at + DIM, (n - high.to(tl.float32)).to(ln.dtype.element_ty), mask=mask)
        else:
            store_rows(ln, n, first, total, WIDTH, ROWS, WIDTH, BLOCK)


@triton.jit(do_not_specialize=_VARYING)
def forward_kernel(o, q0, stats, out, total, tiles, eps, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """``out``, the block's result."""
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        first = tile * ROWS
        q = load_rows(q0, first, total, WIDTH, ROWS, WIDTH, BLOCK).to(tl.float32)
        z = load_rows(o, first, total, WIDTH, ROWS, WIDTH, BLOCK).to(tl.float32)
        ln, _, used = _layer_norm(q, stats, first, total, WIDTH, ROWS, BLOCK)
        n, _ = normalise(z + ln, eps, False, WIDTH, BLOCK)
        store_rows(out, tl.where(used, n + q, 0.0), first, total, WIDTH, ROWS, WIDTH, BLOCK)


@triton.jit(do_not_specialize=_VARYING)
def backward_kernel(o, q0, stats, dy, dz, total, tiles, eps, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """``dz``, the gradient of ``z = o + LayerNorm(q0)``, from ``dy``, that of the result; attention looks at no token that is not used."""
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        first = tile * ROWS
        q = load_rows(q0, first, total, WIDTH, ROWS, WIDTH, BLOCK).to(tl.float32)
        z = load_rows(o, first, total, WIDTH, ROWS, WIDTH, BLOCK).to(tl.float32)
        g = load_rows(dy, first, total, WIDTH, ROWS, WIDTH, BLOCK).to(tl.float32)
        ln, _, _ = _layer_norm(q, stats, first, total, WIDTH, ROWS, BLOCK)
        n, factor = normalise(z + ln, eps, False, WIDTH, BLOCK)
        store_rows(dz, norm_grad(n, factor, g, False, WIDTH), first, total, WIDTH, ROWS, WIDTH, BLOCK)


@triton.jit(do_not_specialize=_VARYING)
def query_grad_kernel(q0, stats, dy, dz, dln, total, tiles, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The gradient of q0, written over ``dz``: ``dy``, and through LayerNorm ``dz`` and ``dln``, what it gets as the queries of attention."""
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        first = tile * ROWS
        q = load_rows(q0, first, total, WIDTH, ROWS, WIDTH, BLOCK).to(tl.float32)
        s = load_rows(dz, first, total, WIDTH, ROWS, WIDTH, BLOCK).to(tl.float32)
        s += load_rows(dln, first, total, WIDTH, ROWS, WIDTH, BLOCK).to(tl.float32)
        g = load_rows(dy, first, total, WIDTH, ROWS, WIDTH, BLOCK).to(tl.float32)
        ln, factor, used = _layer_norm(q, stats, first, total, WIDTH, ROWS, BLOCK)
        store_rows(dz, tl.where(used, norm_grad(ln, factor, s, True, WIDTH) + g, 0.0), first, total, WIDTH, ROWS, WIDTH, BLOCK)
