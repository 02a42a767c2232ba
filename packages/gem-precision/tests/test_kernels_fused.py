"""Norms and activations that write ``fp8_block``, and the layers made of them, against plain torch in float64."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gem_core.ops.activations import ACTIVATIONS
from gem_core.spec import RequestError
from gem_precision.formats import fake_quantize, find_format

pytest.importorskip("triton")

import triton
import triton.language as tl

from gem_precision.kernels.activation import activate, activation_both
from gem_precision.kernels.cast import cast_squares, cast_weight
from gem_precision.kernels.layers import mlp, norm_linear
from gem_precision.kernels.norm import norm_both, norm_grad

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROW, SQUARE = find_format("fp8_e4m3_1x128"), find_format("fp8_e4m3_128x128")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, which the interpreter computes with


def padded(x, rows):
    """With zeros up to so many rows."""
    return F.pad(x.float(), (0, 0, 0, rows - x.shape[0]))


def holds(both, wanted, slack=None):
    """The operands stand for ``wanted [rows, columns]`` as well as the format can, along both axes, and zeros follow.

    In the interpreter an element may be far off (a lost carry), but few are.

    Args:
        slack: shaped as ``wanted``, by how much more an element may be off: what was rounded is itself an approximation.
    """
    rows, high = wanted.shape[0], both.along.elements.shape[0]
    full, loose = padded(wanted, high), padded(torch.zeros_like(wanted) if slack is None else slack, high)
    for operand, exact, more in ((both.along, full, loose), (both.turned, full.T.contiguous(), loose.T)):
        rounded, got = fake_quantize(exact, ROW), operand.dequantize()
        blocks = exact.abs().reshape(exact.shape[0], -1, 128).amax(-1).repeat_interleave(128, 1)
        wrong = (got - rounded).abs() > 2**-4 * rounded.abs() + 2**-9 * blocks + more
        assert wrong.float().mean() <= (0.001 if DEVICE == "cuda" else 0.12)
        smallest = blocks.reshape(exact.shape[0], -1, 128)[..., 0] / 448
        fits = (operand.scales >= smallest * (1 - 2e-3)) & (operand.scales <= 2 * smallest * (1 + 2e-3))
        assert fits[smallest * 448 > 0.5].all()  # GELU is fitted, so that small values may have another scale
    assert not both.along.elements[rows:].float().any()
    assert not both.turned.elements[:, rows:].float().any()


def data(rows, columns, seed=0, offset=0.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) + offset
    x[:, : columns // 2] *= 8
    return x.to(DEVICE)


def kind(layer):
    return "layer" if layer else "rms"


def normed(x, gamma=None, beta=None, eps=1e-5, *, layer=False):
    x, gamma, beta = (None if t is None else t.double() for t in (x, gamma, beta))
    if layer or beta is not None:
        return F.layer_norm(x, x.shape[1:], gamma, beta, eps)
    return F.rms_norm(x, x.shape[1:], gamma, eps)


@pytest.mark.parametrize("layer", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (130, 384), (128, 256), (33, 640)])
def test_case_G11_a_norm_writes_its_operand_and_its_statistics(rows, columns, layer):
    x, gamma, beta = data(rows, columns, 1), 1 + data(1, columns, 2)[0] / 16, data(1, columns, 3)[0] / 8 if layer else None
    both, _, means, inverses = norm_both(x, gamma, beta, norm=kind(layer))
    holds(both, normed(x, gamma, beta))
    mean = x.double().mean(1) if layer else torch.zeros(rows, device=DEVICE)
    assert torch.allclose(means, mean.float(), rtol=1e-5, atol=1e-6)
    variance = (x.double() - mean.double()[:, None]).square().mean(1)
    assert torch.allclose(inverses, (variance + 1e-5).rsqrt().float(), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("layer", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (130, 384), (33, 640)])
def test_case_G11_a_norm_adds_a_branch_as_it_reads(monkeypatch, rows, columns, layer, dtype):
    """The bits are those of the norm of the sum, rounded first: statistics and tiles read the same numbers."""
    wide = torch.full((2 * rows, 2 * columns), float("nan"), dtype=dtype, device=DEVICE)
    wide[::2, :columns] = data(rows, columns, 1).to(dtype)
    x, branch = wide[::2, :columns], data(rows, columns, 2).to(dtype)
    got = norm_both(x, norm=kind(layer), branch=branch)
    monkeypatch.setattr("gem_precision.kernels.norm.WIDE", 256)  # as with a branch
    wanted = norm_both(x + branch, norm=kind(layer))
    assert torch.equal(got[1], x + branch)
    for left, right in zip(operands(got[0]) + got[2:], operands(wanted[0]) + wanted[2:], strict=True):
        assert torch.equal(left, right)


def operands(both):
    return tuple(part for side in (both.along, both.turned) for part in (side.elements.float(), side.scales))


@pytest.mark.parametrize("layer", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (130, 384), (513, 256)])
def test_case_G11_a_norm_writes_squares(rows, columns, layer):
    """Those of a cast of what it gives, up to last bits of the norm."""
    x, branch = data(rows, columns, 1), data(rows, columns, 2)
    got, wanted = norm_both(x, norm=kind(layer), branch=branch, square=True)[0], cast_squares(normed(x + branch, layer=layer).float())
    assert got.along.elements.shape == (-(-rows // 512) * 512, columns)
    for left, right in ((got.along, wanted.along), (got.turned, wanted.turned)):
        assert left.square == right.square
        assert torch.equal(left.scales, right.scales)
        assert (left.elements.float() != right.elements.float()).float().mean() <= 0.002


def test_what_a_strip_of_rows_gives_does_not_hang_on_how_far_its_statistics_run_ahead(monkeypatch):
    x, gamma = data(700, 128, 1), 1 + data(1, 128, 2)[0] / 16  # six strips
    wide = norm_both(x, gamma, gamma, norm="layer")
    monkeypatch.setattr("gem_precision.kernels.norm.AHEAD", 1)
    narrow = norm_both(x, gamma, gamma, norm="layer")
    for a, b in zip(wide, narrow, strict=True):
        pairs = [(a, b)] if isinstance(a, torch.Tensor) else [(a.along.dequantize(), b.along.dequantize()), (a.turned.scales, b.turned.scales)]
        assert all(torch.equal(left, right) for left, right in pairs)
    holds(narrow[0], normed(x, gamma, gamma))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize(("rows", "columns"), [(200_000, 512), (65_537, 1024), (20_000, 4096)])
def test_tiles_find_the_statistics_of_their_rows_when_many_programs_run_at_once(rows, columns):
    x = (torch.randn(rows, columns, device="cuda") * torch.logspace(-6, 6, rows, device="cuda")[:, None]).bfloat16()
    both, _, _, inverses = norm_both(x, norm="rms", eps=0.0)
    assert torch.allclose(inverses, x.float().square().mean(1).rsqrt(), rtol=1e-4)
    rows_of_one = both.along.dequantize()[:rows].square().mean(1)  # each row is normed by its own statistics, or far off
    assert ((rows_of_one - 1).abs() < 0.05).all()


def test_statistics_survive_a_large_mean():
    """A sum of squares minus the square of the sum would have no digit left."""
    x = data(4, 256, 1, offset=1e4)
    _, _, means, inverses = norm_both(x, norm="layer")
    assert torch.allclose(means, x.double().mean(1).float(), rtol=1e-6)
    assert torch.allclose(inverses, (x.double().var(1, correction=0) + 1e-5).rsqrt().float(), rtol=1e-3)


@pytest.mark.parametrize("layer", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (37, 384)])
def test_case_G11_the_gradients_of_a_norm(rows, columns, layer):
    x, gamma, beta = data(rows, columns, 1), 1 + data(1, columns, 2)[0] / 16, data(1, columns, 3)[0] if layer else None
    dy = data(rows, columns, 4)
    leaves = [t.double().requires_grad_() for t in (x, gamma, *([beta] if layer else []))]
    normed(leaves[0], leaves[1], leaves[2] if layer else None).backward(dy.double())
    _, _, means, inverses = norm_both(x, gamma, beta, norm=kind(layer))
    got = norm_grad(x, dy, gamma, means, inverses, norm=kind(layer))
    for grad, leaf in zip(got, leaves, strict=False):
        assert torch.allclose(grad.double(), leaf.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layer", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (37, 384), (9, 4096)])
def test_case_G11_the_gradient_of_a_norm_without_a_gain_and_with_one_of_the_sum(rows, columns, layer):
    x, dy, more = (data(rows, columns, seed) for seed in (1, 2, 3))
    leaf = x.double().requires_grad_()
    normed(leaf, layer=layer).backward(dy.double())
    _, _, means, inverses = norm_both(x, norm=kind(layer))
    alone, *columns_of = norm_grad(x, dy, None, means, inverses, norm=kind(layer))
    assert columns_of == [None, None]
    assert torch.allclose(alone.double(), leaf.grad, rtol=1e-4, atol=1e-4)
    both, *_ = norm_grad(x, dy, None, means, inverses, norm=kind(layer), more=more.T.contiguous().T)
    assert torch.allclose(both, alone + more, rtol=1e-6, atol=1e-6)


def test_norms_of_nothing_and_of_what_does_not_fit():
    none = torch.zeros(0, 256, device=DEVICE)
    both, _, means, inverses = norm_both(none, norm="rms")
    assert both.turned.elements.shape == (256, 0)
    dx, by_gamma, _ = norm_grad(none, none, torch.ones(256, device=DEVICE), means, inverses, norm="rms")
    assert dx.shape == (0, 256)
    assert not by_gamma.any()
    with pytest.raises(RequestError, match="gamma is"):
        norm_both(torch.ones(2, 256, device=DEVICE), torch.ones(128, device=DEVICE), norm="rms")
    with pytest.raises(RequestError, match="multiple of 128"):
        norm_both(torch.ones(2, 100, device=DEVICE), norm="rms")
    x = torch.ones(2, 256, device=DEVICE)
    with pytest.raises(RequestError, match="RMS norm has no beta"):
        norm_both(x, x[0], x[0], norm="rms")
    for branch in (x[:1], x.half()):
        with pytest.raises(RequestError, match="of one shape and dtype"):
            norm_both(x, norm="rms", branch=branch)
    with pytest.raises(RequestError, match="lie next to each other"):
        norm_both(x, norm="rms", branch=torch.ones(256, 2, device=DEVICE).T)
    wide = torch.ones(1, 8192, device=DEVICE)
    with pytest.raises(RequestError, match="at most 4096"):
        norm_grad(wide, wide, wide[0], means, inverses, norm="rms")


HARDWARE_VALUE, HARDWARE_SLOPE = (2**-10, 2**-8) if DEVICE == "cuda" else (0.0, 0.0)
"""Of the hardware's tanh, times x up to 8."""
VALUE_ERROR, SLOPE_ERROR = 2.9e-4 + HARDWARE_VALUE, 1e-3 + HARDWARE_SLOPE
"""Of GELU, which is fitted; the others are closer. A block of 128 rows may hold nothing larger, since GELU is nearly 0 for most negative numbers."""


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "relu"])
def test_case_G11_an_activation_and_its_gradient_write_their_operands(name):
    x, dy = data(130, 256, 1), data(130, 256, 2)
    leaf = x.double().requires_grad_()
    wanted = ACTIVATIONS[name](leaf)
    wanted.backward(dy.double())
    holds(activation_both(x, name), wanted.detach(), torch.full_like(x, VALUE_ERROR))
    holds(activation_both(x, name, dy), leaf.grad, SLOPE_ERROR * dy.abs())


@triton.jit
def activate_kernel(x, out, NAME: tl.constexpr, SLOPE: tl.constexpr):
    places = tl.arange(0, 1024)
    tl.store(out + places, activate(tl.load(x + places), NAME, SLOPE))


@pytest.mark.parametrize(("name", "value", "slope"), [("gelu", 2.9e-4, 1e-3), ("gelu_tanh", 1e-6, 1e-5), ("silu", 1e-6, 1e-5), ("relu", 1e-6, 0)])
def test_activations_are_as_close_as_they_say(name, value, slope):
    """Before they are rounded, which hides it."""
    leaf = torch.linspace(-8, 8, 1024, dtype=torch.float64, requires_grad=True)
    wanted = ACTIVATIONS[name](leaf)
    wanted.sum().backward()
    for exact, derivative, error in ((wanted, False, value + HARDWARE_VALUE), (leaf.grad, True, slope + HARDWARE_SLOPE)):
        out = torch.empty(1024, device=DEVICE)
        activate_kernel[(1,)](leaf.detach().float().to(DEVICE), out, name, derivative)
        assert (out.cpu().double() - exact.detach()).abs().max() <= error


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "relu"])
def test_activations_of_huge_values_are_numbers(name):
    x = torch.full((128, 128), -(2.0**100), device=DEVICE)
    x[:, ::2] = 2.0**100
    wanted = torch.where(x > 0, x, 0)
    assert torch.equal(activation_both(x, name).along.dequantize(), wanted)
    assert torch.equal(activation_both(x, name, torch.ones_like(x)).along.dequantize(), wanted.sign())


def test_activations_of_strided_matrices_of_nothing_and_of_what_does_not_fit():
    x = data(6, 512, 1)
    view = activation_both(x[::2, 128:256], "silu", x[::2, 256:384])
    whole = activation_both(x[::2, 128:256].contiguous(), "silu", x[::2, 256:384].contiguous())
    assert torch.equal(view.along.dequantize(), whole.along.dequantize())
    assert activation_both(x[:0], "relu").along.elements.shape == (0, 512)
    assert activation_both(torch.full((1, 128), float("nan"), device=DEVICE), "relu").along.scales[0].isnan().all()
    with pytest.raises(RequestError, match="no native kernel"):
        activation_both(x, "relu2")
    with pytest.raises(RequestError, match="of one shape"):
        activation_both(x, "relu", x[:3])


@pytest.fixture
def own(monkeypatch):
    """On a CPU the interpreter computes products too."""
    if DEVICE == "cpu":
        monkeypatch.setattr("gem_precision.kernels.product.choose", lambda m, n, k, square: "own")


def near(got, wanted, error):
    """Relative error of the whole tensor."""
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).norm() / wanted.norm()) <= error


ERROR = 0.06 if DEVICE == "cuda" else 0.4
"""Two roundings to E4M3, each about 2^-5; the interpreter's lost carries add more. Places and transpositions that are wrong give about 1.4."""


@pytest.mark.parametrize("layer", [True, False], ids=["layer", "rms"])
def test_case_G11_a_norm_before_a_linear_layer(own, layer):
    x, weight, gamma = data(130, 256, 1), data(128, 256, 2) / 50, 1 + data(1, 256, 3)[0] / 16
    leaves = [t.clone().requires_grad_() for t in (x, weight, gamma, *([data(1, 256, 4)[0] / 8] if layer else []))]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    grad = data(130, 128, 5)
    out, _ = norm_linear(leaves[0], leaves[1], cast_weight(weight), *leaves[2:], norm=kind(layer))
    out.backward(grad.to(out.dtype))
    wanted = normed(exact[0], exact[2], exact[3] if layer else None) @ exact[1].T
    wanted.backward(grad.double())
    assert out.dtype == torch.bfloat16
    assert near(out, wanted, ERROR)
    for got, leaf in zip(leaves, exact, strict=True):
        assert got.grad.dtype == got.dtype
        assert near(got.grad, leaf.grad, ERROR)


def test_case_G11_two_linear_layers_with_an_activation_between_them(own):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(128, 256, bias=False), nn.GELU(), nn.Linear(256, 128, bias=False)).to(DEVICE)
    x, grad = data(130, 128, 1).requires_grad_(), data(130, 128, 2)
    first, second = (layers[i].weight.detach().clone().requires_grad_() for i in (0, 2))
    out = mlp(x, first, second, (cast_weight(first), cast_weight(second)), "gelu")
    out.backward(grad.to(out.dtype))
    exact = x.detach().double().requires_grad_()
    layers.double()(exact).backward(grad.double())
    assert near(out, layers(exact), ERROR)
    for got, wanted in ((x.grad, exact.grad), (first.grad, layers[0].weight.grad), (second.grad, layers[2].weight.grad)):
        assert near(got, wanted, 1.5 * ERROR)  # more roundings: with exact sums they come to 0.074
