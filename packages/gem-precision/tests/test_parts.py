"""Weights in parts: what ranks pack and unpack against the whole weight rounded at once, and the bytes of it."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gem_core.spec import LOW_WEIGHTS, RequestError
from gem_precision.formats import E2M1, E4M3, E5M2, FORMATS, Format, code_points, find_format, quantize
from gem_precision.formats.packed import element_bytes, pack_elements, pack_scales, scale_bytes, unpack_elements, unpack_scales
from gem_precision.hadamard import turned
from gem_precision.linear import emulated_linear, lower
from gem_precision.presets import PRESETS
from gem_precision.weights import HeldWeight

HALF = replace(find_format("mxfp8_e4m3"), name="half", block=(3, 5))
"""Blocks that fit nothing."""


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, zeros' signs included; NaN where the other is NaN."""
    where = a.isnan()
    return torch.equal(where, b.isnan()) and torch.equal(a.masked_fill(where, 0).view(torch.int32), b.masked_fill(where, 0).view(torch.int32))


def travel(weight: Tensor, form: Format, ranks: int, hadamard: int | None = None) -> tuple[list[tuple[Tensor, Tensor]], int]:
    """What each rank reads (forward, transposed) of a weight in parts, and the bytes that a rank sends; fresh memory is poisoned."""
    out, columns = weight.shape
    rows = -(-out // ranks)
    held = [HeldWeight(form, hadamard, (out, columns)) for _ in range(ranks)]
    parts = [weight[rank * rows : (rank + 1) * rows] for rank in range(ranks)]
    for rank, each in enumerate(held):
        each.split(rows, rank, ranks)
    told = [each.largest(part) for each, part in zip(held, parts, strict=True)]
    agreed = torch.stack(told).amax(0)
    packed = [each.pack(part, agreed.clone()) for each, part in zip(held, parts, strict=True)]
    assert len({(len(p), len(t)) for p, t in zip(packed, told, strict=True)}) == 1, "every rank sends as much"
    read = []
    for each in held:
        whole = torch.full((ranks * rows, columns), torch.nan)
        each.unpack(torch.stack(packed), whole)
        read.append((each.operand(whole[:out], transposed=False), each.operand(whole[:out], transposed=True)))
    return read, packed[0].nbytes


def expected(weight: Tensor, form: Format, hadamard: int | None = None) -> tuple[Tensor, Tensor]:
    """The two operands of one process, from rounding the whole weight each way."""
    return quantize(turned(weight, hadamard), form).dequantize(), quantize(turned(weight.T, hadamard), form).dequantize()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([*FORMATS, "half"]), st.integers(1, 5), st.integers(1, 150), st.integers(1, 150), st.integers(0, 99))
def test_parts_give_the_bits_of_the_whole(name: str, ranks: int, out: int, columns: int, seed: int) -> None:
    """Odd sizes, ranks without rows, wide ranges, blocks over several parts, a NaN and an infinity."""
    form = FORMATS.get(name, HALF)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, columns, generator=generator) * 10 ** (3 * torch.randn(out, 1, generator=generator))
    if seed % 3 == 0:
        weight[out // 2, 0], weight[-1, -1] = torch.nan, -torch.inf
    want = expected(weight, form)
    for got in travel(weight, form, ranks)[0]:
        assert same(got[0], want[0])
        assert same(got[1], want[1])


def test_the_comparison_sees_scales_of_parts_alone() -> None:
    """Without what the ranks tell each other, a block that two parts share would have two scales."""
    torch.manual_seed(0)
    weight = torch.randn(48, 8)
    weight[0] *= 1e4
    form = find_format("mxfp8_e4m3_32x32")
    alone = torch.cat([quantize(part, form).dequantize() for part in weight.split(24)])
    assert not same(alone, quantize(weight, form).dequantize())
    assert same(travel(weight, form, 2)[0][1][0], quantize(weight, form).dequantize())


@pytest.mark.parametrize(("out", "ranks"), [(128, 2), (128, 4), (100, 3), (33, 4)])
def test_the_transform_turns_parts_as_the_whole(out: int, ranks: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(out, 64)
    want = expected(weight, find_format("mxfp8_e4m3"), hadamard=1)
    for got in travel(weight, find_format("mxfp8_e4m3"), ranks, hadamard=1)[0]:
        assert torch.allclose(got[0], want[0])
        assert torch.allclose(got[1], want[1])


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([name for name, form in FORMATS.items() if form.scale != "float"]), st.integers(1, 140), st.integers(1, 140), st.integers(0, 99)
)
def test_numbers_that_are_rounded_stay_as_they_are(name: str, out: int, columns: int, seed: int) -> None:
    """With scales that are powers of two: so a backend may cast a weight that has travelled."""
    weight = torch.randn(out, columns, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-6, 6, columns)
    once = quantize(weight, FORMATS[name]).dequantize()
    assert same(quantize(once, FORMATS[name]).dequantize(), once)


@pytest.mark.parametrize(
    ("name", "by", "travels"), [("fp8_block", None, True), ("mxfp8", None, True), ("fp8_block", "other", True), ("mxfp8", "other", False)]
)
def test_a_weight_travels_low_if_that_is_what_its_backend_reads(name: str, by: str | None, travels: bool) -> None:
    layer = nn.Linear(8, 8)
    lower(layer, PRESETS[name].rule(), None if by is None else lambda *operands: emulated_linear(*operands))
    assert hasattr(layer, LOW_WEIGHTS) == travels


def test_a_transform_over_two_parts_is_refused() -> None:
    with pytest.raises(RequestError, match="turns 32 outputs together, and a rank has 24 of 96"):
        travel(torch.ones(96, 8), find_format("mxfp8_e4m3"), 4, hadamard=1)


@pytest.mark.parametrize(
    ("name", "ranks", "each"),
    [
        ("fp8_e4m3_128x128", 2, 128 * 300 + 3),  # one copy for both sides; a scale of one byte a block
        ("mxfp8_e4m3", 2, 2 * 128 * 300 + 128 * 10 + 4 * 300),  # a copy each way
        ("fp8_e4m3_row", 2, 2 * 128 * 300 + 4 * (128 + 300)),  # float scales
        ("mxfp4_e2m1", 2, 128 * 300 + 128 * 10 + 4 * 300),  # two elements a byte
        ("fp8_e4m3_128x128", 3, 86 * 300 + 2 * 3),  # a part touches up to two rows of blocks
        ("fp8_e4m3_tensor", 4, 64 * 300 + 4),
    ],
)
def test_bytes_equal_the_formula(name: str, ranks: int, each: int) -> None:
    assert travel(torch.randn(256, 300), find_format(name), ranks)[1] == each


def test_a_part_is_rounded_once_for_each_value_where_somebody_says_when_it_changes() -> None:
    """Without, in every call: torch raises no version of parts that an optimiser updates as a list."""
    form, weight = find_format("fp8_e4m3_128x128"), torch.randn(256, 64)
    held = HeldWeight(form, None, (256, 64))
    held.split(128, 0, 2)
    part, nothing = weight[:128], held.largest(weight[:128])
    assert len(nothing) == 0
    first = held.pack(part, nothing)
    weight.mul_(3.0)
    second = held.pack(part, nothing)
    assert not torch.equal(first, second)
    held.changed()
    third = held.pack(part, nothing)
    assert torch.equal(second, third)
    assert held.pack(part, nothing) is third
    weight.mul_(3.0)
    held.changed()
    assert not torch.equal(held.pack(part, nothing), third)


def test_what_was_kept_goes_when_the_weight_is_in_parts_again() -> None:
    """And not before it was read: a weight may be gathered ahead of the layer that reads it."""
    held, whole = HeldWeight(find_format("mxfp8_e4m3"), None, (64, 32)), torch.empty(64, 32)
    held.split(64, 0, 1)
    received = held.pack(torch.randn(64, 32), torch.empty(0))[None]
    held.unpack(received, whole)
    held.freed()
    before = held.operand(whole, transposed=True)
    assert held.get(whole, "mine", lambda w: w + 1) is held.get(whole, "mine", lambda w: w + 1)
    held.freed()
    with pytest.raises(AssertionError):
        held.operand(whole, transposed=True)
    held.unpack(received, whole)
    assert torch.equal(held.operand(whole, transposed=True), before)


@pytest.mark.parametrize("element", [E4M3, E5M2, E2M1], ids=lambda e: e.name)
def test_every_code_point_comes_back(element: object) -> None:
    form = next(f for f in FORMATS.values() if f.element == element)
    values = code_points(form.element)
    values = values[values.isfinite() | values.isnan()]
    packed = pack_elements(values, form)
    assert packed.nbytes == element_bytes(form, len(values))
    assert same(unpack_elements(packed, form, len(values)), values)
    odd = pack_elements(values[:5], form)
    assert same(unpack_elements(odd, form, 5), values[:5])


def test_every_scale_comes_back() -> None:
    powers = torch.ldexp(torch.ones(255), torch.arange(-127, 128))
    for name, scales in (("mxfp8_e4m3", powers), ("fp8_e4m3_row", torch.rand(255) * 1e-30)):
        form, scales = find_format(name), torch.cat([scales, torch.tensor([math.nan])])
        packed = pack_scales(scales, form)
        assert packed.nbytes == scale_bytes(form, 256)
        assert same(unpack_scales(packed, form), scales)
