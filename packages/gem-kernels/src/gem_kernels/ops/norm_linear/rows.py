"""Norms of rows, forward and backward: N(x + residual) gate, each part but the norm optional, or [gate || concat || that]. A program holds whole
rows in registers.

With z the row, n = (z - mean) r (mean is 0 for RMS) and N = n gamma + beta: dgate = dy N and dz = r (g - mean(g) - n mean(g n)) with
g = dy gate gamma, where mean(g) is left out for RMS. Columns' gradients are sums over rows: each of a fixed number of programs adds its rows in
order, the caller adds the programs.
"""

# Kernels are compiled from their source and carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gem_kernels.common.language import tl, triton

_VARYING = ["rows", "tiles"]


@triton.jit
def load_tile(base, first, rows, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """``[ROWS, BLOCK]`` in float32, zeros outside."""
    r = first + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    mask = (r < rows)[:, None] & (c < WIDTH)[None, :]
    return tl.load(base + r[:, None] * stride + c[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_tile(base, tile, first, rows, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Store ``[ROWS, BLOCK]`` up to row ``rows`` and column ``WIDTH``."""
    r = first + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    mask = (r < rows)[:, None] & (c < WIDTH)[None, :]
    tl.store(base + r[:, None] * stride + c[None, :], tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def normalise(z, eps, LAYER: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of ``z``, zero from column ``WIDTH`` on, normed; and the factor r of each row. Zeros stay zeros."""
    if LAYER:
        z = z - (tl.sum(z, 1) * (1.0 / WIDTH))[:, None]
        if WIDTH != BLOCK:
            z = tl.where((tl.arange(0, BLOCK) < WIDTH)[None, :], z, 0.0)
    r = 1.0 / tl.sqrt(tl.sum(z * z, 1) * (1.0 / WIDTH) + eps)
    return z * r[:, None], r


@triton.jit
def norm_grad(n, r, g, LAYER: tl.constexpr, WIDTH: tl.constexpr):
    """Gradient before the norm from the one behind it, ``g``, zero from column ``WIDTH`` on; not meaningful in those columns."""
    dz = g - n * (tl.sum(g * n, 1) * (1.0 / WIDTH))[:, None]
    if LAYER:
        dz = dz - (tl.sum(g, 1) * (1.0 / WIDTH))[:, None]
    return dz * r[:, None]


@triton.jit
def load_columns(base, fallback, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """``[1, BLOCK]`` of a vector in float32, or of the number ``fallback`` where there is none."""
    c = tl.arange(0, BLOCK)
    row = tl.full([BLOCK], fallback, tl.float32)
    if base is not None:
        row = tl.load(base + c, mask=c < WIDTH, other=0.0).to(tl.float32)
    return row[None, :]


@triton.jit(do_not_specialize=_VARYING)
def statistics_kernel(
    x, factors, means, rows, tiles, eps, x_stride,
    LAYER: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What a norm multiplies each row of x by, ``factors [rows]`` float32, and with ``LAYER`` what it takes off before, ``means [rows]`` float32."""
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        first = tile * ROWS
        row = first + tl.arange(0, ROWS)
        z = load_tile(x, first, rows, x_stride, WIDTH, ROWS, BLOCK)
        _, r = normalise(z, eps, LAYER, WIDTH, BLOCK)
        tl.store(factors + row, r, mask=row < rows)
        if LAYER:
            tl.store(means + row, tl.sum(z, 1) * (1.0 / WIDTH), mask=row < rows)


@triton.jit(do_not_specialize=_VARYING)
def forward_kernel(
    x, residual, gamma, beta, gate, concat, out, total, factors, rows, tiles, eps, x_stride, residual_stride, gate_stride, concat_stride,
    LAYER: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``out [rows, WIDTH]``, with ``concat`` ``[rows, 3 WIDTH]``, and unless None ``total``, what was normed, and ``factors [rows]`` float32, what
    the norm multiplied each row by."""
    scale = load_columns(gamma, 1.0, WIDTH, BLOCK)
    shift = load_columns(beta, 0.0, WIDTH, BLOCK)
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        first = tile * ROWS
        z = load_tile(x, first, rows, x_stride, WIDTH, ROWS, BLOCK)
        if residual is not None:
            z += load_tile(residual, first, rows, residual_stride, WIDTH, ROWS, BLOCK)
        if gate is not None:  # all that is read is under way before the sums of a row wait for any
            gates = load_tile(gate, first, rows, gate_stride, WIDTH, ROWS, BLOCK)
        if concat is not None:
            beside = load_tile(concat, first, rows, concat_stride, WIDTH, ROWS, BLOCK)
        if total is not None:
            z = z.to(total.dtype.element_ty).to(tl.float32)  # as backward will read it
            store_tile(total, z, first, rows, WIDTH, WIDTH, ROWS, BLOCK)
        n, r = normalise(z, eps, LAYER, WIDTH, BLOCK)
        if factors is not None:
            row = first + tl.arange(0, ROWS)
            tl.store(factors + row, r, mask=row < rows)
        y = n * scale + shift
        if gate is not None:
            y *= gates
        if concat is None:
            store_tile(out, y, first, rows, WIDTH, WIDTH, ROWS, BLOCK)
        else:
            store_tile(out, gates, first, rows, 3 * WIDTH, WIDTH, ROWS, BLOCK)
            store_tile(out + WIDTH, beside, first, rows, 3 * WIDTH, WIDTH, ROWS, BLOCK)
            store_tile(out + 2 * WIDTH, y, first, rows, 3 * WIDTH, WIDTH, ROWS, BLOCK)


@triton.jit(do_not_specialize=_VARYING)
def backward_kernel(
    x, residual, gamma, beta, gate, factors, dy, dtotal, dbeside, dz, normed, dgamma, dbeta, dgate, dsum, rows, tiles, eps, x_stride, residual_stride,
    gate_stride, dy_stride, dtotal_stride, dbeside_stride,
    LAYER: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GATE_PARTS: tl.constexpr,
):  # fmt: skip
    """``dz [rows, WIDTH]``, with the gradient of what was normed added unless None, ``dgate`` like it if there is a gate, and ``dgamma``, ``dbeta``
    and ``dsum``, the sums of dz over rows, ``[programs, WIDTH]`` float32.

    ``dbeside``, unless None, is a gradient of the gate from elsewhere, and ``dgate`` lies among ``GATE_PARTS`` gradients like it.
    With ``factors [rows]`` float32, ``x`` holds rows that are normed already. ``normed [rows, WIDTH]`` gets N(x + residual), unless None.
    """
    scale = load_columns(gamma, 1.0, WIDTH, BLOCK)
    shift = load_columns(beta, 0.0, WIDTH, BLOCK)
    # Sums of the rows at the same place in each tile: to add the rows of a tile takes all warps.
    scale_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    shift_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    grad_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        first = tile * ROWS
        z = load_tile(x, first, rows, x_stride, WIDTH, ROWS, BLOCK)
        if residual is not None:
            z += load_tile(residual, first, rows, residual_stride, WIDTH, ROWS, BLOCK)
        g = load_tile(dy, first, rows, dy_stride, WIDTH, ROWS, BLOCK)  # early, as in ``forward_kernel``
        if gate is not None:
            gates = load_tile(gate, first, rows, gate_stride, WIDTH, ROWS, BLOCK)
        if dbeside is not None:
            beside = load_tile(dbeside, first, rows, dbeside_stride, WIDTH, ROWS, BLOCK)
        if factors is None:
            n, r = normalise(z, eps, LAYER, WIDTH, BLOCK)
        else:
            row = first + tl.arange(0, ROWS)
            n = z
            r = tl.load(factors + row, mask=row < rows, other=0.0)
        if normed is not None:
            store_tile(normed, n * scale + shift, first, rows, WIDTH, WIDTH, ROWS, BLOCK)
        if gate is not None:
            gate_grad = g * (n * scale + shift)
            if dbeside is not None:
                gate_grad += beside
            store_tile(dgate, gate_grad, first, rows, GATE_PARTS * WIDTH, WIDTH, ROWS, BLOCK)
            g *= gates
        if dgamma is not None:
            scale_sum += g * n
        if dbeta is not None:
            shift_sum += g
        grad = norm_grad(n, r, g * scale, LAYER, WIDTH)
        if dtotal is not None:
            grad += load_tile(dtotal, first, rows, dtotal_stride, WIDTH, ROWS, BLOCK)
        store_tile(dz, grad, first, rows, WIDTH, WIDTH, ROWS, BLOCK)
        if dsum is not None:
            grad_sum += grad
    c = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * WIDTH + c
    if dgamma is not None:
        tl.store(dgamma + at, tl.sum(scale_sum, 0), mask=c < WIDTH)
    if dbeta is not None:
        tl.store(dbeta + at, tl.sum(shift_sum, 0), mask=c < WIDTH)
    if dsum is not None:
        tl.store(dsum + at, tl.sum(grad_sum, 0), mask=c < WIDTH)
