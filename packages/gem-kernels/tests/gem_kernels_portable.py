"""What the tests of the portable kernels share: small calls of each op, and the comparison with float64 and plain torch."""

import torch

from gem_core.spec import load_object
from gem_core.testing import assert_as_accurate, plain_precision, poisoned_memory
from gem_kernels.bench.measure import reference_of
from gem_kernels.bench.workloads import Workload
from gem_kernels.plugin import gem_kernel_impls

OPS = (
    "block_attention",
    "hstu_attention",
    "pooled_attention",
    "norm_linear",
    "add_norm",
    "gated_residual",
    "pffn",
    "jagged_concat",
    "jagged_split",
    "jagged_pad",
    "jagged_unpad",
    "jagged_dense_bmm_add",
)


def offsets_of(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def kernel_of(op):
    (impl,) = [impl for impl in gem_kernel_impls() if impl.op == op and impl.backend == "triton"]
    return load_object(impl.load)


def draw(op, lengths=(5, 0, 34), *, heads=2, dim=16, v_dim=None, dtype=torch.float32, seed=0, **options):
    """A small call of ``op`` whose floating inputs are leaves."""
    g = torch.Generator().manual_seed(seed)

    def leaf(*shape, scale=1.0):
        return (torch.randn(shape, generator=g) * scale).to(dtype).requires_grad_()

    tokens, rows, longest, offsets = sum(lengths), len(lengths), max(lengths, default=0), offsets_of(lengths)
    qkv = {"q": leaf(tokens, heads, dim), "k": leaf(tokens, heads, dim), "v": leaf(tokens, heads, v_dim or dim)}
    own = {**qkv, "offsets": offsets, "max_length": longest}
    calls = {
        "block_attention": own,
        "hstu_attention": own,
        "pooled_attention": {"seeds": leaf(5, heads, dim), "k": qkv["k"], "v": qkv["v"], "k_offsets": offsets, "max_k": longest},
        "norm_linear": {"x": leaf(tokens, 24), "weight": leaf(40, 24, scale=0.2)},
        "add_norm": {name: leaf(tokens, 24) for name in ("x", "residual", "gate")} | {"gamma": leaf(24), "beta": leaf(24)},
        "gated_residual": {name: leaf(tokens, 24) for name in ("x", "gate", "residual")},
        "pffn": {"q0": qkv["q"], "k": leaf(rows, 7, heads, dim, scale=0.3), "v": leaf(rows, 7, heads, dim), "q_offsets": offsets, "max_q": longest},
        "jagged_concat": {"parts": [(leaf(tokens, 3), offsets), (leaf(rows, 3), torch.arange(rows + 1))]},
        "jagged_split": {"values": leaf(2 * tokens, 3), "offsets": 2 * offsets, "part_offsets": [offsets, offsets], "totals": [tokens, tokens]},
        "jagged_pad": {"values": leaf(tokens, 3), "offsets": offsets, "max_length": longest},
        "jagged_unpad": {"dense": leaf(rows, longest, 3), "offsets": offsets, "total": tokens},
        "jagged_dense_bmm_add": {
            "values": leaf(tokens, 24),
            "offsets": offsets,
            "dense": leaf(rows, 24, 40, scale=0.2),
            "bias": leaf(rows, 40),
            "max_length": longest,
        },
    }
    return Workload(op, {**calls[op], **options}, 0, 0.0)


def results(function, work):
    """Outputs and gradients, with an upstream gradient that is the same for every dtype."""
    found = work.call(function)
    outputs = [found] if isinstance(found, torch.Tensor) else [t for t in found if t.is_floating_point()]
    upstream = [torch.linspace(-1, 1, o.numel(), dtype=torch.float64, device=o.device).view(o.shape).cos().to(o.dtype) for o in outputs]
    return [*(o.detach() for o in outputs), *torch.autograd.grad(outputs, work.leaves(), upstream)]


def compare(work, function=None):
    """Hold the op's Triton kernel to the accuracy of plain torch in the same dtype, forward and gradients, with poisoned memory."""
    truth = results(reference_of(work.op), work.cast(torch.float64))
    with plain_precision():
        plain = results(reference_of(work.op), work)
    with poisoned_memory():
        actual = results(function or kernel_of(work.op), work)
    for i, (a, p, t) in enumerate(zip(actual, plain, truth, strict=True)):
        assert_as_accurate(a, p, t, what=f"{work.op}: result {i}")
