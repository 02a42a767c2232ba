"""Limits, index arithmetic and masks counts that every op and backend shares."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.batch import lengths_to_offsets
from gem_core.ops import gdpa, jagged_attention, jagged_pad
from gem_core.ops.checks import INT32_MAX, check_grid, check_index_range, check_rows, contents_checked
from gem_core.ops.hstu_attention import visible as hstu_visible
from gem_core.ops.jagged import pad_reference
from gem_core.ops.masks import block_pairs, hstu_pairs, pairs, visible
from gem_core.ops.padded import Padding
from gem_core.spec import RequestError
from gem_core.testing import jagged_lengths

LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=6)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=5),
    causal=st.booleans(),
    window=st.none() | st.integers(0, 15),
)
def test_pair_counts_equal_the_mask(rows, causal, window):
    q_lengths, k_lengths = (torch.tensor(side) for side in zip(*rows))
    mask = visible(q_lengths, k_lengths, 12, 12, causal=causal, window=window)
    queries = torch.arange(12) < q_lengths[:, None]
    assert pairs(q_lengths.tolist(), k_lengths.tolist(), causal=causal, window=window) == int((mask & queries[:, :, None]).sum())


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=5),
    causal=st.booleans(),
    window=st.none() | st.integers(0, 8),
)
def test_hstu_pair_counts_equal_the_mask(rows, causal, window):
    prefix, history, targets = (torch.tensor(side) for side in zip(*rows))
    lengths = prefix + history + targets
    mask = hstu_visible(lengths, 14, causal=causal, window=window, contextual=prefix, targets=targets)
    assert hstu_pairs(lengths.tolist(), prefix.tolist(), targets.tolist(), causal=causal, window=window) == int(mask.sum())


@pytest.mark.parametrize("length", [1, 2, 100])
def test_pair_counts_of_well_known_masks(length):
    assert pairs([length], [length]) == length**2
    assert pairs([length], [length], causal=True) == length * (length + 1) // 2
    assert pairs([length], [length], window=0) == length
    assert block_pairs([length], 64) == (length // 64) * 4096 + (length % 64) ** 2


def test_case_C05_counts_beyond_32_bits_are_exact():
    """Lengths as int32, products above 2^31: no wrap-around."""
    long = np.full(3, 70_000, dtype=np.int32)
    assert pairs(long, long) == 3 * 70_000**2 > 2**31
    assert pairs(long, long, causal=True) == 3 * 70_000 * 70_001 // 2
    assert block_pairs(long, 64) == 3 * (70_000 // 64 * 4096 + (70_000 % 64) ** 2)
    assert hstu_pairs(long, 0, 0, causal=True, window=None) == 3 * 70_000 * 70_001 // 2


@settings(max_examples=50, deadline=None, derandomize=True)
@given(count=st.integers(2**31 - 10, 2**31 + 10))
def test_case_C05_one_guard_for_every_32_bit_index(count):
    if count <= INT32_MAX:
        check_index_range(count, "tiles")
        return
    with pytest.raises(RequestError, match=f"index over tiles: {count} is above the limit of 2147483647"):
        check_index_range(count, "tiles")


@settings(max_examples=25, deadline=None, derandomize=True)
@given(rows=st.integers(2**15, 2**17), longest=st.integers(2**14, 2**16))
def test_case_C05_rows_times_longest_is_guarded_on_meta_tensors(rows, longest):
    values, offsets = torch.empty(5, 1, device="meta"), torch.empty(rows + 1, dtype=torch.int64, device="meta")
    if rows * longest <= INT32_MAX:
        assert check_rows("op", "x", offsets, values, longest) == rows
        return
    with pytest.raises(RequestError, match="rows times longest row of x"):
        check_rows("op", "x", offsets, values, longest)


def test_case_C01_int32_lengths_become_int64_offsets():
    lengths = torch.tensor([2**31 - 1, 1, 1], dtype=torch.int32)
    offsets = lengths_to_offsets(lengths)
    assert offsets.tolist() == [0, 2**31 - 1, 2**31, 2**31 + 1]


def test_case_C01_int32_offsets_are_refused():
    q = torch.randn(3, 1, 4)
    offsets = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(RequestError, match=r"offsets of k are torch\.int32"):
        gdpa(q, q, q, offsets, offsets, max_q=3, max_k=3)


def test_case_C02_padding_above_2_to_the_31_elements_has_64_bit_shapes():
    """(rows - 1) * longest * width just over 2^31 - 1: shapes on the meta device, indices as int64."""
    rows, longest, width = 1025, 2**13, 2**8
    assert (rows - 1) * longest * width > INT32_MAX
    values, offsets = torch.empty(10, width, device="meta"), torch.empty(rows + 1, dtype=torch.int64, device="meta")
    dense = pad_reference(values, offsets, max_length=longest)
    assert dense.shape == (rows, longest, width)
    assert dense.numel() > INT32_MAX
    padding = Padding(offsets, 10, longest)
    assert padding.slot.dtype == padding.token.dtype == torch.int64


def test_case_C02_guard_raises_before_any_work():
    values, offsets = torch.empty(10, 1, device="meta"), torch.empty(2**16 + 1, dtype=torch.int64, device="meta")
    with pytest.raises(RequestError, match="is above the limit"):
        jagged_pad(values, offsets, max_length=2**16)


def test_case_C09_a_long_axis_belongs_on_x():
    check_grid((2**31 - 1, 65_535, 65_535), "gdpa")
    for grid, axis in (((1, 65_536), "y"), ((1, 1, 65_536), "z"), ((2**31,), "x")):
        with pytest.raises(RequestError, match=f"launch of gdpa: {max(grid)} blocks along {axis}"):
            check_grid(grid, "gdpa")


@settings(max_examples=40, deadline=None, derandomize=True)
@given(lengths=jagged_lengths(max_rows=6, max_length=9), limit=st.integers(0, 9))
def test_slots_and_tokens_are_inverse(lengths, limit):
    offsets = lengths_to_offsets(torch.tensor(lengths, dtype=torch.int64))
    total = sum(lengths)
    rows = Padding(offsets, total, limit)
    kept = [t for t in range(total) if rows.slot[t] < len(lengths) * limit]
    assert len(kept) == sum(min(length, limit) for length in lengths)
    assert rows.token[rows.slot[kept]].tolist() == kept
    assert int((rows.token < total).sum()) == len(kept)
    assert rows.cut == (len(kept) < total)
    assert rows.is_cut().tolist() == [t not in kept for t in range(total)]


def on(device):
    return SimpleNamespace(device=torch.device(device))


@pytest.mark.parametrize(("value", "on_cuda"), [(None, False), ("", False), ("full", True)])
def test_offsets_on_a_gpu_are_checked_where_that_is_asked(monkeypatch, value, on_cuda):
    if value is None:
        monkeypatch.delenv("GEM_CHECK", raising=False)
    else:
        monkeypatch.setenv("GEM_CHECK", value)
    assert contents_checked(on("cpu"))
    assert contents_checked(on("cuda")) is on_cuda
    assert not contents_checked(on("meta"))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not contents_checked(on("cuda"))


def test_another_word_for_the_checks_is_refused(monkeypatch):
    monkeypatch.setenv("GEM_CHECK", "ful")
    with pytest.raises(RequestError, match="GEM_CHECK='ful': the only value is full"):
        contents_checked(on("cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("offsets", "message"),
    [([0, 3, 2, 5], "offsets fall from 3 to 2"), ([1, 2, 3, 5], "the first offset is 1"), ([0, 1, 2, 4], "last offset 4 but 5 values")],
)
def test_bad_offsets_on_a_gpu_are_named_before_the_launch(monkeypatch, offsets, message):
    q = torch.randn(5, 2, 32, device="cuda")
    given = torch.tensor(offsets, device="cuda")
    monkeypatch.setenv("GEM_CHECK", "full")
    with pytest.raises(RequestError, match=message):
        jagged_attention(q, q, q, given, given, max_q=5, max_k=5)
