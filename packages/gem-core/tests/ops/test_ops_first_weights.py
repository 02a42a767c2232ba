"""First weights: each number is the formula's, whatever part of a table is drawn, into what tensor, in what blocks; and they look drawn."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gem_core.ops import first_weights
from gem_core.ops.first_weights import draw_rows

WORD = 2**64


def mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) % WORD
    return word ^ (word >> 31)


def number(seed: int, row: int, column: int, scale: float) -> float:
    """The formula of the docstring in whole numbers, rounded once."""
    golden = 0x9E3779B97F4A7C15
    word = mix((mix((seed + (row + 1) * golden) % WORD) + (column // 2 + 1) * golden) % WORD)
    bits = word >> (16 if column % 2 else 40) & (2**24 - 1)
    return float(np.float32(bits / 2**23 - 1) * np.float32(scale))


def drawn(rows: int, columns: int, **how: Any) -> torch.Tensor:
    out = torch.full((rows, columns), torch.nan)
    draw_rows(out, **{"seed": 5, "scale": 0.3, **how})
    return out


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    rows=st.integers(0, 9), columns=st.integers(0, 7), row=st.integers(0, 2**40), column=st.integers(0, 9), seed=st.integers(0, 2**63 - 1),
    block=st.integers(1, 20), scale=st.sampled_from([0.0, 1.0, 0.3, 1e-3]),
)  # fmt: skip
@example(rows=3, columns=3, row=2**40, column=1, seed=2**63 - 1, block=2, scale=1.0)
def test_every_number_is_the_formulas(rows: int, columns: int, row: int, column: int, seed: int, block: int, scale: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_weights, "BLOCK", block)
        out = drawn(rows, columns, row=row, column=column, seed=seed, scale=scale)
    assert out.tolist() == [[number(seed, row + r, column + c, scale) for c in range(columns)] for r in range(rows)]


def test_the_numbers_are_pinned() -> None:
    """Others would silently change every run's first weights."""
    expected = [number(5, 0, c, 0.3) for c in range(3)]
    assert expected == pytest.approx([0.28790482878685, -0.13490164279937744, -0.23647868633270264], abs=1e-9)
    assert drawn(1, 3)[0].tolist() == expected


@pytest.mark.parametrize("rows", [1, 2, 37, 500])
def test_parts_have_the_bits_of_the_whole(rows: int) -> None:
    whole = drawn(500, 13)
    for first in range(0, 500, rows):
        assert torch.equal(drawn(min(rows, 500 - first), 13, row=first), whole[first : first + rows])
    for left in range(13):
        assert torch.equal(drawn(500, 13 - left, column=left), whole[:, left:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_and_strides_are_rounded_to_in_place(dtype: torch.dtype) -> None:
    table = torch.full((40, 30), 7.0, dtype=dtype)
    draw_rows(table[::2, 3:20:2], seed=5, scale=0.3, row=4, column=3)
    assert torch.equal(table[::2, 3:20:2], drawn(20, 9, row=4, column=3).to(dtype))
    assert bool((table[1::2] == 7).all())
    assert bool((table[:, 4:20:2] == 7).all())
    turned = torch.empty(8, 20).t()
    draw_rows(turned, seed=5, scale=0.3)
    assert torch.equal(turned, drawn(20, 8))


def test_numbers_are_uniform_and_independent_of_their_neighbours() -> None:
    numbers = drawn(4000, 64, scale=1.0)
    assert -1 <= float(numbers.min()) < -0.999
    assert 0.999 < float(numbers.max()) < 1
    count = numbers.numel()
    counts = torch.histc(numbers, 256, -1, 1)
    assert float(((counts - count / 256) ** 2).sum() / (count / 256)) < 255 + 5 * math.sqrt(2 * 255)  # chi squared, 5 deviations
    for left, right in ((numbers[1:], numbers[:-1]), (numbers[:, 1:], numbers[:, :-1]), (numbers, drawn(4000, 64, scale=1.0, seed=6))):
        assert abs(float((left * right).mean())) * 3 < 5 / math.sqrt(left.numel())  # the variance of a number is 1 / 3
    assert torch.unique(numbers, dim=0).shape[0] == 4000
    # 24 bits of 256 thousand numbers: as many are met twice as among numbers drawn at random
    assert torch.unique(numbers).numel() == pytest.approx(2**24 * -math.expm1(-count / 2**24), rel=1e-3)


def test_memory_beside_the_table_does_not_grow_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    empty = torch.empty

    def counting(*size: int, **words: Any) -> torch.Tensor:
        sizes.append(math.prod(size))
        return empty(*size, **words)

    out = torch.empty(10_000, 8)
    monkeypatch.setattr(first_weights, "BLOCK", 1024)
    monkeypatch.setattr(first_weights.torch, "empty", counting)
    draw_rows(out, seed=1, scale=1.0)
    assert max(sizes) == 2 * 1024
    assert sum(sizes) == 80_000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_gpu_draws_the_same_bits(dtype: torch.dtype) -> None:
    """More than one block; the other rows of the table keep what they hold."""
    table = torch.full((70_000, 40), 7.0, dtype=dtype, device="cuda")
    draw_rows(table[1:-1, 3:], seed=2**63 - 1, scale=0.3, row=2**40, column=5)
    plain = torch.empty(69_998, 37, dtype=dtype)
    draw_rows(plain, seed=2**63 - 1, scale=0.3, row=2**40, column=5)
    assert torch.equal(table[1:-1, 3:].cpu(), plain)
    assert bool((table[0] == 7).all())
    assert bool((table[:, :3] == 7).all())
