"""Formats of weights on the wire, against a slow reference that looks for the nearest number."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gem_parallel.comm.backends import PayloadName
from gem_parallel.comm.payload import BLOCK, LARGEST, PAYLOADS, Bf16, Fp8

NUMBERS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
NUMBERS = NUMBERS[torch.isfinite(NUMBERS)].double()
"""All finite E4M3 numbers."""


def there_and_back(payload: Bf16 | Fp8, parts: list[Tensor]) -> Tensor:
    """What ranks with these parts receive; memory is poisoned where it must be written."""
    packed = [payload.pack(part) for part in parts]
    assert len({p.shape for p in packed}) == 1
    output = torch.full((sum(part.numel() for part in parts),), torch.nan)
    payload.unpack(torch.cat(packed), output, len(parts))
    return output


def nearest(part: Tensor) -> Tensor:
    """Distances to the nearest number times the smallest power of two that clips none, block by block."""
    out = []
    for block in part.double().split(BLOCK):
        largest = float(block.abs().max()) / LARGEST
        scale = 2.0 ** math.ceil(math.log2(largest)) if largest else 1.0
        out.append((block[:, None] - NUMBERS * scale).abs().min(dim=1).values)
    return torch.cat(out)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 300), st.integers(-20, 20), st.integers(0, 99))
def test_eight_bits_give_the_nearest_number(ranks: int, size: int, power: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(size, generator=generator) * 2.0**power * 10 ** torch.randn(size, generator=generator) for _ in range(ranks)]
    got = there_and_back(Fp8(), parts)
    assert torch.isfinite(got).all()
    for part, back in zip(parts, got.split(size), strict=True):
        assert torch.allclose((part.double() - back.double()).abs(), nearest(part), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_zeros_ones_powers_and_nothing_come_back_as_they_are(name: str) -> None:
    payload = PAYLOADS[name]
    assert isinstance(payload, Bf16 | Fp8)
    for part in (torch.zeros(130), torch.ones(1), torch.tensor([LARGEST, -LARGEST, 2.0, 0.0]), 2.0 ** torch.arange(-8.0, 8.0), torch.zeros(0)):
        assert torch.equal(there_and_back(payload, [part, -part]), torch.cat([part, -part]))


def test_what_is_not_finite_stays_not_finite() -> None:
    for bad in (torch.nan, torch.inf):
        for payload in (Bf16(), Fp8()):
            assert not torch.isfinite(there_and_back(payload, [torch.tensor([bad, 1.0])])).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000))
def test_bytes_depend_on_the_size_alone(size: int) -> None:
    assert Bf16().pack(torch.randn(size)).nbytes == 2 * size
    assert Fp8().pack(torch.randn(size)).nbytes == 129 * math.ceil(size / BLOCK)
    assert PAYLOADS["fp32"] is None
    assert PAYLOADS.keys() == set(get_args(PayloadName))
