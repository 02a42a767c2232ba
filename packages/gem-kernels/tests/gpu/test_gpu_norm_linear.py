"""norm_linear on CUDA at the widths and row counts that fill its tiles and keep its programs busy with several."""

import pytest
import torch

from gem_core.ops.norm_linear import reference
from gem_core.testing import assert_as_accurate, plain_precision, poisoned_memory

pytest.importorskip("triton")

from gem_kernels.ops.norm_linear.launch import norm_linear

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def results(function, x, weight, options, leaves):
    found = function(x, weight, **options)
    outputs = list(found) if isinstance(found, tuple) else [found]
    upstream = [torch.linspace(-1, 1, o.numel(), dtype=torch.float64, device="cuda").view(o.shape).to(o.dtype) for o in outputs]
    return [*(o.detach() for o in outputs), *torch.autograd.grad(outputs, leaves, upstream)]


def draw(rows, width, where, everything, norm, dtype):
    g = torch.Generator("cuda").manual_seed(0)

    def leaf(*shape, scale=1.0):
        return (torch.randn(shape, generator=g, device="cuda") * scale).to(dtype).requires_grad_()

    named = {"x": leaf(rows, width), "weight": leaf(width, width, scale=width**-0.5)}
    if everything:
        named |= {"bias": leaf(width), "gamma": leaf(width), "residual": leaf(rows, width)}
        named |= {"beta": leaf(width)} if norm == "layer" else {}
    return named, {"norm": norm, "where": where, "return_sum": everything}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("everything", [False, True], ids=["plain", "everything"])
@pytest.mark.parametrize(("norm", "where"), [("rms", "before"), ("rms", "after"), ("layer", "before"), ("layer", "after")])
@pytest.mark.parametrize(("rows", "width"), [(370, 256), (20_000, 256), (1000, 512), (300, 200)])
def test_as_accurate_as_plain_torch(rows, width, norm, where, everything, dtype):
    named, options = draw(rows, width, where, everything, norm, dtype)
    exact = {name: t.detach().double().requires_grad_() for name, t in named.items()}

    def run(function, tensors):
        x, weight, *_ = tensors.values()
        rest = {name: t for name, t in tensors.items() if name not in ("x", "weight")}
        return results(function, x, weight, {**options, **rest}, list(tensors.values()))

    truth = run(reference, exact)
    with plain_precision():
        plain = run(reference, named)
    with poisoned_memory():
        actual = run(norm_linear, named)
    for i, (a, p, t) in enumerate(zip(actual, plain, truth, strict=True)):
        assert_as_accurate(a, p, t, what=f"result {i}")
