"""norm_linear that also gives the sum it norms: what a residual stream and a branch become in one pass, and both their gradients in another."""

from unittest.mock import patch

import pytest
import torch
from gem_kernels_portable import compare, draw, kernel_of, results
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton")

from gem_kernels.ops.norm_linear import launch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's sizes; test_gpu_norm_linear has those of a GPU")

WIDTH_IN, WIDTH_OUT = 24, 40


def stream(rows=37, *, branch=True, inner=WIDTH_IN, width=WIDTH_OUT, dtype=torch.float16, **options):
    """A call that returns its sum; ``inner`` columns of rows, ``width`` of the result."""

    def leaf(*shape, seed):
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()

    work = draw("norm_linear")
    tensors = {"x": leaf(rows, inner, seed=1), "weight": leaf(width, inner, seed=2), "bias": leaf(width, seed=3)}
    if branch:
        tensors["residual"] = leaf(rows, inner, seed=4)
    return type(work)("norm_linear", {**tensors, "where": "before", "return_sum": True, **options}, 0, 0.0)


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_result_sum_and_every_gradient(norm, dtype, branch):
    compare(stream(branch=branch, dtype=dtype, norm=norm))
    compare(stream(rows=3, inner=520, width=16, branch=branch, dtype=dtype, norm=norm))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(rows=st.integers(0, 40), inner=st.integers(1, 70), width=st.integers(1, 70), branch=st.booleans())
def test_odd_sizes(rows, inner, width, branch):
    work = stream(rows, inner=inner, width=width, branch=branch, norm="layer")
    if rows:
        compare(work)
    else:
        assert [t.shape for t in results(kernel_of("norm_linear"), work)[:2]] == [(0, width), (0, inner)]


def test_columns_of_the_norm_have_gradients_too():
    columns = {name: torch.randn(WIDTH_IN).half().requires_grad_() for name in ("gamma", "beta")}
    compare(stream(norm="layer", **columns))


@pytest.mark.parametrize("branch", [False, True])
def test_rows_with_steps_and_two_outer_dimensions(branch):
    wide = torch.randn(2, 15, WIDTH_IN + 7).half()
    more = {"residual": wide[..., 3 : 3 + WIDTH_IN].clone()[:, ::2].requires_grad_()} if branch else {}
    compare(stream(branch=False, x=wide[:, ::2, :WIDTH_IN].requires_grad_(), **more))


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_the_norm_is_of_the_sum_as_rounded(norm):
    """To the bit: what backward norms again is what forward has normed."""
    a = stream(norm=norm).arguments
    out, total = launch.norm_linear(**a)
    assert torch.equal(total, a["x"] + a["residual"])
    again = launch.norm_linear(total.detach(), a["weight"], a["bias"], norm=norm, residual=torch.zeros_like(total))
    assert torch.equal(out, again)
    unrounded = launch.norm_linear(a["x"], a["weight"], a["bias"], norm=norm, residual=a["residual"])
    assert not torch.equal(out, unrounded)  # the planted fault shows: a norm of the sum before it is rounded


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("which", [0, 1])
def test_gradients_through_one_of_the_two_results(which, branch):
    work = stream(branch=branch, dtype=torch.float32)
    leaves = [t for name, t in work.arguments.items() if name in ("x", "residual", "weight")]
    upstream = torch.linspace(-1, 1, 37 * (WIDTH_OUT, WIDTH_IN)[which]).view(37, -1)
    found = torch.autograd.grad(work.call(kernel_of("norm_linear"))[which], leaves, upstream, allow_unused=True)
    x, weight, *rest = (t.detach().double().requires_grad_() for t in leaves)
    total = x + rest[0] if rest else x
    normed = total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    plain = (normed @ weight.T, total)[which]
    wanted = torch.autograd.grad(plain, [x, weight, *rest], upstream.double(), allow_unused=True)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.double(), torch.zeros_like(got).double() if want is None else want, rtol=1e-4, atol=1e-4)


def saved_by(function):
    """Bytes of the distinct storages that autograd keeps for backward."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    return kept, result


def test_the_sum_alone_is_saved_of_stream_and_branch():
    a = stream(rows=64).arguments
    kept, (_, total) = saved_by(lambda: launch.norm_linear(**a))
    assert total.untyped_storage().data_ptr() in kept
    assert not {a[name].untyped_storage().data_ptr() for name in ("x", "residual")} & kept.keys()
    assert sum(kept.values()) == 2 * (64 * WIDTH_IN + WIDTH_OUT * WIDTH_IN + WIDTH_OUT)


def test_layers_whose_sums_norms_make_keep_no_more_than_layers_that_add():
    """Three pre-norm layers, and the same gradients."""
    leaves = [(torch.randn(shape) / 4).requires_grad_() for shape in ((48, 24), *3 * ((40, 24), (24, 40)))]

    def layers(inside):
        stream, pending = leaves[0], None
        for first, second in zip(leaves[1::2], leaves[2::2], strict=True):
            if inside:
                made, stream = launch.norm_linear(stream, first, residual=pending, return_sum=True)
            else:
                stream = stream if pending is None else stream + pending
                made = launch.norm_linear(stream, first)
            pending = made @ second.T
        return stream + pending

    kept, grads = [], []
    for inside in (True, False):
        held, out = saved_by(lambda inside=inside: layers(inside))
        kept.append(sum(held.values()))
        grads.append(torch.autograd.grad(out, leaves, torch.ones_like(out)))
    assert kept[0] == kept[1]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_both_gradients_of_a_stream_are_added_by_the_kernel_of_the_norm():
    for branch in (False, True):
        work = stream(branch=branch)
        with patch.object(launch, "norm_rows_grad", wraps=launch.norm_rows_grad) as grad:
            results(kernel_of("norm_linear"), work)
        assert grad.call_args.kwargs["dtotal"] is not None


def test_a_planted_fault_the_gradient_of_the_sum_is_left_out():
    def without(*arguments, dtotal, **options):
        return real(*arguments, dtotal=None, **options)

    for branch in (False, True):
        real = launch.norm_rows_grad
        with patch.object(launch, "norm_rows_grad", without), pytest.raises(AssertionError):
            compare(stream(branch=branch))


def test_a_sum_that_is_x_itself_is_x_whoever_watches():
    a = stream(branch=False).arguments
    for watched in (False, True):
        if watched:
            with FlopCounterMode(display=False) as counter:
                out, total = launch.norm_linear(**a)
            assert counter.get_total_flops() == 2 * 37 * WIDTH_IN * WIDTH_OUT
        else:
            out, total = launch.norm_linear(**a)
        assert total.data_ptr() == a["x"].data_ptr()
        (grad,) = torch.autograd.grad([out.sum(), total.sum()], a["x"])
        assert grad.shape == total.shape


@pytest.mark.parametrize("branch", [False, True])
def test_a_compiler_sees_no_break(branch):
    work = stream(branch=branch)
    expected = results(kernel_of("norm_linear"), work)
    compiled = torch.compile(kernel_of("norm_linear"), backend="aot_eager", fullgraph=True)
    for a, b in zip(results(compiled, work), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)  # without a branch autograd adds the gradients, rounded once more


def test_the_op_passes_opcheck():
    a = stream(rows=5).arguments
    given = (a["x"], a["weight"], a["bias"], None, None, a["residual"], False, True, 1e-5, True)
    torch.library.opcheck(
        torch.ops.gem_kernels.norm_linear.default, given, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )
    torch.library.opcheck(torch.ops.gem_kernels.norm_linear.default, given, test_utils="test_aot_dispatch_dynamic", atol=1e-2, rtol=1e-2)
