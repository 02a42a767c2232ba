"""Canonical tables: where files are found, how pieces become rows, and that every row is counted."""

import gzip
import tempfile
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.spec import RequestError
from gem_data.known.registry import KNOWN, known_data_set
from gem_data.known.tables import FILE, ROW, KnownTable, find, find_any, plain, same, taken_apart, text, typed, whole


def table(tmp_path: Path, *files: str, **about: object) -> KnownTable:
    paths = []
    for k, content in enumerate(files):
        paths.append(tmp_path / f"f{k}.csv")
        paths[-1].write_text(content)
    return KnownTable(files=paths, read=text("a:int64", "b", separator=",", batch_rows=2), **{"columns": same("a", "b"), **about})  # type: ignore[arg-type]


def frame(known: KnownTable) -> pl.DataFrame:
    return pl.concat([pl.DataFrame(pl.from_arrow(batch)) for batch in known.batches()])


def test_rows_of_several_files_are_numbered_through_and_know_their_file(tmp_path: Path) -> None:
    known = table(
        tmp_path,
        "1,x\n2,y\n3,z\n",
        "4,x\n5,\n",
        columns={"a": pl.col("a"), "row": pl.col(ROW), "file": pl.col(FILE)},
        drop={"no b": pl.col("b").is_null()},
    )
    assert frame(known).rows() == [(1, 0, "f0.csv"), (2, 1, "f0.csv"), (3, 2, "f0.csv"), (4, 3, "f1.csv")]
    assert dict(known.ledger) == {"read": 5, "kept": 4, "dropped: no b": 1}
    assert known.starts == {"f0.csv": 0, "f1.csv": 3}


def test_a_second_reading_counts_anew(tmp_path: Path) -> None:
    known = table(tmp_path, "1,x\n2,y\n3,z\n")
    assert frame(known).equals(frame(known))
    assert dict(known.ledger) == {"read": 3, "kept": 3}


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["x", "y", ""])), min_size=1, max_size=30))
@settings(max_examples=20, deadline=None)
def test_a_row_goes_for_the_first_reason_and_unknown_conditions_keep_it(rows: list[tuple[int, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        known = table(Path(folder), "".join(f"{a},{b}\n" for a, b in rows), drop={"small": pl.col("a") < 2, "x": pl.col("b") == "x"})
        found = [row for batch in known.batches() for row in pl.DataFrame(pl.from_arrow(batch)).rows()]
    assert found == [(a, b or None) for a, b in rows if a >= 2 and b != "x"]
    small, x = sum(a < 2 for a, _ in rows), sum(a >= 2 and b == "x" for a, b in rows)
    dropped = {"dropped: small": small, "dropped: x": x}
    assert known.ledger == {"read": len(rows), "kept": len(found), **{reason: count for reason, count in dropped.items() if count}}


def test_ragged_lines_that_may_go_are_counted_and_blank_lines_are_none(tmp_path: Path) -> None:
    known = table(tmp_path, "1,x\n\n2\n3,z,q\n4,w\n")
    with pytest.raises(RequestError, match="line 3"):
        frame(known)
    known.read = {**known.read, "bad_lines": "drop"}
    assert frame(known)["a"].to_list() == [1, 4]
    assert dict(known.ledger) == {"read": 4, "kept": 2, "dropped: ragged line": 2}


def test_names_and_types_are_found_through_outer_blanks(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id , code\n1,007\n")
    known = KnownTable(files=[tmp_path / "a.csv"], read={"types": typed("id:int64", "code")}, columns=same("id", "code"))
    assert frame(known).rows() == [(1, "007")]


def test_columns_that_nobody_asked_for_may_hold_anything(tmp_path: Path) -> None:
    """Guessing from the first rows would take `other` for a number, and fail later."""
    lines = [f"{k},1\n" for k in range(20_000)] + ["20000,not a number\n"]
    (tmp_path / "a.csv").write_text("id,other\n" + "".join(lines))
    known = KnownTable(files=[tmp_path / "a.csv"], read={"types": typed("id:int64")}, columns=same("id"))
    assert frame(known)["id"].to_list() == list(range(20_001))


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id\n1\n")
    with pytest.raises(RequestError, match="'code'"):
        frame(KnownTable(files=[tmp_path / "a.csv"], read={"types": typed("id:int64", "code")}, columns=same("id", "code")))


def test_a_value_that_fits_no_canonical_type_names_the_file(tmp_path: Path) -> None:
    known = table(tmp_path, "1,x\n2,7\n", columns={"b": pl.col("b").cast(pl.Int64)})
    with pytest.raises(RequestError, match=r"f0\.csv.*does not fit"):
        frame(known)


@pytest.mark.parametrize("value", [1.5, float("nan"), float("inf"), 1e30])
def test_whole_refuses_what_a_cast_would_change(value: float) -> None:
    assert pl.DataFrame({"a": [1.0, None, -2.0]}).select(whole("a"))["a"].to_list() == [1, None, -2]
    with pytest.raises((pl.exceptions.PolarsError, ValueError)):
        pl.DataFrame({"a": [1.0, value]}).select(whole("a"))


def test_lists_are_taken_apart_and_those_of_other_lengths_refused() -> None:
    piece = pl.DataFrame({"u": [1, 2, 3, 4], "a": [[1, 2], [], None, [3]], "b": [["x", None], [], None, ["z"]]})
    assert taken_apart(piece, ["a", "b"]).rows() == [(1, 1, "x"), (1, 2, None), (4, 3, "z")]
    with pytest.raises(RequestError, match="differ in length"):
        taken_apart(piece.with_columns(b=pl.Series([["x"], ["y"], [], ["z"]])), ["a", "b"])


def test_batches_have_ordinary_arrow_types() -> None:
    batch = plain(pl.DataFrame({"s": ["a", None], "l": [["x"], []], "n": [[1], [2, 3]]}))
    assert [field.type for field in batch.schema] == [pa.string(), pa.list_(pa.string()), pa.list_(pa.int64())]
    assert batch.to_pylist()[1] == {"s": None, "l": [], "n": [2, 3]}


def test_files_are_found_in_natural_order_in_the_folder_or_in_data(tmp_path: Path) -> None:
    for k in (0, 2, 10, 1):
        (tmp_path / f"day_{k}").touch()
    assert [path.name for path in find(tmp_path, "day_*")] == ["day_0", "day_1", "day_2", "day_10"]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "log.csv").touch()
    assert find(tmp_path, "nothing.csv", "log.csv") == [tmp_path / "data" / "log.csv"]
    assert find(tmp_path / "day_1", "day_*") == [tmp_path / "day_1"]
    assert find_any(tmp_path / "day_1", "*.csv") == []
    with pytest.raises(RequestError, match=r"there is no a\.csv and no b\.csv"):
        find(tmp_path, "a.csv", "b.csv")


def test_memory_is_bounded_by_the_piece(tmp_path: Path) -> None:
    path = tmp_path / "big.csv.gz"
    path.write_bytes(gzip.compress(b"".join(b"%d,%s\n" % (k, b"x" * 50) for k in range(200_000))))
    known = KnownTable(files=[path], read=text("a:int64", "b", separator=","), columns=same("a", "b"))
    sizes = [batch.num_rows for batch in known.batches()]
    assert sum(sizes) == 200_000
    assert max(sizes) <= 65_536


def test_an_unknown_data_set_is_offered_the_nearest_name() -> None:
    with pytest.raises(RequestError, match="did you mean 'kuairand-1k'"):
        known_data_set("kuairand-1K")


def test_a_missing_folder_and_a_wrong_choice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no such folder"):
        known_data_set("avazu").tables(tmp_path / "none")
    with pytest.raises(RequestError, match="the choices are: none"):
        known_data_set("avazu").tables(tmp_path, policy="keep")
    with pytest.raises(RequestError, match="purchase_without_click = drop, keep, mask"):
        known_data_set("ali-ccp").tables(tmp_path, purchase_without_click="maybe")


@pytest.mark.parametrize("name", list(KNOWN))
def test_every_data_set_says_what_it_looks_for(name: str, tmp_path: Path) -> None:
    known = KNOWN[name]
    assert known.summary
    assert known.terms
    assert known.quirks
    with pytest.raises(RequestError, match="there is no"):
        known.tables(tmp_path)
