"""A norm and a matmul in native FP8 beside the emulation."""

import pytest
import torch

from gem_core.spec import RequestError
from gem_precision.emulated import norm_linear__fp8_block as emulated_norm_linear
from gem_precision.native_ops import norm_linear
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


FLAGS = [("rms", False, True), ("rms", True, False), ("layer", False, False), ("layer", True, True)]


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize(("norm", "affine", "biased"), FLAGS)
def test_case_G11_a_native_norm_linear_is_the_emulated_one(own, norm, affine, biased, branch):
    flags = {"norm": norm, "affine": affine, "biased": biased, "branch": branch}
    native, wanted = (results(op, 130, 256, 128, **flags) for op in (norm_linear, emulated_norm_linear))
    assert native.keys() == wanted.keys()
    for name, got in native.items():
        assert near(got, wanted[name]), name


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize(("norm", "affine", "biased"), FLAGS)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 128, 128), (5000, 1024, 3072), (1000, 4096, 512)])
def test_case_G11_a_native_norm_linear_is_the_emulated_one_at_many_sizes(rows, inputs, outputs, norm, affine, biased):
    flags = {"norm": norm, "affine": affine, "biased": biased}
    native, wanted = (results(op, rows, inputs, outputs, **flags) for op in (norm_linear, emulated_norm_linear))
    for name, got in native.items():
        assert near(got, wanted[name]), name


def test_what_its_kernel_does_not_compute_is_refused_before_any_work():
    pytest.importorskip("triton")
    x, weight = torch.ones(4, 128), torch.ones(128, 128)
    with pytest.raises(RequestError, match="the norm before the matmul"):
        norm_linear(x, weight, where="after")
    with pytest.raises(RequestError, match="at most 4096"):
        norm_linear(torch.ones(1, 8192), torch.ones(128, 8192))


def test_it_is_declared_for_hopper_and_bfloat16_alone():
    (native,) = [impl for impl in gem_kernel_impls() if impl.backend == "fp8_block_native"]
    assert (native.devices, native.dtypes, native.min_arch, native.max_arch) == (("cuda",), ("bf16",), 90, 90)
    assert native.resolve() is norm_linear
    assert "after" not in native.features
