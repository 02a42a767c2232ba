"""Tile lists: every token in exactly one tile, longest first, remembered for the offsets that they were built from and no others."""

import ctypes
import gc
import sys
from contextlib import ExitStack
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from gem_kernels_offline import offline

from gem_core.spec import RequestError
from gem_kernels.common import capture, schedule, tile_lists
from gem_kernels.common.schedule import RECORD, Layout, available, programs, tiles

HERE = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
"""The interpreter's, without a GPU."""


def offsets_of(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(HERE)


def reference(layout, axis, block):
    """Records and count by plain torch."""

    def spans(offsets, longest, tokens, step):
        if offsets is None:
            index = torch.arange(layout.rows + 1)
            length = torch.where(index < layout.rows, longest, 0)
            return index * step, length, length
        edges = F.pad(offsets.cpu().clamp(0, tokens), (0, 1), value=tokens)
        length = edges.diff().clamp_(min=0)
        used = length.clamp(max=longest)
        used[-1:] = 0
        return edges[:-1], used, length

    q = spans(layout.q_offsets, layout.max_q, layout.q_tokens, 0)
    k = spans(layout.k_offsets, layout.max_k, layout.k_tokens, layout.max_k)
    own, other = (q, k) if axis == "q" else (k, q)
    order = other[1].argsort(descending=True, stable=True)
    ends = ((own[2] + (block - 1)) // block)[order].cumsum(0)
    slots = torch.arange(min(int(ends[-1]), schedule._bound(layout, axis, block)))
    at = torch.searchsorted(ends, slots, right=True)
    columns = torch.stack((torch.arange(layout.rows + 1), *q, *k), 1)[order][at]
    return torch.cat((columns[:, :1], ((ends[at] - 1 - slots) * block)[:, None], columns[:, 1:]), 1).tolist()


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
        HERE,
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


@st.composite
def layouts(draw):
    """Any kind: offsets right or wrong, shared queries, dense keys, tokens after the last row, rows beyond the maximum."""
    rows = draw(st.integers(0, 7))

    def axis(fixed):
        longest = draw(st.integers(0, 40))
        if fixed:
            return None, longest, longest
        edges = draw(st.lists(st.integers(-5, 60), min_size=rows + 1, max_size=rows + 1))
        if draw(st.booleans()):
            edges = sorted(max(0, edge) for edge in edges)
        return torch.tensor(edges, device=HERE), longest, draw(st.integers(0, 80))

    fixed = draw(st.sampled_from(["", "q", "k"]))
    (q_offsets, max_q, q_tokens), (k_offsets, max_k, k_tokens) = axis(fixed == "q"), axis(fixed == "k")
    return Layout(q_offsets, k_offsets, rows, max_q, max_k, q_tokens, rows * k_tokens if fixed == "k" else k_tokens, HERE)


def poisoned(*shape, dtype, device):
    return torch.full(shape, torch.iinfo(dtype).max, dtype=dtype, device=device)


@settings(max_examples=60, deadline=None)
@given(
    layout=layouts(),
    axis=st.sampled_from("qk"),
    block=st.sampled_from([1, 3, 16]),
    others=st.sampled_from([2, 512]),
    counted=st.sampled_from([-1, 9]),
)
def test_lists_are_those_of_plain_torch(layout, axis, block, others, counted):
    with ExitStack() as patches:
        for name, value in {"OTHERS": others, "COUNTED": counted, "SLOTS": 16}.items():
            patches.enter_context(patch.object(tile_lists, name, value))
        patches.enter_context(patch.object(torch, "empty", poisoned))
        found = tiles(layout, axis, block)
    assert found.records[: int(found.count)].tolist() == reference(layout, axis, block)


@pytest.mark.parametrize("rows", [1, 512, 513])
def test_rows_around_a_step_of_counting(rows):
    lengths = torch.randint(0, 5, (2, rows), generator=torch.Generator().manual_seed(rows)).tolist()
    layout = layout_of(*lengths, max_q=5, max_k=3)
    found = tiles(layout, "q", 2)
    assert found.records[: int(found.count)].tolist() == reference(layout, "q", 2)


def test_case_C04_rows_past_counting_are_sorted():
    lengths = torch.randint(0, 5, (2, 5000), generator=torch.Generator().manual_seed(0)).tolist()
    layout = layout_of(*lengths)
    with patch.object(tile_lists, "order_kernel", None):
        found = tiles(layout, "k", 4)
    assert found.records[: int(found.count)].tolist() == reference(layout, "k", 4)


def test_offsets_with_gaps_between_them():
    offsets = torch.stack([offsets_of([3, 40]), offsets_of([9, 9])], 1)[:, 0]
    assert not offsets.is_contiguous()
    layout = Layout(offsets, offsets, 2, 40, 40, 43, 43, HERE)
    assert listed(layout, "q", 16) == listed(layout_of([3, 40], [3, 40]), "q", 16)


def test_case_B10_wrong_offsets_of_more_tiles_than_32_bits_count_end_at_the_bound():
    """Every second row has all tokens: 300 rows of 2^26 tiles."""
    offsets = torch.tensor([0, 2**30] * 300 + [0], device=HERE)
    bound = 1000
    layout = Layout(offsets, offsets, 600, 2**30, 2**30, 2**30, 2**30, HERE)
    records, count = tile_lists.build(layout, "q", 16, bound)
    assert int(count) == bound
    assert records[:, 1].tolist() == [2**30 - 16 * (n + 1) for n in range(bound)]


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
    offsets = torch.tensor(bad, device=HERE)
    layout = Layout(offsets, offsets, len(bad) - 1, 900, 900, 40, 40, HERE)
    for r in listed(layout, "q", 16):
        assert r["q_start"] >= 0
        assert r["q_start"] + r["q_length"] <= 40


def test_no_rows_make_no_tiles():
    assert listed(layout_of([], []), "q", 16) == []


def test_a_list_is_built_once_for_all_layers_and_both_directions(monkeypatch):
    built = []
    real = schedule._build
    monkeypatch.setattr(schedule, "_build", lambda *a: built.append(a[1:3]) or real(*a))
    layout = layout_of([3, 40], [3, 40])
    again = Layout(layout.q_offsets, layout.k_offsets, 2, 40, 40, 43, 43, HERE)
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


def test_other_steps_through_the_same_memory_get_a_list_of_their_own():
    memory = torch.tensor([0, 0, 9, 9, 20], device=HERE)
    first, second = (Layout(offsets, offsets, 2, 20, 20, 20, 20, HERE) for offsets in (memory[:3], memory[::2]))
    assert listed(first, "q", 16) != listed(second, "q", 16)


def test_offsets_that_are_gone_leave_nothing_behind():
    layout = layout_of([9], [9])
    tiles(layout, "q", 16)
    held = len(schedule._kept)
    del layout
    gc.collect()  # the interpreter leaves arguments in cycles
    tiles(layout_of([9], [9]), "q", 16)
    assert len(schedule._kept) <= held


def test_inference_tensors_are_not_remembered():
    with torch.inference_mode():
        layout = layout_of([9], [9])
        first = tiles(layout, "q", 16)
        assert tiles(layout, "q", 16) is not first


@pytest.fixture
def captured(monkeypatch):
    """Sets the capture that calls belong to, and counts lists that are built."""
    built, real = [], schedule._build

    def begin(number):
        monkeypatch.setattr(schedule, "current", lambda device: (None, number))

    monkeypatch.setattr(schedule, "_build", lambda *a: built.append(a) or real(*a))
    begin(0)
    tiles(layout_of([1], [1]), "q", 16)  # forgets what other tests have left of captures
    built.clear()
    yield begin, built
    begin(0)
    tiles(layout_of([1], [1]), "q", 16)


def test_calls_of_one_capture_share_a_list(captured):
    begin, built = captured
    layout = layout_of([3, 40], [3, 40])
    begin(7)
    first = tiles(layout, "q", 16)
    assert tiles(layout, "q", 16) is first
    assert tiles(layout, "q", 32) is not first
    assert len(built) == 2


def test_no_list_goes_from_one_capture_to_another_or_outside(captured):
    begin, built = captured
    layout, found = layout_of([3, 40], [3, 40]), []
    for number in (0, 7, 8, 0, 7):  # the numbers of captures never come again, but a list that was kept would show here
        begin(number)
        found.append(tiles(layout, "q", 16))
    assert len({id(one) for one in found}) == len(built) == 4
    assert found[3] is found[0], "what was built outside is kept"


def test_a_capture_without_a_number_shares_nothing(captured):
    begin, built = captured
    layout = layout_of([3, 40], [3, 40])
    begin(None)
    assert tiles(layout, "q", 16) is not tiles(layout, "q", 16)
    assert len(built) == 2


@pytest.mark.parametrize("later", [0, 8])
def test_lists_of_a_capture_are_dropped_when_another_one_or_none_comes(captured, later):
    begin, _ = captured
    layout = layout_of([3, 40], [3, 40])
    begin(7)
    tiles(layout, "q", 16)
    assert any(key[0] == 7 for key in schedule._kept)
    begin(later)
    tiles(layout_of([5], [5]), "q", 16)
    assert not any(key[0] == 7 for key in schedule._kept)


def test_offsets_that_change_within_a_capture_get_a_list_of_their_own(captured):
    begin, built = captured
    layout = layout_of([3, 40], [3, 40])
    begin(7)
    tiles(layout, "q", 16)
    layout.q_offsets[1] = 20
    tiles(layout, "q", 16)
    assert len(built) == 2


def driver_says(monkeypatch, status, number, error=0):
    def ask(stream, to_status, to_number, *rest):
        assert stream == 5
        assert rest == (None, None, None)
        to_status._obj.value, to_number._obj.value = status, number
        return error

    monkeypatch.setattr(capture, "_driver", lambda: ask)
    return capture._number(5)


@pytest.mark.parametrize(("said", "wanted"), [((0, 9), 0), ((1, 9), 9), ((1, 2**63), 2**63), ((2, 9), None), ((1, 9, 906), None), ((1, 0), None)])
def test_the_number_of_a_capture_is_the_drivers(monkeypatch, said, wanted):
    assert driver_says(monkeypatch, *said) == wanted


@pytest.mark.parametrize(("capturing", "wanted"), [(True, None), (False, 0)])
def test_without_the_driver_torch_tells_whether_there_is_a_capture(monkeypatch, capturing, wanted):
    monkeypatch.setattr(capture, "_driver", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert capture._number(5) == wanted


@pytest.mark.parametrize("library", [None, object()])
def test_a_driver_that_is_missing_or_too_old_is_none(monkeypatch, library):
    def load(name):
        if library is None:
            raise OSError(name)
        return library

    capture._driver.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", load)
    assert capture._driver() is None
    capture._driver.cache_clear()


@pytest.mark.parametrize("capturing", [True, False])
@pytest.mark.parametrize("manager", [None, SimpleNamespace(in_warmup=False), SimpleNamespace(in_warmup=True)])
def test_nothing_is_kept_of_graphs_of_the_compiler(monkeypatch, manager, capturing):
    """It warms up outside of a capture, and says that it records only when it has."""

    def get_manager(index, create_if_none_exists):
        assert (index, create_if_none_exists) == (3, False)
        return manager

    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", SimpleNamespace(get_manager=get_manager))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=5))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(capture, "_number", lambda stream: 9 * capturing)
    number = None if manager is not None and (manager.in_warmup or capturing) else 9 * capturing
    assert capture.current(torch.device("cuda", 3)) == (5, number)


def test_a_cpu_has_neither_streams_nor_captures():
    assert capture.current(torch.device("cpu")) == (None, 0)


def test_the_number_of_kept_lists_is_bounded():
    held = [layout_of([n], [n]) for n in range(1, schedule.KEPT + 9)]
    for layout in held:
        tiles(layout, "q", 16)
    assert len(schedule._kept) == schedule.KEPT


def test_case_C05_more_tokens_than_a_record_addresses_are_refused():
    layout = Layout(offsets_of([1]), offsets_of([1]), 1, 1, 1, 2**30 + 1, 1, HERE)
    with pytest.raises(RequestError, match="Split the batch"):
        tiles(layout, "q", 16)


def test_case_C05_more_tiles_than_are_counted_are_refused():
    layout = Layout(None, offsets_of([1]), 2**12, 2**20, 1, 2**20, 1, HERE)
    with pytest.raises(RequestError, match=f"up to {2**32} tiles"):
        tiles(layout, "q", 1)


def test_reserved_sms_are_taken_off():
    assert available("0", 132) == 132
    assert available("20", 132) == 112
    assert programs(7, 2, torch.device("cpu")) == 7


@pytest.mark.parametrize("text", ["132", "-1", "many", ""])
def test_reserved_sms_that_leave_none_are_refused(text):
    with pytest.raises(RequestError, match="GEM_RESERVED_SMS"):
        available(text, 132)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gem_kernels.common import tile_lists

SIZES = {"costs_kernel": {"ROWS": tile_lists.OTHERS}, "order_kernel": {"ROWS": tile_lists.ROWS, "OTHERS": tile_lists.OTHERS},
         "tiles_kernel": {"SLOTS": tile_lists.SLOTS}}
WORDS = dict.fromkeys(("own", "other", "q_offsets", "k_offsets", "order", "ends", "costs", "tiles"), "*i64") | {"count": "*i32", "records": "*i32"}
for name, sizes in SIZES.items():
    kernel = getattr(tile_lists, name)
    for missing in ({}, {"own": None}, {"other": None}, {"q_offsets": None}, {"k_offsets": None}):
        fixed = {**sizes, **missing}
        if not fixed.keys() <= set(kernel.arg_names):
            continue
        signature = {n: "constexpr" if n in fixed else WORDS.get(n, "i32") for n in kernel.arg_names}
        constants = {(kernel.arg_names.index(n),): value for n, value in fixed.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=tile_lists.WARPS))
        print(name, len(compiled.asm["cubin"]) > 0)
"""


@pytest.mark.slow
def test_case_I03_the_kernels_compile_for_hopper_without_a_gpu():
    done = offline(COMPILE)
    wanted = ["costs_kernel"] * 3 + ["order_kernel"] * 3 + ["tiles_kernel"] * 3
    assert done.stdout.split("\n")[:-1] == [f"{name} True" for name in wanted], done.stderr[-2000:]
