"""What surrounds the Hopper kernels of norm_linear, on a CPU: torch computes in their place what they are told to compute."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from gem_kernels_portable import compare, draw, kernel_of, results
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from gem_kernels.ops.norm_linear import hopper_launch as hopper
from gem_kernels.ops.norm_linear import launch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these run without the kernels")


class Emulated:
    """A kernel whose launch calls ``compute`` and remembers its grid."""

    def __init__(self, compute):
        self.compute, self.grids = compute, []

    def __getitem__(self, grid):
        self.grids.append(grid[0])
        return lambda **arguments: self.compute(SimpleNamespace(programs=grid[0], **arguments))


def wide(tensor, otherwise):
    return otherwise if tensor is None else tensor.float()


def forward(a):
    x, weight = a.x_desc.base.float(), a.weight_desc.base.float()
    assert weight.shape == (a.WIDTH, a.INNER)
    assert a.tiles == -(-a.rows // a.ROWS)
    bias, z = wide(a.bias, 0.0), x @ weight.T
    if a.BEFORE:
        assert a.gamma is a.beta is None
        mean = x.mean(1, keepdim=True) if a.LAYER else 0.0
        r = (x - mean).square().mean(1, keepdim=True).add(a.eps).rsqrt()
        y = ((z - mean * a.sums) if a.LAYER else z) * r + bias
    else:
        z = z + bias
        z = z - z.mean(1, keepdim=True) if a.LAYER else z
        r = z.square().mean(1, keepdim=True).add(a.eps).rsqrt()
        y = z * r * wide(a.gamma, 1.0) + wide(a.beta, 0.0)
    a.out_desc.base.copy_(y)
    if a.factors is not None:
        a.factors.copy_(r[:, 0])


def backward(a):
    """The rows of each pair of programs give its part of the matrix's gradient."""
    x, weight, g, other = (t.base.float() for t in (a.x_desc, a.weight_desc, a.dout_desc, a.other_desc))
    r = a.r[:, None]
    pairs = a.programs // 2
    assert 2 * pairs == a.programs <= a.tiles
    part = torch.arange(x.shape[0]) // a.ROWS % pairs
    if a.BEFORE:
        c = (g * (other - wide(a.bias, 0.0))).sum(1, keepdim=True) / a.INNER
        left, right = g, x * r
        dx = (g @ weight - right * c) * r
    else:
        scaled = g * wide(a.gamma, 1.0)
        left, right = (scaled - other * (scaled * other).mean(1, keepdim=True)) * r, x
        dx = left @ weight
    a.dx_desc.base.copy_(dx)
    for i in range(pairs):
        mine = part == i
        a.dweight[i] = left[mine].T @ right[mine]
        if a.dcolumns is not None:
            a.dcolumns[i] = 0
            a.dcolumns[i, 0, 3] = (g * other)[mine].sum(0)
            a.dcolumns[i, 1, 5] = left[mine].sum(0)


@pytest.fixture
def kernels():
    found = {"hopper": Emulated(forward), "hopper_grad": Emulated(backward)}
    modules = {name: SimpleNamespace(norm_linear_kernel=k, norm_linear_grad_kernel=k) for name, k in found.items()}
    with patch.object(hopper, "here", lambda x: True), patch.object(hopper, "_module", modules.__getitem__):
        yield found


def changed(work, **arguments):
    return type(work)(work.op, {**work.arguments, **arguments}, 0, 0.0)


def work_of(rows=(130, 0, 70), inner=72, width=136, extras=(), **options):
    def leaf(*shape):
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).half().requires_grad_()

    normed = inner if options.get("where") == "before" else width
    named = {"x": leaf(sum(rows), inner), "weight": leaf(width, inner)}
    named |= {name: leaf(width if name == "bias" else normed) for name in extras}
    return changed(draw("norm_linear"), **named, **options)


@pytest.mark.parametrize("extras", [(), ("bias",), ("gamma",), ("bias", "gamma")], ids=str)
@pytest.mark.parametrize("where", ["before", "after"])
def test_outputs_and_every_gradient(kernels, where, extras):
    compare(work_of(extras=extras, where=where, norm="rms"))
    recomputed = where == "after" and "gamma" in extras  # the result is not what gamma has multiplied
    assert len(kernels["hopper"].grids) == 1 + recomputed
    assert len(kernels["hopper_grad"].grids) == 1


@pytest.mark.parametrize("where", ["before", "after"])
def test_layernorm_has_its_gradients_elsewhere(kernels, where):
    compare(work_of(extras=("bias", "gamma", "beta"), where=where, norm="layer"))
    assert kernels["hopper"].grids
    assert not kernels["hopper_grad"].grids


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_residual_a_returned_sum_and_wide_matrices_have_other_kernels(kernels, where):
    normed = 72 if where == "before" else 136
    compare(work_of(where=where, residual=torch.randn(200, normed).half().requires_grad_()))
    compare(work_of(where="after", return_sum=True))
    compare(work_of(where="after", return_sum=True, extras=("gamma",)))
    compare(work_of(where=where, rows=(9,), inner=264, width=264))
    assert not kernels["hopper"].grids
    assert not kernels["hopper_grad"].grids


@pytest.mark.parametrize("extras", [(), ("bias", "gamma")], ids=str)
@pytest.mark.parametrize("branch", [False, True])
def test_the_sum_of_a_stream_is_made_before_the_kernels_of_small_matrices(kernels, branch, extras):
    more = {"residual": torch.randn(200, 72).half().requires_grad_()} if branch else {}
    compare(work_of(where="before", return_sum=True, extras=extras, **more))
    assert len(kernels["hopper"].grids) == len(kernels["hopper_grad"].grids) == 1


def test_a_stream_at_an_address_that_the_copy_engine_does_not_read_has_the_sums_kernels(kernels):
    """Factors are kept by what the sum is, in forward and backward: x lies at an odd address, the sum does not."""
    x = torch.randn(40, 73).half()[:, 1:].requires_grad_()
    work = changed(work_of(where="before"), x=x, residual=torch.randn(40, 72).half().requires_grad_(), return_sum=True)
    compare(work)
    assert len(kernels["hopper"].grids) == len(kernels["hopper_grad"].grids) == 1
    compare(changed(work, residual=None))
    assert len(kernels["hopper"].grids) == len(kernels["hopper_grad"].grids) == 1


def test_rows_that_the_copy_engine_cannot_address_have_other_kernels(kernels):
    x = torch.randn(40, 73).half()[:, 1:].requires_grad_()
    compare(changed(work_of(where="after"), x=x))
    assert not kernels["hopper"].grids
    assert not kernels["hopper_grad"].grids


def test_an_upstream_gradient_at_any_address(kernels):
    work = work_of(where="after")
    leaves = work.leaves()
    odd = torch.randn(200 * 136 + 1).half()[1:].view(200, 136)
    found = [torch.autograd.grad(work.call(kernel_of("norm_linear")), leaves, g) for g in (odd, odd.clone())]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_single_row_and_none(kernels):
    compare(work_of(rows=(1,), where="after", extras=("bias",)))
    assert kernels["hopper_grad"].grids == [2]
    assert results(kernel_of("norm_linear"), work_of(rows=(0,)))[0].shape == (0, 136)


@pytest.mark.parametrize("fault", ["r", "dweight", "dcolumns"])
def test_a_planted_fault_is_noticed(kernels, fault):
    def wrong(a):
        backward(a if fault != "r" else SimpleNamespace(**{**vars(a), "r": a.r * 1.1}))
        if fault != "r":
            getattr(a, fault)[0] *= 1.5

    kernels["hopper_grad"].compute = wrong
    with pytest.raises(AssertionError):
        compare(work_of(where="after", extras=("bias",)))


@pytest.mark.parametrize("where", ["before", "after"])
def test_the_op_passes_opcheck_with_kept_factors(kernels, where):
    """Fake results have the shapes of real ones: also of what is kept for the gradients."""
    work = work_of(where=where)
    x, weight = work.arguments["x"], work.arguments["weight"]
    options = (None, None, None, None, False, where == "before", 1e-5, False)
    torch.library.opcheck(torch.ops.gem_kernels.norm_linear.default, (x, weight, *options), test_utils=("test_schema", "test_faketensor"))
    compiled = torch.compile(lambda a, b: launch.norm_linear(a, b, where=where), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), launch.norm_linear(x, weight, where=where))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(width=st.integers(1, 600), inner=st.integers(1, 600))
def test_what_is_cut_fits_into_shared_memory(width, inner):
    found, grads = hopper.cut(width, inner), hopper.cut_grad(width, inner)
    assert (found is None) == (max(width, inner) > 256)
    assert (grads is None) == (max(width, inner) > 256 or inner % 8 > 0)
    if found is not None:
        assert found.block >= width
        assert found.wide >= inner
        results = 0 if found.block == found.wide else 2 * hopper.ROWS * found.block
        assert 2 * (found.block * found.wide + results + found.stages * hopper.ROWS * found.wide) <= 224 * 1024
        assert found.stages >= 3
    if grads is not None:
        half = grads.wide // 2
        assert grads.block >= width
        assert 2 * half >= inner
        assert 2 * (grads.block * half + grads.stages * hopper.ROWS * (2 * grads.block + half)) <= 224 * 1024
        assert grads.stages >= 2
