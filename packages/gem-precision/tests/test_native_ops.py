"""A norm and a matmul in native FP8 beside the emulation, and where the recipe takes it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gem_core.ops.slot import KernelSlot
from gem_core.spec import RequestError
from gem_precision import backends
from gem_precision.emulated import norm_linear__fp8_block as emulated_norm_linear
from gem_precision.native_ops import norm_linear
from gem_precision.plugin import NATIVE_NORM_LINEAR, gem_kernel_impls
from gem_precision.recipes.low_precision import fp8_block, mxfp8

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


def results(op, rows, inputs, outputs, *, norm, affine, biased):
    generator = torch.Generator().manual_seed(0)

    def drawn(*sizes):
        return torch.randn(*sizes, generator=generator).bfloat16().to(DEVICE, DTYPE)

    x, weight = drawn(rows, inputs), drawn(outputs, inputs) / 16
    extra = {"bias": drawn(outputs)} if biased else {}
    extra |= {"gamma": drawn(inputs) / 8 + 1} if affine else {}
    extra |= {"beta": drawn(inputs) / 8} if affine and norm == "layer" else {}
    leaves = {name: t.requires_grad_() for name, t in {"x": x, "weight": weight, **extra}.items()}
    named = {name: t for name, t in leaves.items() if name in extra}
    out, summed = op(x.reshape(1, rows, inputs), weight, **named, norm=norm, where="before", return_sum=True)
    assert summed.shape == (1, rows, inputs)
    out.backward(drawn(1, rows, outputs).to(out.dtype))
    return {"out": out.detach(), **{name: t.grad for name, t in leaves.items()}}


def near(got, wanted):
    assert got.shape == wanted.shape
    assert DEVICE == "cpu" or got.dtype == wanted.dtype
    return float((got.double() - wanted.double()).norm() / wanted.double().norm()) <= ERROR


FLAGS = [("rms", False, True), ("rms", True, False), ("layer", False, False), ("layer", True, True)]


@pytest.mark.parametrize(("norm", "affine", "biased"), FLAGS)
def test_case_G11_a_native_norm_linear_is_the_emulated_one(own, norm, affine, biased):
    flags = {"norm": norm, "affine": affine, "biased": biased}
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
    for wrong in ({"where": "after"}, {"residual": x}):
        with pytest.raises(RequestError, match="no residual"):
            norm_linear(x, weight, **wrong)
    with pytest.raises(RequestError, match="at most 4096"):
        norm_linear(torch.ones(1, 8192), torch.ones(128, 8192))


class Fused(nn.Module):
    def __init__(self, inputs: int, outputs: int, *features: str) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.empty(*sizes, device="meta")) for sizes in ((outputs, inputs), (outputs,)))
        self.slot = KernelSlot("norm_linear", features=("rms", *(features or ("before",))))


def model():
    return nn.ModuleDict(
        {
            "wide": Fused(1024, 4096),
            "narrow": Fused(512, 512),
            "after": Fused(1024, 4096, "after"),
            "added": Fused(1024, 4096, "before", "residual"),
        }
    )


@pytest.fixture
def hopper(monkeypatch):
    """The device is an H200 to whoever asks, and everything has been measured."""
    monkeypatch.setattr(backends.Device, "here", classmethod(lambda cls, device_type: cls(type="cuda", name="NVIDIA H200", arch=90)))
    monkeypatch.setattr("gem_precision.native.find_spec", lambda name: object())
    monkeypatch.setattr(backends, "BACKENDS", tuple(replace(backend, measured=True) for backend in backends.BACKENDS))


def test_the_recipe_asks_for_it_where_it_gains_and_leaves_the_others_high(hopper):
    net = model()
    decisions = {d.module: d for d in fp8_block(emulate=False, islands=()).prepare(net, "cuda")}
    assert net["wide"].slot.asked == NATIVE_NORM_LINEAR
    assert f"by the kernel backend '{NATIVE_NORM_LINEAR}'" in decisions["wide"].reason
    assert decisions["wide"].format == "fp8_e4m3_1x128"
    assert all(net[name].slot.asked is None for name in ("narrow", "after", "added"))
    assert "is slower than in bfloat16" in decisions["narrow"].reason
    assert "nothing computes it natively" in decisions["after"].reason
    assert "nothing computes it natively" in decisions["added"].reason


def test_another_recipe_and_another_device_do_not_ask_for_it(hopper, monkeypatch):
    net = model()
    mxfp8(emulate=False, islands=()).prepare(net, "cuda")
    assert net["wide"].slot.asked is None
    monkeypatch.undo()
    fp8_block(emulate=False, islands=()).prepare(net, "cpu")
    assert net["wide"].slot.asked is None


def test_with_emulation_it_is_the_emulated_one(hopper):
    net = model()
    fp8_block(islands=()).prepare(net, "cuda")
    assert net["wide"].slot.asked == "fp8_block_emulated"


def test_it_is_declared_for_hopper_and_bfloat16_alone():
    (native,) = [impl for impl in gem_kernel_impls() if impl.backend == NATIVE_NORM_LINEAR]
    assert (native.devices, native.dtypes, native.min_arch, native.max_arch) == (("cuda",), ("bf16",), 90, 90)
    assert native.resolve() is norm_linear
    assert "residual" not in native.features
