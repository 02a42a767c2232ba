"""Blocks and their scales: rules, edges, layouts."""

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gem_core.spec import RequestError
from gem_precision.formats import E4M3, FORMATS, Format, fake_quantize, find_format, quantize, round_to
from gem_precision.formats.scaled import scale_of

MX = find_format("mxfp8_e4m3")
BY_NAME = pytest.mark.parametrize("form", FORMATS.values(), ids=lambda f: f.name)


def sqnr(x: Tensor, y: Tensor) -> float:
    """Signal to quantisation noise in decibels."""
    return float(10 * torch.log10(x.square().sum() / (x - y).square().sum()))


def wide(*shape: int) -> Tensor:
    """Values of very different sizes: among equal ones a power-of-two scale changes no bit of a normal element."""
    draw = torch.Generator().manual_seed(5)
    return torch.randn(shape, generator=draw) * torch.exp2(torch.randn(shape, generator=draw) * 6)


def by_hand(x: Tensor, form: Format) -> Tensor:
    """Block by block, in plain loops and float64."""
    rows, columns = x.shape
    height, width = form.block[0] or max(rows, 1), form.block[1] or max(columns, 1)
    out = torch.zeros_like(x)
    for r in range(0, rows, height):
        for c in range(0, columns, width):
            block = x[r : r + height, c : c + width]
            amax, top = float(block.abs().max()), form.element.largest
            if form.scale == "float":
                scale = float(np.float32(amax) / np.float32(top)) or 1.0
            else:
                scale = 2.0 ** max(-127, math.ceil(math.log2(amax / top))) if amax else 2.0**-127
            out[r : r + height, c : c + width] = round_to(block / scale, form.element) * scale
    return out


@BY_NAME
@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (3, 33), (40, 70), (130, 257), (1, 128), (200, 1)])
def test_every_format_equals_plain_loops(form: Format, shape: tuple[int, int]) -> None:
    x = wide(*shape)
    got = quantize(x, form)
    assert torch.equal(got.dequantize(), by_hand(x, form))
    height, width = form.block[0] or shape[0], form.block[1] or shape[1]
    assert tuple(got.scales.shape) == (-(-shape[0] // height), -(-shape[1] // width))
    assert got.elements.shape == x.shape


@BY_NAME
def test_elements_are_values_of_the_format_and_scales_of_theirs(form: Format) -> None:
    got = quantize(torch.randn(70, 200) * 1e3, form)
    assert torch.equal(round_to(got.elements, form.element), got.elements)
    if form.e8m0:
        stored = got.scales.numpy().astype(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        assert np.array_equal(stored, got.scales.numpy())


@pytest.mark.parametrize(
    ("rule", "amax", "scale"),
    [
        ("floor", 448.0, 1.0),
        ("floor", 511.0, 1.0),  # saturates: the specification's rule
        ("floor", 512.0, 2.0),
        ("rceil", 448.0, 1.0),
        ("rceil", 448.001, 2.0),
        ("rceil", 896.0, 2.0),
        ("even", 447.0, 1.0),
        ("even", 495.9, 1.0),
        ("even", 496.0, 2.0),  # a tie, which rounds to 512 with three bits
        ("power", 449.0, 2.0),
        ("float", 224.0, 0.5),
    ],
)
def test_scales_by_rule(rule: str, amax: float, scale: float) -> None:
    form = replace(MX, scale=rule)  # type: ignore[arg-type]
    assert float(scale_of(torch.tensor(amax), form)) == scale


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.floats(min_value=2.0**-126, max_value=2.0**127, width=32))
def test_rceil_never_saturates_and_wastes_less_than_one_bit(amax: float) -> None:
    scale = float(scale_of(torch.tensor(amax), MX))
    assert amax / scale <= E4M3.largest
    assert scale == 2.0**-127 or amax / (scale / 2) > E4M3.largest


def test_the_floor_rule_saturates_where_rceil_does_not() -> None:
    x = torch.full((1, 32), 500.0)
    assert quantize(x, replace(MX, scale="floor")).saturated() == 1.0
    assert float(fake_quantize(x, replace(MX, scale="floor"))[0, 0]) == 448.0
    assert quantize(x, MX).saturated() == 0.0
    assert float(fake_quantize(x, MX)[0, 0]) == 512.0  # an even step of 32 at this scale


@BY_NAME
def test_zero_blocks_and_empty_tensors(form: Format) -> None:
    assert torch.equal(fake_quantize(torch.zeros(5, 70), form), torch.zeros(5, 70))
    for shape in ((0, 4), (4, 0), (0, 0), (2, 0, 4)):
        assert fake_quantize(torch.zeros(shape), form).shape == shape


@BY_NAME
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_never_lost(form: Format, bad: float) -> None:
    x = torch.ones(3, 300)
    x[1, 150] = bad
    got = quantize(x, form)
    assert got.dequantize()[1, 150].isnan()
    assert int(got.scales.isnan().sum()) == 1
    if form.block == (1, 32):
        assert int(got.dequantize().isnan().sum()) == 32


@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e30, 3e38])
def test_the_whole_range_of_float32_passes(size: float) -> None:
    x = torch.tensor([[size, -size / 2]])
    got = fake_quantize(x, MX)
    assert bool(got.isfinite().all())
    assert torch.allclose(got, x, rtol=0.07, atol=2.0**-136)


def test_square_blocks_are_the_same_for_the_transpose() -> None:
    x = wide(64, 96)
    square = find_format("mxfp8_e4m3_32x32")
    assert torch.equal(fake_quantize(x, square).T, fake_quantize(x.T.contiguous(), square))
    assert not torch.equal(fake_quantize(x, MX).T, fake_quantize(x.T.contiguous(), MX))


def test_blocks_keep_an_outlier_to_themselves() -> None:
    x = torch.randn(4, 256)
    x[0, 0] = 1e6
    others = torch.ones_like(x, dtype=torch.bool)
    others[0, :32] = False
    kept = {name: sqnr(x[others], fake_quantize(x, find_format(name))[others]) for name in ("mxfp8_e4m3", "fp8_e4m3_tensor")}
    assert kept["mxfp8_e4m3"] > 28
    assert kept["fp8_e4m3_tensor"] < kept["mxfp8_e4m3"] - 3


def test_more_axes_are_more_matrices() -> None:
    x = wide(2, 3, 40, 70)
    form = find_format("fp8_e4m3_128x128")
    whole = fake_quantize(x, form)
    assert torch.equal(whole[1, 2], fake_quantize(x[1, 2], form))
    assert torch.equal(fake_quantize(x[:, :, ::2, 1:], form)[0, 0], fake_quantize(x[0, 0, ::2, 1:].contiguous(), form))


def test_bad_requests() -> None:
    with pytest.raises(RequestError, match="mxfp8_e4m3"):
        find_format("mxfp9")
    with pytest.raises(RequestError, match="1 axes"):
        quantize(torch.ones(3), MX)
