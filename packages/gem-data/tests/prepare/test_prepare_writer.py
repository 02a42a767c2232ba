"""Prepared files: every kind of feature, parts, row groups, shared histories, vocabularies."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem_core.spec import RequestError
from gem_data.audit import audit
from gem_data.prepare import writer
from gem_data.schema import read_schema, to_data_schema

KINDS = [
    ("genre", "multi_id", {"encode": "pass", "rows": 9}),
    ("tag", "multi_id", {"encode": "hash", "rows": 50, "weights": "share"}),
    ("price", "number", {}),
    ("vector", "embedding", {"width": 2}),
]


def with_all_kinds(shop: Any) -> None:
    for name, kind, about in KINDS:
        shop.schema.setdefault(kind, []).append({"name": name, **about})
    shop.log = {
        **shop.log,
        "genre": pa.array([[1, 2], [], None, [3], [4], [5, 20]], pa.list_(pa.int16())),
        "tag": pa.array([["a"], ["a", "b"], None, [], ["b", None], ["c"]], pa.large_list(pa.string())),
        "share": pa.array([[0.5], [1, 2], None, [], [3, 4], [5]], pa.list_(pa.float64())),
        "price": pa.array([1, None, 2, 3, 4, 5], pa.float64()),
        "vector": pa.array([[1, 2], None, [3, 4], [5, 6], [7, 8], [9, 0]], pa.list_(pa.float32())),
    }
    shop.table("log", shop.log)


def test_case_H13_every_kind_of_feature_and_what_is_missing(shop: Any) -> None:
    with_all_kinds(shop)
    data = shop.run()
    assert shop.column("genre") == [[1, 2], [], [], [3]]
    assert shop.column("genre", "test") == [[4], [5, 0]]
    tags = shop.column("tag")
    assert [len(t) for t in tags] == [1, 2, 0, 0]
    assert tags[0][0] == tags[1][0] != tags[1][1] > 0
    assert shop.column("tag", "test")[0] == [tags[1][1], 0]
    assert shop.column("tag.weights") == [[0.5], [1.0, 2.0], [], []]
    assert shop.column("price") == [1.0, 0.0, 2.0, 3.0]
    assert shop.column("vector") == [[1, 2], [0, 0], [3, 4], [5, 6]]
    assert {k: n for k, n in data["unknown"]["train"].items() if n} == {"price": 1}
    assert {k: n for k, n in data["unknown"]["test"].items() if n} == {"genre": 1, "tag": 1}
    assert audit(shop.folder / "out") == data


def test_case_H14_and_H15_the_prepared_schema_describes_the_files(shop: Any) -> None:
    with_all_kinds(shop)
    shop.schema["task"][0]["loss_weight"] = 2.0
    shop.run()
    schema = read_schema(shop.folder / "out" / "schema.toml")
    file = pq.ParquetFile(shop.folder / "out/train/part-00000.parquet")
    assert set(schema.columns()) == set(file.schema_arrow.names)
    assert all(feature.encode == "pass" for _, _, feature in schema.id_columns())
    core = to_data_schema(schema)
    assert {f.name: f.cardinality for f in core.ids} == {"item": 10, "genre": 9, "tag": 50}
    assert core.sequence("clicks").ids[0].table == "item"
    assert core.tasks[0].weight == 2.0


def test_two_columns_of_one_name_are_refused(shop: Any) -> None:
    shop.schema["id"].append({"name": "_user", "column": "item", "encode": "pass", "rows": 10})
    with pytest.raises(RequestError, match=r"two of their columns would be called '_user'"):
        shop.run()
    assert not (shop.folder / "out").exists()


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("vector", [[1, 2], [3], None, None, None, None], "embedding 'vector': a row has 1 numbers, and the width is 2"),
        ("share", [[0.5], [1], None, [], [3, 4], [5]], "weights of 'tag': row 1 has another number of ids"),
        ("genre", [1, 2, 3, 4, 5, 6], "feature 'genre': its column holds int64"),
    ],
)
def test_lists_that_do_not_fit_are_refused(shop: Any, column: str, values: list[Any], message: str) -> None:
    with_all_kinds(shop)
    shop.table("log", {**shop.log, column: pa.array(values)})
    with pytest.raises(RequestError, match=message):
        shop.run()


def long_log(shop: Any, rows: int, users: int = 7, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    shop.log = {
        "user": rng.integers(0, users, rows),
        "time": np.sort(rng.integers(0, rows, rows)),
        "item": rng.integers(1, 9, rows),
        "click": (rng.random(rows) < 0.5).astype(np.int8),
        "request": np.arange(rows) // 3,
    }
    shop.table("log", shop.log)
    shop.definition["split"] = {"kind": "time", "test_fraction": 0.1}


@pytest.mark.parametrize("shared", [False, True])
def test_parts_and_row_groups_are_bounded(shop: Any, monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    long_log(shop, 900)
    shop.schema["request"] = "request"
    shop.definition["impressions"]["share_histories"] = shared
    shop.run("whole")
    monkeypatch.setattr(writer, "GROUP_ROWS", 50)
    monkeypatch.setattr(writer, "PART_ROWS", 200)
    monkeypatch.setattr(writer, "GROUP_EVENTS", 120)
    data = shop.run()
    files = data["splits"]["train"]
    assert [f["file"] for f in files] == [f"train/part-{k:05d}.parquet" for k in range(len(files))]
    assert len(files) >= 4
    for entry in files:
        about = pq.read_metadata(shop.folder / "out" / entry["file"])
        assert about.num_rows == entry["rows"] <= 250
        assert max(about.row_group(g).num_rows for g in range(about.num_row_groups)) <= 50
        rows = pq.read_table(shop.folder / "out" / entry["file"], columns=["_user", "_request"]).to_pylist()
        assert entry.get("requests") == (len({(r["_user"], r["_request"]) for r in rows}) if shared else None)
    plain = [{k: v for k, v in row.items() if k != "request_row"} for row in shop.rows()]
    assert plain == [{k: v for k, v in row.items() if k != "request_row"} for row in shop.rows(name="whole")]
    assert audit(shop.folder / "out") == data


def test_one_row_may_have_more_events_than_a_row_group(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "GROUP_EVENTS", 3)
    shop.schema["sequence"][0]["max_length"] = 1000
    shop.table("log", {"user": [1] * 20, "time": list(range(20)), "item": [1] * 20, "click": [1] * 20})
    shop.definition["split"] = {"kind": "leave_last"}
    shop.run()
    assert [len(c) for c in shop.column("clicks.time")] == list(range(19))


def test_candidates_of_one_request_share_one_history(shop: Any) -> None:
    """The history is that of the request's first row; a request with rows in both splits has one in each."""
    shop.schema["request"] = "request"
    shop.table(
        "log",
        {"user": [1, 1, 1, 2, 1, 1], "time": [5, 9, 10, 10, 49, 51], "item": [1, 2, 3, 4, 5, 6], "click": [1] * 6, "request": [7, 8, 8, 8, 9, 9]},
    )
    shop.definition["impressions"]["share_histories"] = True
    data = shop.run()
    assert data["splits"]["train"] == [{"file": "train/part-00000.parquet", "rows": 5, "requests": 4}]
    rows = {row["item"]: (row["request_row"], row["clicks.time"]) for row in shop.rows()}
    assert rows == {1: (0, []), 2: (1, [5]), 3: (1, [5]), 4: (2, []), 5: (3, [5, 9, 10])}
    assert [row["clicks.time"] for row in shop.rows("test")] == [[5, 9, 10, 49]]
    columns = pq.read_schema(shop.folder / "out/train/part-00000.requests.parquet").names
    assert columns == ["clicks.item", "clicks.time"]
    assert "clicks.item" not in pq.read_schema(shop.folder / "out/train/part-00000.parquet").names


def test_requests_of_the_shared_kind_need_an_id(shop: Any) -> None:
    shop.schema["request"] = "request"
    shop.table("log", {**shop.log, "request": pa.array([1, None, 2, 3, 4, None], pa.int64())})
    shop.run("apart")
    shop.definition["impressions"]["share_histories"] = True
    assert shop.run()["ledger"] == {"read": 6, "train": 3, "test": 1, "dropped: no request": 2}
    assert [row["_request"] for row in shop.rows(name="apart")] == [1, None, 2, 3]


def test_case_H10_vocabularies_hold_what_training_rows_can_see(shop: Any) -> None:
    """Item 6 is only a test candidate; item 5 is clicked by a user with no training row; both are row 0."""
    for feature in (shop.schema["id"][0], shop.schema["sequence"][0]["id"][0]):
        feature |= {"encode": "vocabulary", "table": "item"}
        del feature["rows"]
    shop.table("log", {"user": [1, 1, 3, 1, 3], "time": [10, 20, 52, 60, 61], "item": [1, 2, 5, 6, 1], "click": [1, 1, 1, 0, 0]})
    data = shop.run()
    table = pq.read_table(shop.folder / "out/vocabulary/item.parquet").to_pydict()
    assert table == {"value": [1, 2], "row": [1, 2], "count": [2, 1]}  # item 1: as a candidate and as an event
    assert shop.column("item", "test") == [0, 0, 1]
    assert shop.column("clicks.item", "test") == [[], [1, 2], [0]]
    assert data["unknown"]["test"] == {"item": 2, "clicks.item": 1}
    assert data["cold"] == {"_user": 2, "item": 2}


def test_rare_ids_are_not_admitted_and_strict_features_refuse_them(shop: Any) -> None:
    for feature in (shop.schema["id"][0], shop.schema["sequence"][0]["id"][0]):
        feature |= {"encode": "vocabulary", "table": "item", "min_count": 2}
        del feature["rows"]
    data = shop.run()
    assert data["unknown"]["train"]["item"] == 2
    shop.schema["id"][0]["unknown"] = "error"
    with pytest.raises(RequestError, match="ids of 'item': 2 values are not in its vocabulary of 2"):
        shop.run("strict")
    assert not (shop.folder / "strict").exists()


def test_two_histories_of_different_events_lags_and_names(shop: Any) -> None:
    shop.schema["sequence"].append(
        {
            "name": "views",
            "max_length": 9,
            "time": "at",
            "id": [{"name": "thing", "encode": "pass", "rows": 10}],
            "number": [{"name": "score"}],
        }
    )
    shop.table("log", {**shop.log, "rating": [0.1, 0.2, 0.3, None, 0.5, 0.6]})
    shop.definition["histories"].append({"name": "views", "table": "log", "lag": 10, "columns": {"thing": "item", "score": "rating"}})
    data = shop.run()
    rows = shop.rows("test")
    assert [r["clicks.item"] for r in rows] == [[], [1, 2]]
    assert [r["views.thing"] for r in rows] == [[3], [1, 2, 4]]
    assert [r["views.at"] for r in rows] == [[20], [10, 20, 30]]
    assert rows[1]["views.score"] == pytest.approx([0.1, 0.2, 0.0])
    assert data["events"] == {
        "clicks": {"read": 6, "of users written": 3, "dropped: not selected by where": 3},
        "views": {"read": 6, "of users written": 6},
    }


def test_a_history_without_any_event_is_empty(shop: Any) -> None:
    shop.definition["histories"][0]["where"] = [["click", "==", 7]]
    data = shop.run()
    assert shop.column("clicks.item") == [[]] * 4
    assert data["events"]["clicks"] == {"read": 6, "dropped: not selected by where": 6, "of users written": 0}
    assert audit(shop.folder / "out") == data


@pytest.mark.parametrize(("truncate", "last", "times"), [("newest", None, [6, 7, 8, 9]), ("oldest", None, list(range(10))), ("error", 3, [7, 8, 9])])
def test_what_is_left_to_the_reader_to_truncate_is_kept(shop: Any, truncate: str, last: int | None, times: list[int]) -> None:
    shop.schema["sequence"][0]["truncate"] = truncate
    shop.schema["sequence"][0]["id"][0]["column"] = "thing"
    shop.table("log", {"user": [1] * 11, "time": [*range(10), 60], "item": [1] * 11, "thing": [*range(10), 3], "click": [1] * 11})
    if last is not None:
        shop.definition["histories"][0]["last"] = last
    shop.run()
    assert shop.column("clicks.time", "test") == [times]
    assert shop.column("clicks.item", "test") == [times]
    assert read_schema(shop.folder / "out" / "schema.toml").sequence[0].truncate == truncate


def test_histories_of_two_hundred_thousand_events(shop: Any) -> None:
    n = 210_000
    shop.table("events", {"user": np.ones(n, np.int64), "time": np.arange(n) - n, "item": np.arange(n) % 9 + 1})
    shop.definition["tables"]["events"] = {"path": "events.parquet", "user": "user", "time": "time"}
    shop.definition["histories"][0] |= {"table": "events", "where": []}
    shop.schema["sequence"][0]["max_length"] = 200_000
    data = shop.run()
    times = shop.column("clicks.time")
    assert [len(t) for t in times] == [200_000, 200_000, 0, 200_000]
    assert (times[3][0], times[3][-1]) == (-200_000, -1)
    assert data["leakage"] == {"clicks": 4 * 200_000}
    assert audit(shop.folder / "out") == data
