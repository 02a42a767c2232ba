"""y = gate x + residual and its gradients over flat tensors: each element is read once and written once."""

# Kernels are compiled from their source and carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gem_kernels.common.language import tl, triton

# ``count`` is specialised: behind a mask that ends where no one knows, the compiler loads 16-bit values one by one, not eight at once.
_VARYING = ["tiles"]


@triton.jit(do_not_specialize=_VARYING)
def forward_kernel(x, gate, residual, out, count, tiles, BLOCK: tl.constexpr):
    """``out [count]``; all tensors are contiguous."""
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        mask = at < count
        y = tl.load(gate + at, mask=mask).to(tl.float32) * tl.load(x + at, mask=mask).to(tl.float32)
        y += tl.load(residual + at, mask=mask).to(tl.float32)
        tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_VARYING)
def backward_kernel(x, gate, dy, dx, dgate, count, tiles, BLOCK: tl.constexpr):
    """``dx [count]`` and ``dgate [count]``; the residual's gradient is ``dy`` itself."""
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        mask = at < count
        g = tl.load(dy + at, mask=mask).to(tl.float32)
        tl.store(dx + at, (g * tl.load(gate + at, mask=mask).to(tl.float32)).to(dx.dtype.element_ty), mask=mask)
        tl.store(dgate + at, (g * tl.load(x + at, mask=mask).to(tl.float32)).to(dgate.dtype.element_ty), mask=mask)
