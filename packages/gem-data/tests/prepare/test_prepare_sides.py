"""Side tables: no impression is lost or multiplied, and none sees a later value."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gem_core.spec import RequestError

KINDS = pa.schema([("item", pa.int64()), ("price", pa.float64())])
TIMED = pa.schema([("item", pa.int64()), ("price", pa.float64()), ("time", pa.int64())])


def with_prices(shop: Any, rows: list[tuple[Any, ...]], kinds: pa.Schema, **side: Any) -> None:
    columns = [list(c) for c in zip(*rows, strict=True)] or [[] for _ in kinds]
    shop.table("items", dict(zip(kinds.names, columns, strict=True)), kinds)
    shop.definition["tables"]["items"] = {"path": "items.parquet"} | ({"time": "time"} if "time" in kinds.names else {})
    shop.definition["sides"] = [{"table": "items", "on": ["item"], "columns": ["price"], **side}]
    shop.schema["number"] = [{"name": "price"}]


def test_case_H21_rows_without_a_match_stay(shop: Any) -> None:
    with_prices(shop, [(1, 0.5), (3, None), (6, 6.0), (None, 9.0), (8, 8.0)], KINDS)
    data = shop.run()
    assert shop.column("price") == [0.5, 0.0, 0.0, 0.0]
    assert shop.column("price", "test") == [0.0, 6.0]
    assert data["sides"] == {"items": {"train": {"matched": 2, "unmatched": 2}, "test": {"matched": 1, "unmatched": 1}}}
    assert data["unknown"]["train"]["price"] == 3
    assert data["ledger"] == {"read": 6, "train": 4, "test": 2}


def test_an_empty_side_table_matches_nothing(shop: Any) -> None:
    with_prices(shop, [], KINDS)
    assert shop.run()["sides"]["items"]["train"] == {"matched": 0, "unmatched": 4}


def test_a_key_that_occurs_twice_is_refused(shop: Any) -> None:
    with_prices(shop, [(1, 0.5), (2, 1.0), (2, 2.0)], KINDS)
    with pytest.raises(RequestError, match=r"side table 'items': \{'item': 2\} occurs 2 times, which would multiply impressions"):
        shop.run()


def test_as_of_takes_the_last_row_strictly_before(shop: Any) -> None:
    with_prices(shop, [(1, 1.0, 9), (1, 2.0, 10), (2, 3.0, 5), (2, None, 19), (6, 4.0, 8), (6, 5.0, 8), (6, 6.0, 70)], TIMED, as_of=True)
    data = shop.run()
    assert shop.column("price")[:2] == [1.0, 0.0]  # at 10 the price of that second is not known; at 20 the last row says nothing
    assert shop.column("price", "test")[1] == 5.0  # of two rows of one second the later in the file
    assert data["sides"]["items"] == {"train": {"matched": 2, "unmatched": 2}, "test": {"matched": 1, "unmatched": 1}}


def test_as_of_needs_times(shop: Any) -> None:
    with_prices(shop, [(1, 0.5)], KINDS, as_of=True)
    with pytest.raises(RequestError, match="table 'items' gives no `time` column, but side needs one"):
        shop.run()


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    log=st.lists(st.tuples(st.integers(0, 2), st.one_of(st.integers(0, 8), st.none())), min_size=2, max_size=12),
    prices=st.lists(st.tuples(st.one_of(st.integers(0, 2), st.none()), st.integers(1, 99), st.one_of(st.integers(0, 8), st.none())), max_size=12),
)
def test_as_of_against_a_loop(make_shop: Any, log: list[tuple[Any, Any]], prices: list[tuple[Any, Any, Any]]) -> None:
    shop = make_shop()
    log = [*log, (1, 3), (1, 60)]
    shop.table("log", {"user": [1] * len(log), "time": [t for _, t in log], "item": [i for i, _ in log], "click": [1] * len(log)})
    with_prices(shop, prices, TIMED, as_of=True)
    shop.run()
    ordered = sorted((row for row in prices if None not in row), key=lambda row: row[2])
    expected = []
    for item, time in sorted((pair for pair in log if pair[1] is not None), key=lambda pair: pair[1]):
        known = [float(price) for key, price, since in ordered if key == item and since < time]
        expected.append(known[-1] if known else 0.0)
    assert shop.column("price") + shop.column("price", "test") == expected


def test_two_side_tables_and_a_key_of_two_columns(shop: Any) -> None:
    with_prices(shop, [(k, float(k)) for k in range(7)], KINDS)
    shop.table("pairs", {"item": [1, 2, 5], "user": [1, 2, 2], "group": [3, 4, 5]})
    shop.definition["tables"]["pairs"] = {"path": "pairs.parquet"}
    shop.definition["sides"].append({"table": "pairs", "on": ["item", "user"], "columns": ["group"]})
    shop.schema["id"].append({"name": "group", "encode": "pass", "rows": 9})
    data = shop.run()
    assert shop.column("price") == [1.0, 2.0, 3.0, 4.0]
    assert shop.column("group") == [3, 0, 0, 0]
    assert shop.column("group", "test") == [5, 0]
    assert data["sides"]["pairs"]["test"] == {"matched": 1, "unmatched": 1}


def test_columns_that_clash_or_that_nothing_uses_are_named(shop: Any) -> None:
    with_prices(shop, [(1, 0.5)], KINDS)
    shop.definition["sides"].append({"table": "items", "on": ["item"], "columns": ["price"]})
    with pytest.raises(RequestError, match="column 'price' is taken from two side tables"):
        shop.run()
    shop.definition["sides"][1]["columns"] = ["colour"]
    with pytest.raises(RequestError, match="column 'colour' of a side table is used by no feature of the schema"):
        shop.run()
