"""A norm and a matmul in native FP8 beside the emulation."""

import pytest
import torch

from gem_core.spec import RequestError
from gem_precision.emulated import norm_linear__fp8_block, norm_linear__fp8_square
from gem_precision.native_ops import WIDEST, norm_linear, square_norm_linear
from gem_precision.plugin import gem_kernel_impls

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # which the interpreter computes wrongly
ERROR = 0.02 if DEVICE == "cuda" else 0.4
"""A last bit of the norm decides how some elements round; the interpreter's lost carries add more. What is in a wrong place gives about 1.4."""
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, which the interpreter computes with


@pytest.fixture
def own(monkeypatch):
    """On a CPU the interpreter computes products too."""
    pytest.importorskip("triton")
    if DEVICE == "cpu":
        monkeypatch.setattr("gem_precision.kernels.product.choose", lambda m, n, k, square: "own")


def results(op, rows, inputs, outputs, *, norm, affine, biased, branch=False):
    generator = torch.Generator().manual_seed(0)

    def drawn(*sizes):
        return torch.randn(*sizes, generator=generator).bfloat16().to(DEVICE, DTYPE)

    x, weight = drawn(rows, inputs), drawn(outputs, inputs) / 16
    extra = {"bias": drawn(outputs)} if biased else {}
    extra |= {"gamma": drawn(inputs) / 8 + 1} if affine else {}
    extra |= {"beta": drawn(inputs) / 8} if affine and norm == "layer" else {}
    leaves = {name: t.requires_grad_() for name, t in {"x": x, "weight": weight, **extra}.items()}
    named = {name: t for name, t in leaves.items() if name in extra}
    if branch:
        leaves["residual"] = drawn(rows, inputs).requires_grad_()
        named["residual"] = leaves["residual"].reshape(1, rows, inputs)
    out, summed = op(x.reshape(1, rows, inputs), weight, **named, norm=norm, where="before", return_sum=True)
    assert summed.shape == (1, rows, inputs)
    torch.autograd.backward([out, summed], [drawn(1, rows, width).to(out.dtype) for width in (outputs, inputs)])
    return {"out": out.detach(), "sum": summed.detach(), **{name: t.grad for name, t in leaves.items()}}


def near(got, wanted):
    assert got.shape == wanted.shape
    assert DEVICE == "cpu" or got.dtype == wanted.dtype
    return float((got.double() - wanted.double()).norm() / wanted.double().norm()) <= ERROR


RECIPES = [pytest.param(norm_linear, norm_linear__fp8_block, id="block"), pytest.param(square_norm_linear, norm_linear__fp8_square, id="square")]
FLAGS = [("rms", False, True), ("rms", True, False), ("layer", False, False), ("layer", True, True)]


@pytest.mark.parametrize(("native_op", "emulated_op"), RECIPES)
@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize(("norm", "affine", "biased"), FLAGS)
def test_case_G11_a_native_norm_linear_is_the_emulated_one(own, native_op, emulated_op, norm, affine, biased, branch):
    flags = {"norm": norm, "affine": affine, "biased": biased, "branch": branch}
    native, wanted = (results(op, 130, 256, 128, **flags) for op in (native_op, emulated_op))
    assert native.keys() == wanted.keys()
    for name, got in native.items():
        assert near(got, wanted[name]), name


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize(("norm", "affine", "biased"), FLAGS)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 128, 128), (5000, 1024, 3072), (1000, 4096, 512)])
@pytest.mark.parametrize(("native_op", "emulated_op"), RECIPES)
def test_case_G11_a_native_norm_linear_is_the_emulated_one_at_many_sizes(native_op, emulated_op, rows, inputs, outputs, norm, affine, biased):
    flags = {"norm": norm, "affine": affine, "biased": biased, "branch": rows != 1000}
    native, wanted = (results(op, rows, inputs, outputs, **flags) for op in (native_op, emulated_op))
    for name, got in native.items():
        assert near(got, wanted[name]), name


def test_case_G11_a_stream_without_tokens_and_one_whose_branch_nobody_reads(own):
    """Gradients of the sum alone, of the output alone, and of nothing."""
    weight = (torch.arange(128 * 128, device=DEVICE).view(128, 128) % 7 / 8).to(DTYPE)
    for rows in (0, 3):
        x, residual = (torch.full((rows, 128), value, dtype=DTYPE, device=DEVICE, requires_grad=True) for value in (1.0, 2.0))
        out, total = norm_linear(x, weight, residual=residual, return_sum=True)
        assert (out.shape, total.shape) == ((rows, 128), (rows, 128))
        total.backward(torch.full_like(total, 5.0))
        assert torch.equal(x.grad, torch.full_like(x, 5.0))
        assert torch.equal(residual.grad, x.grad)
        single = torch.ones(rows, 128, dtype=DTYPE, device=DEVICE, requires_grad=True)
        alone = norm_linear(single, weight)
        alone.sum().backward()
        assert torch.isfinite(single.grad).all()


def test_what_its_kernel_does_not_compute_is_refused_before_any_work():
    pytest.importorskip("triton")
    x, weight = torch.ones(4, 128), torch.ones(128, 128)
    with pytest.raises(RequestError, match="the norm before the matmul"):
        norm_linear(x, weight, where="after")
    with pytest.raises(RequestError, match="at most 4096"):
        norm_linear(torch.ones(1, 8192), torch.ones(128, 8192))
    from gem_precision.kernels import norm

    assert norm.WIDEST == WIDEST  # which is known without Triton


def test_it_is_declared_for_hopper_and_bfloat16_alone():
    natives = [impl for impl in gem_kernel_impls() if impl.backend in ("fp8_block_native", "fp8_square_native")]
    for native in natives:
        assert (native.devices, native.dtypes, native.min_arch, native.max_arch) == (("cuda",), ("bf16",), 90, 90)
        assert "after" not in native.features
    assert [native.resolve() for native in natives] == [norm_linear, square_norm_linear]
