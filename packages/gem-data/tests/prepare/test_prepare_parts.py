"""The small parts of a preparation against loops: gathering, slicing, counting labels, users as numbers, the engine."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gem_core.spec import RunFailed
from gem_data.ids import hash_keys
from gem_data.prepare import writer
from gem_data.prepare.engine import DuckEngine
from gem_data.prepare.events import EventLog, gather
from gem_data.prepare.leakage import check_leakage
from gem_data.prepare.output import list_lengths, whole_numbers
from gem_data.schema import Schema, Task
from gem_data.schema.files import parse_schema

SPANS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted), max_size=12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SPANS)
def test_gather_takes_each_span(spans: list[list[int]]) -> None:
    times = np.arange(10) * 10
    log = EventLog(times, {"a.item": np.arange(10), "a.score": np.arange(10, dtype=np.float32), "a.time": times})
    begin, end = (np.asarray([span[k] for span in spans], np.int64) for k in (0, 1))
    found = dict(gather(log, begin, end))
    assert found["a.item"].to_pylist() == [list(range(a, b)) for a, b in spans]
    assert found["a.time"].to_pylist() == [list(range(10 * a, 10 * b, 10)) for a, b in spans]
    assert found["a.score"].type == pa.list_(pa.float32())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(0, 9), max_size=30), rows=st.integers(1, 7), events=st.integers(1, 12))
def test_pieces_cover_all_rows_within_both_bounds(lengths: list[int], rows: int, events: int) -> None:
    n = len(lengths)
    batch = pa.RecordBatch.from_pydict({"row": np.arange(n), "gem_begin_0": np.full(n, 5), "gem_end_0": 5 + np.asarray(lengths, np.int64)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "GROUP_ROWS", rows)
        patch.setattr(writer, "GROUP_EVENTS", events)
        pieces = [piece.column("row").to_pylist() for piece in writer._pieces(batch, 1)]
    assert [row for piece in pieces for row in piece] == list(range(n))
    for piece in pieces:
        assert 1 <= len(piece) <= rows
        assert len(piece) == 1 or sum(lengths[row] for row in piece) <= events
    for one, other in pairwise(pieces):  # no piece could have taken the first row of the next
        assert len(one) == rows or sum(lengths[row] for row in [*one, other[0]]) > events


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(*[st.tuples(st.integers(0, 1), st.booleans())] * 3), max_size=10), st.permutations(range(3)))
def test_labels_count_where_the_chain_of_conditions_holds(rows: list[Any], order: list[int]) -> None:
    """Tasks a <- b <- c, declared in any order."""
    names, condition = "abc", {"a": None, "b": "a", "c": "b"}
    schema = Schema(task=tuple(Task(name=names[k], label=f"label.{names[k]}", condition=condition[names[k]]) for k in order))
    columns: dict[str, pa.Array] = {}
    for k, name in enumerate(names):
        columns[f"label.{name}"] = pa.array([row[k][0] for row in rows], pa.int8())
        columns[f"mask.{name}"] = pa.array([row[k][1] for row in rows], pa.bool_())
    expected = {name: [0, 0] for name in names}
    for row in rows:
        for name, (label, seen) in zip(names, row, strict=True):
            if not seen:
                break
            expected[name][0] += 1
            expected[name][1] += label
            if not label:
                break
    assert writer.count_labels(schema, columns) == {name: tuple(counts) for name, counts in expected.items()}


def test_users_and_requests_become_whole_numbers() -> None:
    assert whole_numbers(pa.array([5, None, -1], pa.int64())).to_pylist() == [5, None, -1]
    texts = pa.array(["a", None, "b", "a", "7"])
    found = whole_numbers(texts)
    assert found.type == pa.int64()
    first, missing, second, again, seven = found.to_pylist()
    assert missing is None
    assert first == again != second
    assert seven == int(hash_keys(pa.array(["7"], pa.large_string())).view(np.int64)[0])
    assert whole_numbers(pa.array([7], pa.uint64())).to_pylist() == [seven]  # one id, however it is stored


def test_lengths_of_lists_of_every_kind() -> None:
    assert list_lengths("x", pa.array([[1], None, [2, 3]], pa.list_(pa.int64()))).tolist() == [1, 0, 2]
    assert list_lengths("x", pa.array([[1], []], pa.large_list(pa.int64()))).tolist() == [1, 0]
    assert list_lengths("x", pa.array([[1, 2], None], pa.list_(pa.int64(), 2))).tolist() == [2, 0]
    assert list_lengths("x", pa.array([[9], [1, 2], []], pa.list_(pa.int64())).slice(1)).tolist() == [2, 0]


SCHEMA = {"time": "_time", "sequence": [{"name": "a", "max_length": 9, "time": "time"}], "task": [{"name": "t", "label": "l"}]}


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(-9, 6), max_size=4)), min_size=1, max_size=9), lag=st.integers(0, 3))
def test_the_leakage_check_is_a_loop_over_all_events(tmp_path: Path, rows: list[tuple[int, list[int]]], lag: int) -> None:
    table = pa.table({"_time": [time for time, _ in rows], "a.time": pa.array([events for _, events in rows], pa.list_(pa.int64()))})
    pq.write_table(table, tmp_path / "part.parquet", row_group_size=2)
    files = {"train": [{"file": "part.parquet", "rows": len(rows)}]}
    leaks = [event for time, events in rows for event in events if event >= time - lag]
    if leaks:
        with pytest.raises(RunFailed, match=f"time {leaks[0]} is not before"):
            check_leakage(tmp_path, parse_schema(SCHEMA), files, {"a": lag})
    else:
        assert check_leakage(tmp_path, parse_schema(SCHEMA), files, {"a": lag}) == {"a": sum(len(events) for _, events in rows)}


def test_the_engine_keeps_order_and_streams_in_batches(tmp_path: Path) -> None:
    pq.write_table(pa.table({"k": np.arange(200_000)[::-1]}), tmp_path / "it's.parquet")
    (tmp_path / "work").mkdir()
    engine = DuckEngine(tmp_path / "work", 2**28)
    engine.register("t", tmp_path / "it's.parquet")
    engine.view("v", "SELECT k FROM t WHERE k >= 10")
    engine.create("c", "SELECT k, k * 2 AS d FROM v")
    batches = list(engine.stream("SELECT d FROM c ORDER BY k"))
    assert len(batches) > 2
    assert np.concatenate([b.column(0).to_numpy() for b in batches]).tolist() == list(range(20, 400_000, 2))
    assert engine.rows("SELECT count(*), min(k) FROM c") == [(199_990, 10)]
    engine.close()
    assert not (tmp_path / "work").exists()
