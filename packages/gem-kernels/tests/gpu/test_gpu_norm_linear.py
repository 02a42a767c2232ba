"""norm_linear on CUDA at the widths and row counts that fill its tiles and keep its programs busy with several; on Hopper by kernels of its own."""

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


def draw(rows, inner, width, where, extras, norm, dtype):
    g = torch.Generator("cuda").manual_seed(0)

    def leaf(*shape, scale=1.0):
        return (torch.randn(shape, generator=g, device="cuda") * scale).to(dtype).requires_grad_()

    named = {"x": leaf(rows, inner), "weight": leaf(width, inner, scale=inner**-0.5)}
    normed = inner if where == "before" else width
    if extras != "plain":
        named |= {"bias": leaf(width), "gamma": leaf(normed)} | ({"beta": leaf(normed)} if norm == "layer" else {})
    if extras == "everything":
        named["residual"] = leaf(rows, normed)
    return named, {"norm": norm, "where": where, "return_sum": extras == "everything"}


def check(named, options):
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


PLACES = [("rms", "before"), ("rms", "after"), ("layer", "before"), ("layer", "after")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("extras", ["plain", "everything"])
@pytest.mark.parametrize(("norm", "where"), PLACES)
@pytest.mark.parametrize(("rows", "width"), [(370, 256), (20_000, 256), (1000, 512), (300, 200)])
def test_as_accurate_as_plain_torch(rows, width, norm, where, extras, dtype):
    check(*draw(rows, width, width, where, extras, norm, dtype))


@pytest.mark.parametrize(("norm", "where"), PLACES)
@pytest.mark.parametrize(
    ("rows", "inner", "width"), [(20_000, 256, 256), (1, 256, 256), (130, 136, 72), (77, 64, 256), (5000, 256, 128), (400, 20, 24)]
)
def test_matrices_that_fit_into_shared_memory_with_gamma_and_bias(rows, inner, width, norm, where):
    check(*draw(rows, inner, width, where, "affine", norm, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize(
    ("rows", "inner", "width"), [(5000, 1024, 3072), (777, 512, 512), (20_000, 256, 256), (130, 136, 72), (33, 100, 40), (1, 2048, 8)]
)
def test_a_stream_and_what_is_added_to_it(rows, inner, width, branch, norm, dtype):
    """The sum as rounded, and one gradient for stream and branch; on Hopper small matrices have kernels of their own."""
    named, options = draw(rows, inner, width, "before", "everything", norm, dtype)
    check({name: t for name, t in named.items() if name in ("x", "weight", "bias") or (branch and name == "residual")}, options)


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize(("inner", "width"), [(1024, 512), (256, 256)])
def test_a_stream_in_a_compiled_block_is_that_of_an_eager_one(inner, width, branch):
    named, options = draw(700, inner, width, "before", "everything", "rms", torch.bfloat16)
    x, weight = named["x"], named["weight"]
    rest = {"bias": named["bias"], **({"residual": named["residual"]} if branch else {})}
    leaves = [x, weight, *rest.values()]

    def block(x, weight):
        out, total = norm_linear(x, weight, **rest, **options)
        return out, total * 2

    found = []
    for function in (block, torch.compile(block, fullgraph=True)):
        outputs = function(x, weight)
        found.append([*outputs, *torch.autograd.grad(outputs, leaves, [torch.ones_like(out) for out in outputs])])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=2e-2, atol=2e-2 * float(eager.abs().max()))


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize(("width", "extras"), [(512, ("bias",)), (200, ("bias",)), (256, ()), (1024, ("bias", "residual"))], ids=str)
def test_gradients_from_the_normed_rows_themselves(width, extras, norm):
    named, options = draw(5000, 256, width, "after", "everything", norm, torch.bfloat16)
    check({name: t for name, t in named.items() if name in ("x", "weight", *extras)}, {**options, "return_sum": "residual" in extras})


@pytest.mark.parametrize("where", ["before", "after"])
def test_views_that_the_copy_engine_reads_by_stride_or_not_at_all(where):
    """Rows of a wider tensor, and an upstream gradient and rows at addresses that are no multiple of 16 bytes."""
    named, options = draw(300, 256, 256, where, "affine", "rms", torch.bfloat16)
    wide = torch.randn(300, 264, device="cuda", dtype=torch.bfloat16)
    for x in (wide[:, :256], wide[:, 3:259]):
        check({**named, "x": x.requires_grad_()}, options)
    upstream = torch.randn(300 * 256 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(300, 256)
    leaves = list(named.values())
    rest = {name: t for name, t in named.items() if name not in ("x", "weight")}
    odd, even = (torch.autograd.grad(norm_linear(*leaves[:2], **options, **rest), leaves, g) for g in (upstream, upstream.clone()))
    assert all(torch.equal(a, b) for a, b in zip(odd, even, strict=True)), "the same bits, for the sums have one order"


def test_a_planted_fault_in_the_rows_factors_is_noticed():
    from unittest.mock import patch

    from gem_kernels.ops.norm_linear import hopper_launch

    named, options = draw(300, 256, 256, "after", "plain", "rms", torch.bfloat16)
    if not hopper_launch.here(named["x"]):
        pytest.skip("no Hopper GPU")
    real = hopper_launch.backward
    with patch.object(hopper_launch, "backward", lambda *args, **rest: real(*args[:6], args[6] * 1.1, **rest)), pytest.raises(AssertionError):
        check(named, options)
