"""Batches gathered from columns against a loop over rows, and the sharing of global batches."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.batch import Batch
from gem_core.spec import DataSchema, DenseFeature, IdFeature, RequestError, SequenceFeature, Shard, Task
from gem_data.collate import Events, MultiIds, Spans, Table
from gem_data.ledger import Ledger
from gem_data.sources.base import TableSource

SCHEMA = DataSchema(
    ids=(IdFeature(name="a", cardinality=50), IdFeature(name="m", cardinality=9, multi=True)),
    dense=(DenseFeature(name="x", width=2),),
    sequences=(SequenceFeature(name="h", ids=(IdFeature(name="i", cardinality=30),), dense=(DenseFeature(name="w"),), time=True, max_length=6),),
    tasks=(Task(name="ctr"),),
    group=True,
)


def build(multi: list[int], spans: list[tuple[int, int]], events: int = 12) -> Table:
    """A table whose every value tells its place; row r owns ``multi[r]`` ids and the events ``spans[r]``."""
    rows, total = len(multi), sum(multi)
    history = torch.tensor(spans, dtype=torch.int64).reshape(rows, 2)
    return Table(
        schema=SCHEMA,
        rows=rows,
        labels={"ctr": (torch.arange(rows) % 2).float()},
        ids={"a": (torch.arange(rows) * 7 + 3) % 50},
        multi={"m": MultiIds(values=torch.arange(total) % 9, spans=Spans.packed(total, "m", lengths=torch.tensor(multi, dtype=torch.int64)))},
        dense={"x": torch.arange(2 * rows).float().reshape(rows, 2)},
        events={
            "h": Events(
                spans=Spans(begin=history[:, 0].contiguous(), end=history[:, 1].contiguous()),
                ids={"i": torch.arange(events) * 2},
                dense={"w": torch.arange(events).float().unsqueeze(1) / 8},
                time=torch.arange(events) * 10,
            )
        },
        masks={"ctr": torch.arange(rows) % 3 > 0},
        weights={"ctr": torch.arange(rows).float() + 1},
        time=torch.full((rows,), 1000) + torch.arange(rows),
        groups=torch.arange(rows) // 2,
    )


def loop(multi: list[int], spans: list[tuple[int, int]], index: list[int]) -> dict[str, list[Any]]:
    """What ``build(...).batch(index)`` holds, row by row."""
    starts = [sum(multi[:r]) for r in range(len(multi))]
    out: dict[str, list[Any]] = {key: [] for key in ("a", "m", "h.i", "h.w", "h.time", "x", "label", "mask", "weight", "time", "group")}
    for r in index:
        events = range(*spans[r])
        out["a"].append([(7 * r + 3) % 50])
        out["m"].append([(starts[r] + j) % 9 for j in range(multi[r])])
        out["h.i"].append([2 * e for e in events])
        out["h.w"].append([e / 8 for e in events])
        out["h.time"].append([10 * e for e in events])
        out["x"].append([2.0 * r, 2.0 * r + 1])
        out["label"].append(float(r % 2))
        out["mask"].append(r % 3 > 0)
        out["weight"].append(r + 1.0)
        out["time"].append(1000 + r)
        out["group"].append(r // 2)
    return out


def by_row(batch: Batch) -> dict[str, list[Any]]:
    """A batch in the form of ``loop``."""

    def cut(values: torch.Tensor, offsets: torch.Tensor) -> list[Any]:
        ends = offsets.tolist()
        assert ends[-1] == values.shape[0]
        return [values[b:e].reshape(-1).tolist() for b, e in pairwise(ends)]

    out = {key: cut(batch.ids[key].values, batch.ids[key].offsets) for key in ("a", "m", "h.i")}
    offsets = batch.event_offsets["h"].offsets
    return out | {
        "h.w": cut(batch.event_dense["h.w"], offsets),
        "h.time": cut(batch.event_time["h"], offsets),
        "x": batch.dense["x"].tolist(),
        "label": batch.labels["ctr"].tolist(),
        "mask": batch.masks["ctr"].tolist(),
        "weight": batch.weights["ctr"].tolist(),
        "time": [] if batch.time is None else batch.time.tolist(),
        "group": [] if batch.groups is None else batch.groups.tolist(),
    }


@st.composite
def tables(draw: st.DrawFn, min_rows: int = 0) -> tuple[list[int], list[tuple[int, int]]]:
    multi = draw(st.lists(st.integers(0, 4), min_size=min_rows, max_size=9))
    begin = [draw(st.integers(0, 12)) for _ in multi]
    return multi, [(b, min(12, b + draw(st.integers(0, 6)))) for b in begin]


@settings(max_examples=40, derandomize=True, deadline=None)
@given(tables(), st.data())
def test_batch_equals_a_loop_over_rows(drawn: tuple[list[int], list[tuple[int, int]]], data: st.DataObject) -> None:
    multi, spans = drawn
    index = data.draw(st.lists(st.integers(0, len(multi) - 1), max_size=12)) if multi else []
    batch = build(multi, spans).batch(torch.tensor(index, dtype=torch.int64))
    assert by_row(batch) == loop(multi, spans, index)
    assert batch.rows == batch.global_rows == len(index)
    assert batch.ids["m"].max_length == max((multi[r] for r in index), default=0)
    assert batch.event_offsets["h"].max_length == max((spans[r][1] - spans[r][0] for r in index), default=0)
    assert torch.equal(batch.event_offsets["h"].offsets, batch.ids["h.i"].offsets)


def test_the_comparison_with_a_loop_notices_one_event_too_many() -> None:
    batch = build([1, 2], [(0, 3), (2, 5)]).batch(torch.tensor([0, 1]))
    assert by_row(batch) != loop([1, 2], [(0, 3), (2, 6)], [0, 1])


def source(rows: int, test_rows: int = 3) -> TableSource:
    table = build([r % 4 for r in range(rows)], [(r % 5, r % 5 + r % 7) for r in range(rows)])
    index = torch.arange(rows)
    return TableSource("small", table, {"train": index[test_rows:], "test": index[:test_rows]}, Ledger(rows))


def row_numbers(batches: Any) -> list[list[int]]:
    return [[int(t) - 1000 for t in batch.time] for batch in batches]


@settings(max_examples=30, derandomize=True, deadline=None)
@given(rows=st.integers(6, 30), batch_size=st.integers(1, 12), world=st.integers(1, 5), seed=st.one_of(st.none(), st.integers(0, 3)))
def test_shards_of_a_global_batch_join_to_the_whole(rows: int, batch_size: int, world: int, seed: int | None) -> None:
    data = source(rows)
    whole = list(data.batches("train", batch_size=batch_size, seed=seed))
    parts = [list(data.batches("train", batch_size=batch_size, seed=seed, shard=Shard(rank=r, world=world))) for r in range(world)]
    assert {len(part) for part in parts} == {len(whole)}
    for step, batch in enumerate(whole):
        shares = [by_row(part[step]) for part in parts]
        assert by_row(batch) == {key: [row for share in shares for row in share[key]] for key in shares[0]}
        assert {part[step].global_rows for part in parts} == {batch.rows}
        sizes = [part[step].rows for part in parts]
        assert max(sizes) - min(sizes) <= 1


@settings(max_examples=30, derandomize=True, deadline=None)
@given(rows=st.integers(6, 30), batch_size=st.integers(1, 12), seed=st.one_of(st.none(), st.integers(0, 3)), epoch=st.integers(0, 2))
def test_every_row_once_an_epoch(rows: int, batch_size: int, seed: int | None, epoch: int) -> None:
    seen = row_numbers(source(rows).batches("train", batch_size=batch_size, seed=seed, epoch=epoch))
    flat = [r for step in seen for r in step]
    assert sorted(flat) == list(range(3, rows))
    assert [len(step) for step in seen[:-1]] == [batch_size] * (len(seen) - 1)
    if seed is None:
        assert flat == sorted(flat)


def test_order_depends_on_seed_and_epoch_and_repeats() -> None:
    data = source(30)
    orders = {(s, e): row_numbers(data.batches("train", batch_size=8, seed=s, epoch=e)) for s in (0, 1) for e in (0, 1)}
    assert len({str(order) for order in orders.values()}) == 4
    assert row_numbers(data.batches("train", batch_size=8, seed=1, epoch=1)) == orders[1, 1]


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("start", [0, 1, 3, 4, 99])
def test_start_skips_global_batches(seed: int | None, start: int) -> None:
    data = source(30)
    whole = row_numbers(data.batches("train", batch_size=8, seed=seed, epoch=2, shard=Shard(rank=1, world=3)))
    rest = row_numbers(data.batches("train", batch_size=8, seed=seed, epoch=2, start=start, shard=Shard(rank=1, world=3)))
    assert len(whole) == 4
    assert rest == whole[start:]


@pytest.mark.parametrize("bad", [{"batch_size": 0}, {"batch_size": 4, "shard": Shard(rank=2, world=2)}, {"batch_size": 4, "start": -1}])
def test_bad_batch_requests_fail_before_the_first_batch(bad: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        source(9).batches("train", **bad)


def test_case_B10_negative_length_and_falling_offsets_are_rejected() -> None:
    with pytest.raises(RequestError, match="length -1 at index 1"):
        Spans.packed(2, "m", lengths=torch.tensor([3, -1]))
    with pytest.raises(RequestError, match="fall from 4 to 2 at index 1"):
        Spans.packed(6, "m", offsets=torch.tensor([0, 4, 2, 6]))
    with pytest.raises(RequestError, match="row 1 owns 3:2"):
        build([0, 0], [(0, 2), (3, 2)])
    with pytest.raises(RequestError, match="last offset 3 but 4 values"):
        Spans.packed(4, "m", lengths=torch.tensor([1, 2]))


def test_case_B13_lengths_and_offsets_that_disagree_are_rejected() -> None:
    with pytest.raises(RequestError, match="disagree"):
        Spans.packed(2, "m", lengths=torch.tensor([1, 1]), offsets=torch.tensor([0, 2, 2]))
    both = Spans.packed(2, "m", lengths=torch.tensor([0, 2]), offsets=torch.tensor([0, 0, 2]))
    assert (both.begin.tolist(), both.end.tolist()) == ([0, 0], [0, 2])
    with pytest.raises(RequestError, match="neither"):
        Spans.packed(2, "m")


def test_case_B01_a_batch_without_rows_keeps_every_column() -> None:
    batch = build([2, 1], [(0, 2), (1, 4)]).batch(torch.empty(0, dtype=torch.int64), global_rows=5)
    for key in ("a", "m", "h.i"):
        assert batch.ids[key].values.tolist() == []
        assert batch.ids[key].lengths().tolist() == []
        assert batch.ids[key].offsets.tolist() == [0]
    assert (batch.rows, batch.global_rows) == (0, 5)
    assert batch.dense["x"].shape == (0, 2)
    assert batch.event_dense["h.w"].shape == (0, 1)


def test_case_B25_rows_without_any_value_work() -> None:
    batch = build([0] * 4, [(3, 3)] * 4).batch(torch.arange(4))
    assert batch.ids["m"].lengths().tolist() == [0] * 4
    assert batch.ids["h.i"].lengths().tolist() == [0] * 4
    assert batch.event_offsets["h"].max_length == batch.ids["m"].max_length == 0
    assert batch.event_time["h"].numel() == 0
    assert batch.labels["ctr"].tolist() == [0, 1, 0, 1]


def faulty(**changes: Any) -> Table:
    good = build([1, 2, 0], [(0, 2), (1, 4), (0, 0)])
    return Table(**{name: changes.get(name, getattr(good, name)) for name in Table.__dataclass_fields__})


def events(**changes: Any) -> dict[str, Events]:
    good = build([1, 2, 0], [(0, 2), (1, 4), (0, 0)]).events["h"]
    return {"h": Events(**{name: changes.get(name, getattr(good, name)) for name in Events.__dataclass_fields__})}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": {}}, r"missing \['a'\]"),
        ({"ids": {"a": torch.zeros(3, dtype=torch.int64), "b": torch.zeros(3)}}, r"left over \['b'\]"),
        ({"ids": {"a": torch.zeros(3)}}, "float32"),
        ({"ids": {"a": torch.tensor([0, 50, 1])}}, "id 50 at index 1 lies outside 0 .. 49"),
        ({"ids": {"a": torch.tensor([0, 1, -1])}}, "id -1 at index 2"),
        ({"dense": {"x": torch.zeros(3, 1)}}, r"shape \[3, 1\]"),
        ({"dense": {"x": torch.tensor([[0.0, 0.0], [0.0, float("nan")], [0.0, 0.0]])}}, "row 1 is not finite"),
        ({"labels": {"ctr": torch.tensor([0.0, 1.0, -1.0])}}, "holds -1.0"),
        ({"weights": {"ctr": torch.tensor([1.0, -1.0, 0.0])}}, "negative"),
        ({"time": torch.zeros(2, dtype=torch.int64)}, r"column 'time': it is torch.int64 of shape \[2\]"),
        ({"time": torch.zeros(3)}, "column 'time': it is torch.float32"),
        ({"time": torch.zeros(3, 1, dtype=torch.int64)}, r"column 'time': it is torch.int64 of shape \[3, 1\]"),
        ({"events": events(time=torch.zeros(12))}, r"column 'h \(time\)': it is torch.float32"),
        ({"masks": {"cvr": torch.ones(3, dtype=torch.bool)}}, "cvr"),
        ({"groups": None}, "groups"),
        ({"time": torch.full((3,), 1000.0)}, "column 'time'"),
        ({"time": torch.tensor([5, 1000, 1000])}, "row 0 holds an event from after the impression"),
        ({"events": events(time=None)}, "time"),
        ({"events": events(ids={"i": torch.arange(11)})}, "aligned"),
        ({"events": events(time=torch.tensor([0, 10, 5, *range(20, 29)]))}, "row 1 goes back in time"),
        ({"events": events(spans=Spans(begin=torch.tensor([0, 1, 0]), end=torch.tensor([7, 4, 0])))}, "row has 7 events"),
        ({"events": events(spans=Spans(begin=torch.tensor([0, 1, 0]), end=torch.tensor([2, 13, 0])))}, "row 1 owns 1:13 of 12"),
    ],
)
def test_columns_that_do_not_fit_the_schema_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        faulty(**changes)


def test_a_masked_label_may_hold_anything_and_a_good_table_passes() -> None:
    assert faulty().rows == 3
    assert faulty(labels={"ctr": torch.tensor([-1.0, 1.0, 0.0])}).rows == 3  # row 0 is masked out


def test_features_of_one_table_share_its_size() -> None:
    schema = DataSchema(ids=(IdFeature(name="a", cardinality=5, table="t"), IdFeature(name="b", cardinality=6, table="t")), tasks=(Task(name="ctr"),))
    columns = {name: torch.zeros(2, dtype=torch.int64) for name in "ab"}
    with pytest.raises(RequestError, match=r"'b' wants 6 rows and another feature wants 5"):
        Table(schema=schema, rows=2, labels={"ctr": torch.zeros(2)}, ids=columns)
