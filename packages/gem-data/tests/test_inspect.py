"""gem data inspect: a proposal for every kind of column, with its reason, that is a valid schema of the file."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from gem_core.spec import GemError, RequestError
from gem_data.cli import app
from gem_data.formats.files import locate
from gem_data.formats.sniff import sniff
from gem_data.inspect import Proposal, inspect
from gem_data.schema import read_schema

RNG = np.random.default_rng(0)
ROWS = 200


def logged() -> pa.Table:
    """One column of each kind, as a log may hold it."""
    lengths = RNG.integers(0, 5, ROWS)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    total = int(lengths.sum())

    def listed(values: Any) -> pa.Array:
        return pa.ListArray.from_arrays(offsets, pa.array(values))

    return pa.table(
        {
            "user_id": RNG.integers(0, 30, ROWS),
            "request_id": RNG.integers(0, 99, ROWS),
            "timestamp": np.sort(RNG.integers(1_600_000_000, 1_700_000_000, ROWS)),
            "item_id": RNG.integers(0, 10**6, ROWS),
            "city": RNG.choice(["ulm", "bonn", "köln"], ROWS),
            "slot": RNG.integers(0, 4, ROWS),
            "balance": RNG.integers(-50, 50, ROWS),
            "visits": np.floor(RNG.pareto(1.0, ROWS) * 5).astype(np.int64),
            "score": RNG.normal(size=ROWS),
            "long_id": pa.array([2**63 + int(k) for k in RNG.integers(0, 9, ROWS)], pa.uint64()),
            "tags": pa.array([RNG.choice(["a", "b", "c"], k % 3).tolist() for k in range(ROWS)]),
            "picture": pa.array(RNG.normal(size=(ROWS, 8)).tolist(), pa.list_(pa.float32())),
            "fixed": pa.array(RNG.normal(size=(ROWS, 2)).tolist(), pa.list_(pa.float32(), 2)),
            "clicks.item": listed(RNG.integers(0, 99, total)),
            "clicks.time": listed(RNG.integers(1_500_000_000, 1_600_000_000, total)),
            "clicks.watched": listed(RNG.random(total)),
            "click": RNG.integers(0, 2, ROWS),
            "seen": RNG.integers(0, 2, ROWS).astype(bool),
            "row_id": np.arange(ROWS),
            "version": np.full(ROWS, 3),
            "nothing": pa.nulls(ROWS, pa.string()),
            "words": [f"note {k}" for k in range(ROWS)],
        }
    )


@pytest.fixture
def log(tmp_path: Path) -> Path:
    pq.write_table(logged(), tmp_path / "log.parquet")
    return tmp_path / "log.parquet"


def kinds(found: Proposal) -> dict[str, str]:
    return {name: verdict.kind for name, verdict in found.verdicts.items()}


def test_every_kind_of_column_is_told(log: Path) -> None:
    found = inspect(log)
    assert kinds(found) == {
        "user_id": "user",
        "request_id": "request",
        "timestamp": "time",
        "item_id": "id",
        "city": "id",
        "slot": "id",
        "balance": "number",
        "visits": "number",
        "score": "number",
        "long_id": "id",
        "tags": "multi_id",
        "picture": "embedding",
        "fixed": "embedding",
        "clicks.item": "sequence",
        "clicks.time": "sequence",
        "clicks.watched": "sequence",
        "click": "label",
        "seen": "id",
        "row_id": "left out",
        "version": "left out",
        "nothing": "left out",
        "words": "left out",
    }
    assert all(verdict.why for verdict in found.verdicts.values())
    assert "seconds since 1970" in found.verdicts["timestamp"].why
    assert "declare it as a task if it is a label" in found.verdicts["seen"].why


def test_the_proposed_schema_is_of_the_file(log: Path) -> None:
    schema = inspect(log).schema
    assert set(schema.columns()) == {name for name, kind in kinds(inspect(log)).items() if kind != "left out"}
    ids = {f.name: (f.encode, f.rows) for f in schema.id}
    assert ids["city"] == ("vocabulary", None)
    assert [(e.name, e.width) for e in schema.embedding] == [("picture", 8), ("fixed", 2)]
    (group,) = schema.sequence
    assert (group.name, group.time, group.time_column, group.max_length) == ("clicks", "time", None, 4)
    assert [f.name for f in group.id] == ["item"]
    assert [f.name for f in group.number] == ["watched"]
    assert [(t.name, t.label) for t in schema.task] == [("click", "click")]


def test_many_values_are_hashed_into_ten_times_as_many_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"item_id": np.arange(3000), "label": np.arange(3000) % 2}), tmp_path / "x.parquet")
    (item,) = inspect(tmp_path / "x.parquet").schema.id
    assert (item.encode, item.rows) == ("hash", 100_000)


def test_a_history_shares_the_table_of_the_row_feature_of_its_name(tmp_path: Path) -> None:
    lists = pa.array([list(range(k % 30)) for k in range(2000)])
    columns = {"item": np.arange(2000) % 1500, "label": np.arange(2000) % 2, "clicks.item": lists, "clicks.shop": lists}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    schema = inspect(tmp_path / "x.parquet").schema
    found = {key: (feature.encode, feature.rows) for key, _, feature in schema.id_columns()}
    assert found == {"item": ("hash", 100_000), "clicks.item": ("hash", 100_000), "clicks.shop": ("vocabulary", None)}


def test_lists_whose_names_share_no_dot_make_a_group_with_named_columns(tmp_path: Path) -> None:
    lists = pa.array([[1, 2], [3], []])
    times = pa.array([[1_600_000_000, 1_600_000_001], [1_600_000_002], []])
    pq.write_table(pa.table({"hist_items": lists, "hist_ts": times, "alone": pa.array([[1], [], [2]])}), tmp_path / "x.parquet")
    found = inspect(tmp_path / "x.parquet")
    (group,) = found.schema.sequence
    assert (group.name, group.time, group.time_column) == ("hist", "ts", "hist_ts")
    assert [(f.name, f.column) for f in group.id] == [("items", "hist_items")]
    assert group.columns() == ["hist_items", "hist_ts"]
    assert kinds(found)["alone"] == "multi_id"


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([1_600_000_000_000 + k for k in range(30)], "milliseconds"),
        ([1_600_000_000_000_000 + k for k in range(30)], "microseconds"),
        ([14102100 + k for k in range(30)], "values such as 14102100"),
        ([f"2017-05-06 00:00:{k:02}" for k in range(30)], "values such as '2017-05-06"),
        (pa.array(range(30), pa.timestamp("us")), "its type, timestamp"),
    ],
)
def test_times_are_known_in_any_unit(tmp_path: Path, values: Any, why: str) -> None:
    pq.write_table(pa.table({"hour": values}), tmp_path / "x.parquet")
    verdict = inspect(tmp_path / "x.parquet").verdicts["hour"]
    assert verdict.kind == "time"
    assert why in verdict.why


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([{"a": 1}, {"a": 2}], "left out"),
        ([[{"a": 1}], [{"a": 2}]], "left out"),
        ([[[1]], [[2]]], "left out"),
        (pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int64())), "left out"),
        ([b"a", b"b"], "left out"),
        ([[b"a"], []], "left out"),
        (pa.array([1, 2], pa.duration("s")), "left out"),
        (pa.array([[1], []], pa.list_(pa.timestamp("s"))), "left out"),
        (pa.nulls(2), "left out"),
        (pa.nulls(2, pa.list_(pa.int64())), "left out"),
        ([[], []], "left out"),
        (pa.array([1, 2], pa.decimal128(20, 3)), "number"),
        (np.array([1.5, 2], np.float16), "number"),
        (pa.array([[1], []], pa.large_list(pa.int64())), "multi_id"),
        (pa.array(["a", "b"], pa.large_string()), "id"),
    ],
)
def test_every_arrow_type_has_a_verdict(tmp_path: Path, values: Any, kind: str) -> None:
    for rows in (2, 0):
        pq.write_table(pa.table({"x": values}).slice(0, rows), tmp_path / "x.parquet")
        assert kinds(inspect(tmp_path / "x.parquet")) == {"x": kind if rows else "left out"}


def test_a_second_user_or_time_is_left_out(tmp_path: Path) -> None:
    times = [1_600_000_000 + k for k in range(30)]
    pq.write_table(pa.table({"uid": range(30), "user_id": range(30), "ts": times, "time": times}), tmp_path / "x.parquet")
    assert kinds(inspect(tmp_path / "x.parquet")) == {"uid": "user", "user_id": "left out", "ts": "time", "time": "left out"}


def test_text_joined_lists_are_seen_and_the_option_that_splits_them_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("label,clicks\n" + "0,5^7^9\n1,\n0,5\n1,8^2\n" * 9)
    verdict = inspect(tmp_path / "x.csv").verdicts["clicks"]
    assert verdict.kind == "left out"
    assert "--list 'clicks=^'" in verdict.why


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["\t", "::", ",", ";", "|", "\x01", "^"]), st.booleans(), st.sampled_from(["utf-8", "latin-1", "utf-16"]), st.integers(2, 5))
def test_separator_encoding_and_header_are_found(
    tmp_path_factory: pytest.TempPathFactory, separator: str, header: bool, encoding: str, columns: int
) -> None:
    names = [f"name{k}" for k in range(columns)]
    rows = [[str(r * k) if k % 2 else f"té xt{r % 3}" for k in range(columns)] for r in range(12)]
    path = tmp_path_factory.mktemp("d") / "x.txt"
    path.write_bytes("\n".join(separator.join(row) for row in ([names] if header else []) + rows).encode(encoding))
    found = sniff(locate(path)[0])
    assert (found.separator, found.encoding) == (separator, encoding)
    assert found.columns == (None if header else tuple(f"column_{k}" for k in range(1, columns + 1)))
    assert len(found.why) == 3
    assert inspect(path).rows == 12


def test_a_character_cut_at_the_end_of_the_sample_is_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n" + "é,1\n" * 60_000)
    for shift in range(5):
        path.write_text("a,b\n" + "x" * shift + "é,1\n" * 60_000)
        assert sniff(locate(path)[0]).encoding == "utf-8"


def test_columns_called_by_numbers_are_names_if_texts_stand_beside_them(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("click,101,D109\n0,5,0.5\n1,6,0.25\n")
    assert kinds(inspect(tmp_path / "x.csv")) == {"click": "label", "101": "id", "D109": "number"}


def test_what_is_given_is_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("1|2,0\n3|4,1\n")
    found = inspect(tmp_path / "x.csv", separator="|", names=("a", "b"), encoding="latin-1")
    assert list(found.verdicts) == ["a", "b"]
    assert found.dialect is not None
    assert found.dialect.why == ("encoding given", "separator given", "names given")
    (tmp_path / "y.csv").write_text("")
    with pytest.raises(RequestError, match="it is empty"):
        inspect(tmp_path / "y.csv")


def test_criteo_like_lines_without_a_header(tmp_path: Path) -> None:
    lines = [f"{k % 2}\t{k}\t{-k}\t05db{k % 7:04x}\t" for k in range(50)]
    (tmp_path / "train.txt").write_text("\n".join(lines))
    found = kinds(inspect(tmp_path / "train.txt"))
    assert found == {"column_1": "label", "column_2": "id", "column_3": "number", "column_4": "id", "column_5": "left out"}


def test_only_the_first_rows_are_read_and_broken_lines_are_counted(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n" + "1,2\n" * 50 + "broken\n" + "3,4\n" * 50_000)
    found = inspect(tmp_path / "x.csv", rows=100)
    assert (found.rows, found.dropped) == (100, {"ragged line": 1})
    assert "left aside: 1 (ragged line)" in run(tmp_path / "x.csv")


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)], env={"COLUMNS": "150"})
    if isinstance(result.exception, GemError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_prints_the_reasons_and_writes_the_schema(log: Path, tmp_path: Path) -> None:
    printed = run(log, "--out", tmp_path / "schema.toml")
    assert "labels: click" in printed
    assert "embedding" in printed
    assert "list<" in printed
    assert read_schema(tmp_path / "schema.toml") == inspect(log).schema
    with pytest.raises(RequestError, match=r"schema\.toml: it exists already"):
        run(log, "--out", tmp_path / "schema.toml")
    (tmp_path / "x.csv").write_text("a;b\n1;2\n3;4\n")
    printed = run(tmp_path / "x.csv", "--rows", 1)
    assert "';' gives 2 columns" in printed
    assert "none found; declare a [[task]]" in printed


RAW = Path(os.environ.get("GEM_TEST_DATA", "/nonexistent")) / "raw"


@pytest.mark.skipif(not RAW.is_dir(), reason="GEM_TEST_DATA names no folder that holds raw")
@pytest.mark.parametrize(
    ("name", "label", "columns"),
    [
        ("ali-ccp.csv", "click", 33),
        ("aliexpress-click-conversion.csv", "click", 82),
        ("avazu.csv", "click", 24),
        ("criteo-with-header.csv", "label", 40),
        ("taobao-ads.csv", "clk", 19),
        ("taobao-ads.parquet", "clk", 15),
    ],
)
def test_case_H21_real_samples_give_their_label_and_every_column(name: str, label: str, columns: int) -> None:
    found = inspect(RAW / name)
    assert len(found.verdicts) == columns
    assert found.rows >= 20
    assert found.verdicts[label].kind == "label"
    assert found.schema.columns()
