"""Calls of attention whose inputs are parts of one tensor, and the same calls with contiguous copies of them."""

import torch
from gem_kernels_portable import offsets_of

from gem_core.ops.packed import unbind_packed
from gem_core.spec import load_object
from gem_core.testing import poisoned_memory
from gem_kernels.plugin import gem_kernel_impls

LENGTHS = (5, 0, 20)
FEW = (4, 0, 3)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def kernel_of(op, backend):
    """Without the checks of the public function: rows may be cut."""
    (impl,) = [impl for impl in gem_kernel_impls() if impl.op == op and impl.backend == backend]
    return load_object(impl.load)


def block(parts, offsets, longest, *, backend="triton", rope=False, gains=False):
    q, k, v = parts
    options = {"rope": normal(q.shape[0], q.shape[2] // 2, seed=3)} if rope else {}
    options |= {name: normal(q.shape[2], dtype=q.dtype, seed=4) for name in ("q_gain", "k_gain") if gains}
    return kernel_of("block_attention", backend)(q, k, v, offsets, max_length=longest, block=16, **options)


def jagged(parts, offsets, longest, *, backend="triton", window=None, causal=False):
    return kernel_of("jagged_attention", backend)(*parts, offsets, offsets, max_q=longest, max_k=longest, window=window, causal=causal)


def cross(parts, offsets, longest, *, backend="triton", shared=False):
    """Queries of their own, with a head for each two; or one for all rows."""
    rows, (_, heads, dim) = offsets.shape[0] - 1, parts[0].shape
    q = normal(3 if shared else 3 * rows, 2 * heads, dim, dtype=parts[0].dtype, seed=5).requires_grad_()
    q_offsets = None if shared else torch.arange(rows + 1, device=DEVICE) * 3
    return kernel_of("jagged_attention", backend)(q, *parts, q_offsets, offsets, max_q=3, max_k=longest)


def pooled(parts, offsets, longest, *, backend="triton", seeds=5, group=1):
    _, heads, dim = parts[0].shape
    q = normal(seeds, group * heads, dim, dtype=parts[0].dtype, seed=6).requires_grad_()
    return kernel_of("pooled_attention", backend)(q, *parts, offsets, max_k=longest)


def hstu(parts, offsets, longest, *, backend="triton"):
    gate, v, q, k = parts
    return gate * kernel_of("hstu_attention", backend)(q, k, v, offsets, max_length=longest, norm_length=4)


CASES = {
    "block": (block, 3, {}),
    "block rope": (block, 3, {"rope": True}),
    "jagged": (jagged, 3, {}),
    "jagged window": (jagged, 3, {"window": 7, "causal": True}),
    "cross": (cross, 2, {}),
    "cross shared": (cross, 2, {"shared": True}),
    "pooled": (pooled, 2, {}),
    "pooled many seeds": (pooled, 2, {"seeds": 40}),
    "pooled groups": (pooled, 2, {"group": 2}),
    "hstu": (hstu, 4, {}),
}


def run(call, parts):
    """The output, with gradients of ``parts`` as hooks on them saw them."""
    seen = [None] * len(parts)
    for i, part in enumerate(parts):
        part.register_hook(lambda grad, i=i: seen.__setitem__(i, grad))
    with poisoned_memory():
        out = call(parts)
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=DEVICE).view(out.shape).cos().to(out.dtype))
    return out.detach(), seen


def both(case, lengths=LENGTHS, *, heads=2, dim=16, dtype=torch.float32, base=None, longest=None, behind=0, backend="triton"):
    """Gradients of the parts of one tensor, the gradient of that tensor, and gradients of contiguous copies; outputs have the same bits."""
    function, count, options = CASES[case]
    offsets, tokens = offsets_of(lengths).to(DEVICE), sum(lengths) + behind
    longest = max(lengths, default=0) if longest is None else longest

    def call(parts):
        return function(parts, offsets, longest, backend=backend, **options)

    base = normal(tokens, count, heads, dim, dtype=dtype) if base is None else base
    packed = base.clone(memory_format=torch.preserve_format).requires_grad_()
    reached = []
    whole = packed.view_as(packed)
    whole.register_hook(reached.append)
    out, seen = run(call, unbind_packed(whole))
    copies = [part.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for part in base.unbind(1)]
    expected, grads = run(call, copies)
    assert torch.equal(out, expected)
    return seen, reached[0], grads


def assert_side_by_side(case, **options):
    seen, whole, grads = both(case, **options)
    assert whole.is_contiguous()
    assert all(map(torch.equal, whole.unbind(1), grads))
    for i, (part, grad) in enumerate(zip(seen, grads, strict=True)):
        place = whole.select(1, i)
        if whole.numel() and not (CASES[case][0] is hstu and i == 0):  # the gradient of the gate is not the kernel's
            assert (part.data_ptr(), part.stride()) == (place.data_ptr(), place.stride())
        assert torch.equal(part, grad)
