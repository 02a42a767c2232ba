"""Raw tables: formats, types of users and times, several files, what is missing."""

from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.spec import RequestError
from gem_data.prepare.stage import seconds


def of(unit: str, values: list[Any], kind: pa.DataType) -> tuple[list[Any], list[Any]]:
    whole, order = seconds("log", pa.array(values, kind), unit)
    return whole.to_pylist(), order.to_pylist()


def test_times_are_whole_seconds_rounded_down_and_finer_digits_order() -> None:
    assert of("s", [3, None, -1], pa.int32()) == ([3, None, -1], [3, None, -1])
    assert of("ms", [1999, -1, 10**15 - 1], pa.int64()) == ([1, -1, 10**12 - 1], [1999, -1, 10**15 - 1])
    assert of("ns", [1_700_000_000_999_999_999], pa.int64())[0] == [1_700_000_000]
    assert of("s", [1.75, float("nan"), None, -0.25], pa.float64()) == ([1, None, None, -1], [1_750_000, None, None, -250_000])
    assert of("ms", [1500.5], pa.float64()) == ([1], [1_500_500])
    moment = datetime(2024, 2, 29, 12, 0, 0, 999_999)
    assert of("ns", [moment, None], pa.timestamp("us"))[0] == [int((moment - datetime(1970, 1, 1)).total_seconds()), None]
    assert of("s", [19_782], pa.date32())[0] == [19_782 * 86_400]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(-(10**12), 10**12)), st.sampled_from([("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)]))
def test_integer_times_are_exact_at_any_size(values: list[int], unit: tuple[str, int]) -> None:
    assert of(unit[0], values, pa.int64())[0] == [v // unit[1] for v in values]


@pytest.mark.parametrize(
    ("unit", "value", "kind"),
    [
        ("s", 10**12 + 1, pa.int64()),
        ("s", -(2**63), pa.int64()),
        ("ms", 2**64 - 1, pa.uint64()),
        ("ns", 2**64 - 1, pa.uint64()),
        ("s", 1e300, pa.float64()),
        ("us", -1e30, pa.float64()),
    ],
)
def test_times_beyond_the_calendar_are_refused(unit: str, value: Any, kind: pa.DataType) -> None:
    with pytest.raises(RequestError, match=r"table 'log': its time column holds .*, more than 30,000 years away. Check the column, and `unit`"):
        of(unit, [5, None, value], kind)


def test_unknown_arguments_of_scan_are_named(shop: Any) -> None:
    shop.definition["tables"]["log"]["scan"] = {"seperator": ";"}
    with pytest.raises(RequestError, match=r"table 'log': scan.seperator is no argument of scan. The arguments are .*separator"):
        shop.run()


def test_text_is_no_time(shop: Any) -> None:
    shop.table("log", {"user": [1], "time": ["2024-01-01"], "item": [1], "click": [1]})
    with pytest.raises(RequestError, match=r"table 'log': its time column holds string"):
        shop.run()


@pytest.mark.parametrize(("values", "shown"), [([1.0, 2.0], "double"), ([[1], [2]], "list")])
def test_users_are_integers_or_texts(shop: Any, values: list[Any], shown: str) -> None:
    shop.table("log", {"user": values, "time": [1, 60], "item": [1, 1], "click": [1, 1]})
    with pytest.raises(RequestError, match=f"its user column holds {shown}"):
        shop.run()


@pytest.mark.parametrize("kind", [pa.int32(), pa.uint64(), pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_case_H17_users_of_any_type_keep_their_histories(shop: Any, kind: pa.DataType) -> None:
    big = 2**64 - 1 if kind == pa.uint64() else 7
    users = [big, big, 2, big, 2, big] if kind in (pa.int32(), pa.uint64()) else ["u/é", "u/é", "2", "u/é", "2", "u/é"]
    shop.table("log", {**shop.log, "user": pa.array(users, kind if not pa.types.is_dictionary(kind) else pa.string()).cast(kind)})
    data = shop.run()
    assert shop.column("clicks.item") == [[], [1], [], [1, 2]]
    assert shop.column("clicks.item", "test") == [[], [1, 2]]
    assert data["users"] == {"read": 2, "written": 2}
    assert len(set(shop.column("_user"))) == 2


def test_case_H18_ids_beyond_int64_survive(shop: Any) -> None:
    ids = [10000169349117863715, 2**64 - 1, 1, 2, 3, 4]
    shop.table("log", {**shop.log, "item": pa.array(ids, pa.uint64())})
    shop.schema["id"][0] |= {"encode": "vocabulary"}
    del shop.schema["id"][0]["rows"]
    shop.schema["sequence"][0]["id"][0] |= {"encode": "vocabulary"}
    del shop.schema["sequence"][0]["id"][0]["rows"]
    data = shop.run()
    items = shop.column("item")
    assert len(set(items)) == 4
    assert 0 not in items
    assert shop.column("clicks.item")[3] == [items[0], items[1]]
    assert data["unknown"]["test"]["item"] == 2


def test_case_H01_users_of_either_period_survive(shop: Any) -> None:
    """Two logs, users {1, 2} and {2, 3}: an inner merge would leave user 2 only."""
    shop.table("first", {"user": [1, 2], "time": [1, 2], "item": [1, 2], "click": [1, 1]})
    shop.table("second", {"user": [2, 3], "time": [60, 61], "item": [3, 4], "click": [1, 0]})
    shop.definition["tables"]["log"]["path"] = ["first.parquet", "second.parquet"]
    data = shop.run()
    assert [r["_user"] for split in ("train", "test") for r in shop.rows(split)] == [1, 2, 2, 3]
    assert shop.column("clicks.item", "test") == [[2], []]
    assert data["users"] == {"read": 3, "written": 3}
    assert data["ledger"] == {"read": 4, "train": 2, "test": 2}


def test_case_H15_further_columns_are_ignored_and_missing_ones_named(shop: Any) -> None:
    shop.table("log", {**shop.log, "extra": ["x"] * 6, "kind": pa.array(["a"] * 6).dictionary_encode()}, row_group_size=2)
    shop.definition["histories"][0]["where"].append(["kind", "==", "a"])
    shop.run()
    assert "extra" not in shop.rows()[0]
    shop.definition["histories"][0]["where"].append(["colour", "==", "a"])
    with pytest.raises(RequestError, match="lacks the columns 'colour'"):
        shop.run("again")


def test_text_files_are_read_as_declared(shop: Any) -> None:
    (shop.folder / "log.txt").write_text("1|10000|1|1\n1|20000|2|1\n|20500|3|0\n2|60000|3|0\n", encoding="utf-8")
    shop.definition["tables"]["log"] |= {"path": "log.txt", "unit": "ms"}
    shop.definition["tables"]["log"]["scan"] = {"separator": "|", "header": ["user", "time", "item", "click"]}
    data = shop.run()
    assert data["ledger"] == {"read": 4, "train": 2, "test": 1, "dropped: no user": 1}
    assert shop.column("_time") == [10, 20]


def test_lines_dropped_while_reading_stay_in_the_ledger(shop: Any) -> None:
    (shop.folder / "log.csv").write_text("user,time,item,click\n1,10,1,1\n1,20\n1,60,1,1\n")
    shop.definition["tables"]["log"] |= {"path": "log.csv", "scan": {"bad_lines": "drop"}}
    data = shop.run()
    dropped = {name: n for name, n in data["ledger"].items() if name.startswith("dropped")}
    assert data["ledger"]["read"] == 3
    assert sum(dropped.values()) == 1
    assert data["events"]["clicks"]["read"] == 3


def test_columns_compared_across_tables_have_one_type(shop: Any) -> None:
    shop.table("buys", {"user": ["1"], "time": [11], "item": [1]})
    shop.definition["tables"]["buys"] = {"path": "buys.parquet", "user": "user", "time": "time"}
    shop.definition["histories"][0] |= {"table": "buys", "where": []}
    with pytest.raises(RequestError, match="column 'user': it is int64 in table 'log' and string in 'buys'"):
        shop.run()
    shop.table("buys", {"user": [1], "time": [11], "item": ["1"]})
    shop.definition["histories"][0] |= {"table": "log"}
    shop.definition["conversions"] = [{"task": "ctr", "table": "buys", "match": ["item"], "within": 5}]
    with pytest.raises(RequestError, match="column 'item': it is int64 in table 'log' and string in 'buys'"):
        shop.run()


@pytest.mark.parametrize(("one", "other"), [(pa.int32(), pa.uint16()), (pa.large_string(), pa.string()), (pa.int64(), pa.bool_())])
def test_widths_of_integers_and_texts_do_not_matter(shop: Any, one: pa.DataType, other: pa.DataType) -> None:
    shop.table("log", {**shop.log, "user": pa.array([1, 1, 0, 1, 0, 1]).cast(one)})
    shop.table("buys", {"user": pa.array([0, 1]).cast(other), "time": [55, 55], "item": [7, 8]})
    shop.definition["tables"]["buys"] = {"path": "buys.parquet", "user": "user", "time": "time"}
    shop.definition["histories"][0] |= {"table": "buys", "where": []}
    shop.run()
    assert shop.column("clicks.item", "test") == [[7], [8]]


@pytest.mark.parametrize("condition", [["click", "==", "yes"], ["click", "in", [1, "a"]]])
def test_numbers_are_compared_with_numbers(shop: Any, condition: list[Any]) -> None:
    shop.definition["histories"][0]["where"] = [condition]
    with pytest.raises(RequestError, match="column 'click' of table 'log' holds int64"):
        shop.run()


def test_booleans_compare_with_numbers_and_with_true(shop: Any) -> None:
    shop.table("log", {**shop.log, "click": np.array(shop.log["click"], np.bool_)})
    for k, value in enumerate((1, True)):
        shop.definition["histories"][0]["where"] = [["click", "==", value]]
        shop.run(f"out{k}")
    first, second = (shop.rows("test", f"out{k}") for k in (0, 1))
    assert first == second
    assert [r["clicks.item"] for r in first] == [[], [1, 2]]


def test_reserved_names_are_refused(shop: Any) -> None:
    shop.definition["histories"][0]["where"] = [["gem_row", "==", 1]]
    with pytest.raises(RequestError, match="names that begin with gem_ are taken"):
        shop.run()


def test_case_H08_a_table_that_nothing_uses_is_an_error(shop: Any) -> None:
    """A path that is given but not read would let one train on other data than one thinks."""
    shop.definition["tables"]["other"] = {"path": "other.parquet"}
    with pytest.raises(RequestError, match="table 'other' is used by nothing"):
        shop.run()


def test_a_missing_file_is_named_before_any_is_read(shop: Any) -> None:
    shop.definition["tables"]["log"]["path"] = ["log.parquet", "log-tuesday.parquet"]
    with pytest.raises(RequestError, match=r"log-tuesday.parquet"):
        shop.run()
    assert not list(shop.folder.glob(".out*"))


def test_an_empty_table_of_events_gives_empty_histories(shop: Any) -> None:
    kinds = pa.schema([("user", pa.int64()), ("time", pa.int64()), ("item", pa.int64())])
    shop.table("buys", {"user": [], "time": [], "item": []}, kinds)
    shop.definition["tables"]["buys"] = {"path": "buys.parquet", "user": "user", "time": "time"}
    shop.definition["histories"][0] |= {"table": "buys", "where": []}
    shop.definition["conversions"] = [{"task": "ctr", "table": "buys", "within": 5}]
    with pytest.raises(RequestError, match="split 'train': it has no row"):
        shop.run()  # without an event nobody knows when the log ends, so every label is unknown
    shop.definition["conversions"][0]["end"] = 100
    data = shop.run()
    assert shop.column("clicks.item", "test") == [[], []]
    assert data["events"]["clicks"] == {"read": 0, "of users written": 0}
    assert data["labels"]["train"]["ctr"] == {"observed": 4, "positive": 0}


def test_an_impression_table_without_rows_is_refused(shop: Any) -> None:
    shop.table("log", {name: [] for name in shop.log}, pa.schema([(name, pa.int64()) for name in shop.log]))
    with pytest.raises(RequestError, match="split 'train': it has no row"):
        shop.run()


def test_without_user_and_time_rows_stand_in_their_order(shop: Any) -> None:
    shop.table("log", {"item": [5, 4, 3, 2, 1], "click": [0, 1, 0, 1, 0]})
    shop.schema = {"id": [{"name": "item", "encode": "pass", "rows": 6}], "task": [{"name": "ctr", "label": "click"}]}
    shop.definition = {
        "schema": "schema.toml",
        "tables": {"log": {"path": "log.parquet"}},
        "impressions": {"table": "log"},
        "split": {"kind": "time", "test_fraction": 0.4},
    }
    data = shop.run()
    assert [list(row) for row in shop.rows()] == [["label.ctr", "mask.ctr", "item"]] * 3
    assert shop.column("item") == [5, 4, 3]
    assert shop.column("item", "test") == [2, 1]
    assert data["users"] == {"read": 0, "written": 0}
    assert "_user" not in data["cold"]


@pytest.mark.parametrize("names", [("kind", "number"), ("first", "moment"), ("r", "k"), ("select", "a b\"c'd\\"), ("label_0", "count")])
def test_columns_may_be_called_like_anything(shop: Any, names: tuple[str, str]) -> None:
    """Columns of match, side tables, filters and features, with names that the SQL uses itself, reserved words, quotes."""
    one, other = names
    shop.table("log", {**shop.log, one: [1, 2, 3, 4, 5, 6], other: [1, 1, 0, 0, 1, 0]})
    shop.table("buys", {"user": [1, 9], "time": [12, 99], one: [1, 1]})
    shop.table("sides", {one: [1, 4], "value": [0.5, 1.5], "since": [0, 29]})
    shop.definition["tables"] |= {
        "buys": {"path": "buys.parquet", "user": "user", "time": "time"},
        "sides": {"path": "sides.parquet", "time": "since"},
    }
    shop.definition["histories"][0] |= {"where": [[other, "==", 1]], "columns": {"item": one}}
    shop.definition["conversions"] = [{"task": "cvr", "table": "buys", "match": [one], "within": 5}]
    shop.definition["sides"] = [{"table": "sides", "on": [one], "columns": ["value"], "as_of": True}]
    shop.schema["number"] = [{"name": "value"}, {"name": "further", "column": other}]
    shop.schema["task"].append({"name": "cvr", "label": "x"})
    shop.run()
    assert shop.column("clicks.item", "test") == [[], [1, 2]]
    assert shop.column("label.cvr") == [1, 0, 0, 0]
    assert shop.column("value") == [0.5, 0.0, 0.0, 1.5]
    assert shop.column("further") == [1, 1, 0, 0]


def test_columns_that_differ_in_case_only_are_refused(shop: Any) -> None:
    shop.table("log", {**shop.log, "Item": shop.log["item"]})
    shop.definition["histories"][0]["columns"] = {"item": "Item"}
    with pytest.raises(RequestError, match="columns 'Item' and 'item' of table 'log': they differ in case only"):
        shop.run()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.schema.update(number=[{"name": "word"}]), "number 'word': column 'word' of table 'log' holds string"),
        (
            lambda s: s.schema["sequence"][0].update(number=[{"name": "word"}]),
            "number 'clicks.word': column 'word' of table 'log' holds string",
        ),
        (lambda s: s.schema["task"][0].update(delay="word"), "label of task 'ctr': column 'word' holds string"),
        (lambda s: s.schema["task"][0].update(delay="part"), "delay of task 'ctr': column 'part' holds what is no whole number of seconds"),
        (lambda s: s.schema.update(number=[{"name": "huge"}]), "number 'huge': its column holds infinite values"),
    ],
)
def test_numbers_are_finite_numbers(shop: Any, change: Any, message: str) -> None:
    shop.table("log", {**shop.log, "word": ["x"] * 6, "part": [0.5] * 6, "huge": [1.0, float("inf"), 2.0, 3.0, 4.0, 1e300]})
    change(shop)
    with pytest.raises(RequestError, match=message):
        shop.run()


def test_not_a_number_is_missing_and_counted(shop: Any) -> None:
    shop.table("log", {**shop.log, "price": pa.array([1.5, float("nan"), None, 2.5, 3.5, float("nan")])})
    shop.schema["number"] = [{"name": "price"}]
    data = shop.run()
    assert shop.column("price") == [1.5, 0.0, 0.0, 2.5]
    assert (data["unknown"]["train"]["price"], data["unknown"]["test"]["price"]) == (2, 1)
