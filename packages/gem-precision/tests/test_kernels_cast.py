"""Casts to ``fp8_block`` in Triton: scales, places, transposition and padding in the interpreter, rounding on a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.spec import RequestError
from gem_precision.formats import find_format, quantize

pytest.importorskip("triton")

import triton
import triton.language as tl

from gem_precision.kernels import cast as module
from gem_precision.kernels.cast import Operand, cast_and_sum, cast_both, cast_squares, cast_weight, comes_in_pairs
from gem_precision.kernels.language import inverse_scale, scale
from gem_precision.kernels.words import _scales

ROW, SQUARE = find_format("fp8_e4m3_1x128"), find_format("fp8_e4m3_128x128")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, of infinity times 0, in the interpreter


def padded(x):
    full = torch.zeros(-(-x.shape[0] // 128) * 128, x.shape[1], device=x.device)
    full[: x.shape[0]] = x
    return full


def same(got, wanted):
    return got.shape == wanted.shape and bool(((got == wanted) | (got.isnan() & wanted.isnan())).all())


def agrees(operand: Operand, x, form):
    wanted = quantize(x, form)
    elements = DEVICE == "cpu" or same(operand.elements.float(), wanted.elements)  # the interpreter knows no NaN in FP8; the scale does
    return elements and same(operand.dequantize(), wanted.dequantize()) and same(operand.scales, wanted.scales)


def check_both(x):
    both = cast_both(x)
    full = padded(x.float())
    assert agrees(both.along, full, ROW)
    assert agrees(both.turned, full.T.contiguous(), ROW)
    return both


@pytest.fixture
def poisoned(monkeypatch):
    """Fresh memory holds NaN, so that an element that nothing writes shows."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **how: empty(*sizes, **how).fill_(float("nan")))


@pytest.mark.parametrize("rows", [0, 1, 127, 128, 131])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_matrix_is_cast_along_both_axes_with_rows_of_zeros_behind_it(block_numbers, poisoned, rows, dtype):
    x = block_numbers(max(rows, 1), 256, rows)[:rows].to(DEVICE)
    if dtype == torch.float16:
        x = x.clamp(-60000, 60000).sign() * 2.0 ** x.abs().log2().floor().clamp(-14, 15)
    check_both(x.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_zeros_of_tiny_numbers_and_of_none(block_numbers, poisoned, dtype):
    x = block_numbers(256, 128).to(DEVICE)
    x[3], x[:, 5], x[128:, 7] = 0, 0, 0
    x[10] = 2.0**-125 * x[10].sign()  # its scale is 2^-127, which is subnormal
    x[20, 30], x[200, 40], x[201, 41] = float("nan"), float("inf"), float("-inf")
    both = check_both(x.to(dtype))
    assert both.along.scales[3, 0] == both.along.scales[10, 0] == 2.0**-127
    assert both.along.scales.isnan().sum() == 3
    assert both.turned.scales.isnan().sum() == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 131, 256])
def test_a_cast_also_sums_over_rows(block_numbers, poisoned, rows, dtype):
    x = block_numbers(max(rows, 1), 256, rows)[:rows].to(DEVICE)
    both, sums = cast_and_sum(x.to(dtype))
    assert same(both.turned.dequantize(), cast_both(x).turned.dequantize())
    wanted = x.double().sum(0)
    assert sums.dtype == torch.float32
    assert sums.shape == (256,)
    assert ((sums.double() - wanted).abs() <= 1e-5 * x.double().abs().sum(0)).all()


@pytest.mark.parametrize("programs", [1, 2, 5])
def test_a_program_that_casts_many_tiles_gives_what_one_for_each_gives(block_numbers, poisoned, monkeypatch, programs):
    """Of two columns of tiles: one program for each, the same, and two that share five strips."""
    monkeypatch.setattr(module, "PROGRAMS", programs)
    x = block_numbers(600, 256, 4).to(DEVICE).bfloat16()
    both, sums = cast_and_sum(x)
    alone = cast_both(x)
    for many, one in ((both.along, alone.along), (both.turned, alone.turned)):
        assert torch.equal(many.elements.view(torch.uint8), one.elements.view(torch.uint8))
        assert torch.equal(many.scales, one.scales)
    check_both(x)
    assert ((sums.double() - x.double().sum(0)).abs() <= 1e-5 * x.double().abs().sum(0)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 256), (5, 0), (0, 0)])
def test_nothing_is_cast_to_nothing_and_sums_to_zeros(shape, dtype):
    both, sums = cast_and_sum(torch.zeros(shape, dtype=dtype, device=DEVICE))
    rows = -(-shape[0] // 128) * 128
    assert both.along.elements.shape == (rows, shape[1])
    assert both.turned.elements.shape == (shape[1], rows)
    assert torch.equal(sums, torch.zeros(shape[1], device=DEVICE))
    assert cast_squares(torch.zeros(shape, dtype=dtype, device=DEVICE)).turned.elements.shape == (shape[1], -(-shape[0] // 512) * 512)


def test_bfloat16_is_cast_in_words_where_it_lies_in_words(block_numbers, monkeypatch):
    wide = block_numbers(130, 512, 3).to(DEVICE).bfloat16()
    views = {"whole": wide, "columns": wide[:, 128:384], "every other row": wide[::2, :128], "odd": wide[:, 1:129], "one row": wide[:1, :128]}
    flat = block_numbers(1, 129 * 130, 5).to(DEVICE).bfloat16().view(130, 129)
    views |= {"rows of 129": flat[:, :128], "another dtype": wide.float()}
    assert {name: comes_in_pairs(view) for name, view in views.items()} == dict.fromkeys(views, True) | dict.fromkeys(
        ("odd", "rows of 129", "another dtype"), False
    )
    for view in views.values():
        assert same(cast_both(view).turned.dequantize(), cast_both(view.float().contiguous()).turned.dequantize())
    monkeypatch.setattr(module, "FARTHEST", 200)
    assert comes_in_pairs(wide[:, :128].contiguous())
    assert not comes_in_pairs(wide)


@triton.jit
def scales_kernel(words, bits, out, all_of_them, N: tl.constexpr):
    """Two at a time, and one by one."""
    pair, each = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(0) * 2 * N + tl.arange(0, 2 * N)
    first, second, by_first, by_second = _scales(tl.load(words + pair))
    tl.store(out + each, tl.interleave(first, second))
    tl.store(out + all_of_them + each, tl.interleave(by_first, by_second))
    tl.store(out + 2 * all_of_them + each, scale(tl.load(bits + each)))
    tl.store(out + 3 * all_of_them + each, inverse_scale(tl.load(bits + each)))


def test_scales_of_two_blocks_at_once_are_those_of_each_for_every_magnitude():
    magnitudes = torch.arange(1 << 15, dtype=torch.int32, device=DEVICE)
    order = torch.randperm(1 << 15, generator=torch.Generator().manual_seed(0)).to(DEVICE)  # neighbours that have nothing to do with each other
    out = torch.empty(4, 1 << 15, device=DEVICE)
    scales_kernel[(32,)](magnitudes[order].short().view(torch.int32), magnitudes[order] << 16, out, 1 << 15, 1 << 9)
    for pairs, single in ((out[0], out[2]), (out[1], out[3])):
        assert same(pairs, single)
    assert out[0].isnan().sum() == 1 << 7


def test_scales_step_at_448_times_a_power_of_two():
    x = torch.zeros(128, 128, device=DEVICE)
    amax = torch.tensor([448.0, 448.00003, 447.99997, 224, 1.75, 1.7500001, 1, 3.4e38, 1e-40])
    x[range(9), range(9)] = amax.to(DEVICE)
    wanted = torch.tensor([1, 2, 1, 0.5, 2.0**-8, 2.0**-7, 2.0**-8, 2.0**120, 2.0**-127])
    both = cast_both(x)
    assert torch.equal(both.along.scales[:9, 0].cpu(), wanted)
    assert torch.equal(both.turned.scales[:9, 0].cpu(), wanted)


def test_strided_rows_and_one_row_of_any_stride(block_numbers):
    wide = block_numbers(130, 512, 3).to(DEVICE)
    for view in (wide[:, 128:384], wide[::2, :128]):
        assert same(cast_both(view).turned.dequantize(), cast_both(view.contiguous()).turned.dequantize())
    check_both(wide[:1, :128].as_strided((1, 128), (1, 1)))


@settings(max_examples=6, deadline=None)
@given(rows=st.integers(1, 260), tiles=st.integers(1, 2), seed=st.integers(0, 99))
def test_any_height(block_numbers, rows, tiles, seed):
    check_both(block_numbers(rows, 128 * tiles, seed).to(DEVICE))


def test_layouts_are_those_that_products_read(block_numbers):
    both = cast_both(block_numbers(130, 384).to(DEVICE))
    assert both.along.elements.is_contiguous()
    assert both.turned.elements.is_contiguous()
    assert both.along.scales.stride() == (1, 256)
    assert both.turned.scales.stride() == (1, 384)
    weight = cast_weight(block_numbers(256, 384).to(DEVICE))
    assert weight.along.scales.is_contiguous()
    assert weight.turned.scales.is_contiguous()


def test_a_weight_has_the_same_elements_in_both_orientations(block_numbers, poisoned):
    w = block_numbers(256, 384).to(DEVICE)
    w[130, 7], w[:128, :128] = float("nan"), 0
    both = cast_weight(w)
    assert agrees(both.along, w, SQUARE)
    assert same(both.turned.elements.float(), both.along.elements.T.float())
    assert same(both.turned.scales, both.along.scales.T)
    assert both.turned.square
    assert cast_weight(w[:0]).turned.elements.shape == (384, 0)


@pytest.mark.parametrize("rows", [0, 1, 130, 512, 600])
def test_activations_in_squares_are_read_by_rows_as_they_are_and_by_squares_transposed(block_numbers, poisoned, rows):
    x = block_numbers(max(rows, 1), 256, rows)[:rows].to(DEVICE)
    both = cast_squares(x)
    full = torch.zeros(-(-rows // 512) * 512, 256, device=DEVICE)
    full[:rows] = x
    wanted = quantize(full, SQUARE)
    assert (both.along.square, both.turned.square) == (False, True)
    assert both.along.scales.T.is_contiguous()
    assert same(both.along.scales, wanted.scales.repeat_interleave(128, 0))
    assert same(both.along.dequantize(), wanted.dequantize())
    assert same(both.turned.dequantize(), wanted.dequantize().T)
    assert same(both.turned.scales, wanted.scales.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_may_be_padded_further(block_numbers, poisoned, dtype):
    x = block_numbers(130, 128, 2).to(DEVICE).to(dtype)
    plain, (tall, sums) = cast_both(x), cast_and_sum(x, multiple=512)
    assert same(tall.along.elements[:256].float(), plain.along.elements.float())
    assert not tall.along.elements[256:].float().any()
    assert not tall.turned.dequantize()[:, 256:].any()
    assert same(tall.turned.dequantize()[:, :256], plain.turned.dequantize())
    assert same(sums, cast_and_sum(x)[1])


def test_what_an_operand_stands_for(block_numbers):
    x = block_numbers(128, 256).to(DEVICE)
    for operand in (cast_both(x).along, cast_weight(x).along):
        assert torch.equal(operand.dequantize(), x)


@pytest.mark.parametrize("cast", [cast_both, cast_and_sum, cast_squares, cast_weight])
def test_operands_that_do_not_fit_are_refused(cast):
    x = torch.ones(256, 256)
    for bad, why in ((x[:, :100], "multiple of 128"), (x.T[:, :128].T[:128].T, "next to each other"), (x[0], "matrix"), (x.long(), "floating")):
        with pytest.raises(RequestError, match=why):
            cast(bad)
    with pytest.raises(RequestError, match="100 rows"):
        cast_weight(x[:100])
    with pytest.raises(RequestError, match="next to each other"):
        cast(x[:1].expand(128, 256))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elements_round_as_the_formats_do(dtype):
    torch.manual_seed(0)
    x = torch.randn(1000, 512, device="cuda") * torch.logspace(-30, 30, 1000, device="cuda")[:, None]
    x[5], x[9, 100], x[40, 300] = 0, float("nan"), float("inf")
    check_both(x.to(dtype))
    steps = torch.arange(-4480, 4480, device="cuda").repeat(4)[: 256 * 128].reshape(256, 128) / 160  # ties and subnormals
    check_both(steps.to(dtype))
    full = x[:896].to(dtype).float()
    weight = cast_weight(full)
    assert agrees(weight.along, full, SQUARE)
    assert same(weight.turned.dequantize(), quantize(full, SQUARE).dequantize().T)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize(("rows", "columns"), [(70_001, 128), (30_000, 1024), (9_999, 4096)])
def test_programs_that_cast_many_tiles_round_as_the_formats_do(rows, columns):
    torch.manual_seed(0)
    x = (torch.randn(rows, columns, device="cuda") * torch.logspace(-30, 30, rows, device="cuda")[:, None]).bfloat16()
    both = check_both(x)
    again, sums = cast_and_sum(x)
    assert same(again.along.elements.float(), both.along.elements.float())
    assert same(again.turned.elements.float(), both.turned.elements.float())
    assert same(again.turned.scales, both.turned.scales)
    assert ((sums.double() - x.double().sum(0)).abs() <= 1e-5 * x.double().abs().sum(0)).all()
