"""Microscaling formats against those of torchao, to the bit, where it is installed (``pip install --no-deps torchao``)."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gem_precision.formats import find_format, quantize

pytest.importorskip("torchao", reason="torchao is not installed")

from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4
from torchao.prototype.mx_formats.mx_tensor import to_mx

THEIRS = {"mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2, "mxfp4_e2m1": torch.float4_e2m1fn_x2}
RULES = {"floor": ScaleCalculationMode.FLOOR, "rceil": ScaleCalculationMode.RCEIL, "even": ScaleCalculationMode.EVEN}


def values(kind: str) -> Tensor:
    """``[64, 128]`` float32."""
    draw = torch.Generator().manual_seed(3)
    plain = torch.randn(64, 128, generator=draw)
    if kind == "normal":
        return plain
    if kind == "wide":
        return plain * torch.exp2(torch.randn(64, 128, generator=draw) * 12)
    if kind == "tiny and huge":  # but no scale of 2^-127, by which torchao divides as if it were 2^-126
        return plain * torch.exp2(torch.randint(-100, 121, (64, 4), generator=draw).float()).repeat_interleave(32, 1)
    if kind == "largest of a block":  # amax a little below, at and above the largest elements and powers of two
        edges = torch.tensor([448.0, 57344.0, 6.0, 1.0, 1.75, 1.9375, 1.875, 2.0]).repeat(8)[:, None]
        return plain.sign() * edges * torch.exp2(torch.randint(-1, 1, (64, 128), generator=draw).float() * 1e-6)
    return torch.where(torch.rand(64, 128, generator=draw) < 0.98, 0.0, plain)  # "sparse": most blocks hold zeros


@pytest.mark.parametrize("kind", ["normal", "wide", "tiny and huge", "largest of a block", "sparse"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", THEIRS)
def test_scales_and_elements_are_those_of_torchao(name: str, rule: str, kind: str) -> None:
    x = values(kind)
    mine = quantize(x, replace(find_format(name), scale=rule))
    scales, elements = to_mx(x, THEIRS[name], 32, RULES[rule])
    assert torch.equal(mine.scales, scales.float())
    found = f4_unpacked_to_f32(unpack_uint4(elements)) if "fp4" in name else elements.float()
    assert torch.equal(mine.elements, found.view(64, 128))


def test_planted_fault_another_rule_is_another_scale() -> None:
    x = values("wide")
    floor, _ = to_mx(x, THEIRS["mxfp8_e4m3"], 32, ScaleCalculationMode.FLOOR)
    assert not torch.equal(quantize(x, replace(find_format("mxfp8_e4m3"), scale="rceil")).scales, floor.float())
