"""Tile lists: every token in exactly one tile, longest first, remembered for the offsets that they were built from and no others."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.spec import RequestError
from gem_kernels.common import schedule
from gem_kernels.common.schedule import RECORD, Layout, available, programs, tiles

CPU = torch.device("cpu")


def offsets_of(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def layout_of(q_lengths, k_lengths, *, max_q=None, max_k=None, q_tokens=None, k_tokens=None):
    """Lengths, or a number for a shared query or dense keys."""
    shared, dense = isinstance(q_lengths, int), isinstance(k_lengths, int)
    rows = len(k_lengths) if shared else len(q_lengths)
    q_offsets, k_offsets = (None if fixed else offsets_of(lengths) for fixed, lengths in ((shared, q_lengths), (dense, k_lengths)))
    return Layout(
        q_offsets,
        k_offsets,
        rows,
        q_lengths if shared else max(q_lengths, default=0) if max_q is None else max_q,
        k_lengths if dense else max(k_lengths, default=0) if max_k is None else max_k,
        (q_lengths if shared else sum(q_lengths)) if q_tokens is None else q_tokens,
        (rows * k_lengths if dense else sum(k_lengths)) if k_tokens is None else k_tokens,
        CPU,
    )


def listed(layout, axis, block):
    found = tiles(layout, axis, block)
    count = int(found.count)
    assert found.records.dtype == found.count.dtype == torch.int32
    assert count <= found.bound
    return [dict(zip(RECORD, row, strict=True)) for row in found.records[:count].tolist()]


def covered(records, axis, block):
    """Tokens of an axis, in the order in which the tiles cover them."""
    tokens = []
    for r in records:
        start, length = r[f"{axis}_start"], r[f"{axis}_length"]
        assert 0 <= r["first"] < length, "no tile is empty"
        tokens += range(start + r["first"], start + min(r["first"] + block, length))
    return tokens


lengths = st.lists(st.integers(0, 40), max_size=7)


@settings(max_examples=40, deadline=None)
@given(queries=lengths, data=st.data(), block=st.sampled_from([1, 3, 16]), axis=st.sampled_from("qk"), spare=st.integers(0, 20))
def test_every_token_is_in_exactly_one_tile_longest_first(queries, data, block, axis, spare):
    keys = data.draw(st.lists(st.integers(0, 40), min_size=len(queries), max_size=len(queries)))
    layout = layout_of(queries, keys, q_tokens=sum(queries) + spare, k_tokens=sum(keys) + spare)
    records = listed(layout, axis, block)
    assert sorted(covered(records, axis, block)) == list(range((sum(queries) if axis == "q" else sum(keys)) + spare))
    costs = [r["k_used" if axis == "q" else "q_used"] for r in records]
    assert costs == sorted(costs, reverse=True)
    for r in records:
        if r["row"] < len(queries):
            assert (r["q_length"], r["k_length"]) == (queries[r["row"]], keys[r["row"]])
        else:
            assert r["q_used"] == r["k_used"] == 0, "tokens after the last row see nothing"


def test_within_a_row_the_last_tile_comes_first():
    records = listed(layout_of([40, 5], [40, 5]), "q", 16)
    assert [(r["row"], r["first"]) for r in records] == [(0, 32), (0, 16), (0, 0), (1, 0)]


def test_rows_beyond_the_maximum_are_listed_whole_but_used_in_part():
    records = listed(layout_of([40], [7], max_q=20, max_k=5), "q", 16)
    assert [(r["first"], r["q_used"], r["q_length"], r["k_used"]) for r in records] == [(32, 20, 40, 5), (16, 20, 40, 5), (0, 20, 40, 5)]


def test_a_shared_query_has_its_tiles_in_every_row():
    records = listed(layout_of(20, [3, 9, 0]), "q", 16)
    assert [(r["row"], r["first"], r["q_start"], r["k_start"]) for r in records] == [
        *((1, 16, 0, 3), (1, 0, 0, 3), (0, 16, 0, 0), (0, 0, 0, 0), (2, 16, 0, 12), (2, 0, 0, 12)),
    ]


def test_dense_keys_lie_row_after_row():
    layout = layout_of([4, 0], 5)
    assert [(r["row"], r["k_start"], r["k_used"]) for r in listed(layout, "k", 16)] == [(0, 0, 5), (1, 5, 5)]
    assert [r["k_start"] for r in listed(layout, "q", 16)] == [0]


@pytest.mark.parametrize("bad", [[0, 30, 10, 40], [0, 4, 900], [5, 3, 0]])
def test_case_B10_wrong_offsets_never_reach_outside(bad):
    offsets = torch.tensor(bad)
    layout = Layout(offsets, offsets, len(bad) - 1, 900, 900, 40, 40, CPU)
    for r in listed(layout, "q", 16):
        assert r["q_start"] >= 0
        assert r["q_start"] + r["q_length"] <= 40


def test_no_rows_make_no_tiles():
    assert listed(layout_of([], []), "q", 16) == []


def test_a_list_is_built_once_for_all_layers_and_both_directions(monkeypatch):
    built = []
    real = schedule._build
    monkeypatch.setattr(schedule, "_build", lambda *a: built.append(a[1:]) or real(*a))
    layout = layout_of([3, 40], [3, 40])
    again = Layout(layout.q_offsets, layout.k_offsets, 2, 40, 40, 43, 43, CPU)
    first = tiles(layout, "q", 16)
    assert tiles(again, "q", 16) is first
    assert tiles(again, "q", 32) is not first
    assert built == [("q", 16), ("q", 32)]


def test_changed_offsets_get_a_list_of_their_own():
    layout = layout_of([3, 40], [3, 40])
    before = covered(listed(layout, "q", 16), "q", 16)
    layout.q_offsets[1] = 20
    after = listed(layout, "q", 16)
    assert sorted(before) == sorted(covered(after, "q", 16))
    assert {r["q_length"] for r in after} == {20, 23}


def test_offsets_that_are_gone_leave_nothing_behind():
    layout = layout_of([9], [9])
    tiles(layout, "q", 16)
    held = len(schedule._kept)
    del layout
    tiles(layout_of([9], [9]), "q", 16)
    assert len(schedule._kept) <= held


def test_inference_tensors_are_not_remembered():
    with torch.inference_mode():
        layout = layout_of([9], [9])
        first = tiles(layout, "q", 16)
        assert tiles(layout, "q", 16) is not first


def test_the_number_of_kept_lists_is_bounded():
    held = [layout_of([n], [n]) for n in range(1, schedule.KEPT + 9)]
    for layout in held:
        tiles(layout, "q", 16)
    assert len(schedule._kept) == schedule.KEPT


def test_case_C05_more_tokens_than_a_record_addresses_are_refused():
    layout = Layout(offsets_of([1]), offsets_of([1]), 1, 1, 1, 2**30 + 1, 1, CPU)
    with pytest.raises(RequestError, match="Split the batch"):
        tiles(layout, "q", 16)


def test_reserved_sms_are_taken_off():
    assert available("0", 132) == 132
    assert available("20", 132) == 112
    assert programs(7, 2, CPU) == 7


@pytest.mark.parametrize("text", ["132", "-1", "many", ""])
def test_reserved_sms_that_leave_none_are_refused(text):
    with pytest.raises(RequestError, match="GEM_RESERVED_SMS"):
        available(text, 132)
