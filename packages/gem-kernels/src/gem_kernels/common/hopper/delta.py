"""What softmax subtracts from the gradients of its weights: the sum of ``dout * out`` over a head."""

# Kernels are compiled from their source and carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gem_kernels.common.language import tl, triton


@triton.jit(do_not_specialize=["heads", "tokens"])
def delta_kernel(out, dout, delta, heads, tokens, D: tl.constexpr, BLOCK: tl.constexpr):
    """Write ``delta`` ``[heads, tokens]`` float32 from ``out`` and ``dout`` ``[tokens, heads, D]``; a program takes ``BLOCK`` tokens of a head."""
    head = tl.program_id(0) % heads
    token = tl.program_id(0) // heads * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    at = (token.to(tl.int64) * heads + head)[:, None] * D + tl.arange(0, D)[None, :]
    x = tl.load(out + at, mask=inside[:, None], other=0.0).to(tl.float32)
    y = tl.load(dout + at, mask=inside[:, None], other=0.0).to(tl.float32)
    tl.store(delta + head.to(tl.int64) * tokens + token, tl.sum(x * y, 1), mask=inside)
