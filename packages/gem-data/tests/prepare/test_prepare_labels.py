"""Labels: columns, conditions, masks, and what happened later."""

from typing import Any

import pyarrow as pa
import pytest

from gem_core.spec import RequestError

NUMBER = pa.int64()


def with_labels(shop: Any, clicks: list[Any], kind: pa.DataType = NUMBER, **columns: Any) -> None:
    """One row a label, the last in the test split."""
    n = len(clicks)
    times = [*range(1, n), 60]
    shop.log = {"user": [1] * n, "time": times, "item": [1] * n, "click": pa.array(clicks, kind), **columns}
    shop.table("log", shop.log)
    shop.definition["histories"][0]["where"] = []


def labels(shop: Any, task: str = "ctr") -> list[tuple[int, bool]]:
    return [(row[f"label.{task}"], row[f"mask.{task}"]) for split in ("train", "test") for row in shop.rows(split)]


def test_unknown_labels_are_masked_and_rows_without_any_dropped(shop: Any) -> None:
    with_labels(shop, [0, 1, -1, None, 1], other=[1, None, 0, None, -1])
    shop.schema["task"].append({"name": "other", "label": "other"})
    data = shop.run()
    assert labels(shop) == [(0, True), (1, True), (0, False), (1, True)]
    assert labels(shop, "other") == [(1, True), (0, False), (0, True), (0, False)]
    assert data["ledger"] == {"read": 5, "train": 3, "test": 1, "dropped: no observed label": 1}
    assert data["labels"]["train"] == {"ctr": {"observed": 2, "positive": 1}, "other": {"observed": 2, "positive": 1}}


@pytest.mark.parametrize(("value", "kind"), [(2, pa.int64()), (-2, pa.int8()), (0.5, pa.float64()), (float("nan"), pa.float32())])
def test_other_labels_are_refused_with_their_row(shop: Any, value: Any, kind: pa.DataType) -> None:
    with_labels(shop, [0, 1, value, 1], kind)
    with pytest.raises(RequestError, match=f"label of task 'ctr': row 2 has click = {value!r}"):
        shop.run()


@pytest.mark.parametrize("kind", [pa.bool_(), pa.float32(), pa.uint8()])
def test_labels_of_any_numeric_type(shop: Any, kind: pa.DataType) -> None:
    with_labels(shop, [False, True, None, True] if kind == pa.bool_() else [0, 1, None, 1], kind)
    shop.run()
    assert labels(shop) == [(0, True), (1, True), (1, True)]


def test_text_labels_are_refused(shop: Any) -> None:
    with_labels(shop, ["0", "1"], pa.string())
    with pytest.raises(RequestError, match="label of task 'ctr': column 'click' holds string"):
        shop.run()


def test_positives_by_condition_are_unknown_where_a_value_is_missing(shop: Any) -> None:
    with_labels(shop, [0] * 5, rating=pa.array([5, 3, None, 4, 1], NUMBER))
    shop.definition["positives"] = [{"task": "ctr", "where": [["rating", ">=", 4]]}]
    data = shop.run()
    assert labels(shop) == [(1, True), (0, True), (1, True), (0, True)]
    assert data["ledger"]["dropped: no observed label"] == 1


def test_mask_weight_and_delay_columns_are_kept(shop: Any) -> None:
    columns = {"known": [True, False, True, True], "weight": [1.0, 2.0, 0.5, 3.0], "late": pa.array([None, 3, 9, 1], NUMBER), "always": [0, 0, 0, 1]}
    with_labels(shop, [0, 1, 1, 0], **columns)
    shop.schema["task"] = [
        {"name": "ctr", "label": "click", "mask": "known", "weight": "weight", "delay": "late"},
        {"name": "all", "label": "always"},
    ]
    shop.run()
    assert labels(shop) == [(0, True), (1, False), (1, True), (0, True)]
    assert shop.column("weight.ctr") == [1.0, 2.0, 0.5]
    assert shop.column("delay.ctr") == [None, 3, 9]
    assert "delay.all" not in shop.rows()[0]


@pytest.mark.parametrize("weights", [[1.0, None, 1.0], [1.0, float("inf"), 1.0]])
def test_missing_weights_are_refused(shop: Any, weights: list[Any]) -> None:
    with_labels(shop, [0, 1, 0], weight=pa.array(weights, pa.float64()))
    shop.schema["task"][0]["weight"] = "weight"
    with pytest.raises(RequestError, match="weight of task 'ctr': column 'weight' has missing or infinite values"):
        shop.run()


def with_buys(shop: Any, buys: list[tuple[Any, Any, Any]], **conversion: Any) -> None:
    kinds = pa.schema([("user", NUMBER), ("time", NUMBER), ("item", NUMBER)])
    shop.table("buys", dict(zip(kinds.names, map(list, zip(*buys, strict=True)), strict=True)), kinds)
    shop.schema["task"].append({"name": "cvr", "label": "bought"})
    shop.definition["tables"]["buys"] = {"path": "buys.parquet", "user": "user", "time": "time"}
    shop.definition["conversions"] = [{"task": "cvr", "table": "buys", "match": ["item"], "within": 10, **conversion}]


def test_case_H03_delayed_labels_of_a_hand_made_log(shop: Any) -> None:
    """Impressions of user 1: item 1 at 10, item 2 at 20, item 4 at 30, item 6 at 70; of user 2: item 3 at 20, item 5 at 60."""
    bought = [(1, 10, 1), (1, 20, 1), (1, 31, 2), (2, 20, 4), (1, 9, 1), (1, 30, 4), (1, 41, 4), (None, 60, 5), (2, 80, 5)]
    with_buys(shop, bought)
    shop.run()
    rows = {(r["_user"], r["item"]): (r["label.cvr"], r["delay.cvr"], r["mask.cvr"]) for split in ("train", "test") for r in shop.rows(split)}
    assert rows == {
        (1, 1): (1, 0, True),  # in the same second, and the one at 20 is the second; the one at 9 came before
        (1, 2): (0, None, True),  # after 11 seconds
        (2, 3): (0, None, True),  # the buyer of item 4 is user 2
        (1, 4): (1, 0, True),
        (2, 5): (0, None, True),  # nobody's purchase is not user 2's; after 20 seconds
        (1, 6): (0, None, True),  # the window ends with the log, at 80
    }


def test_labels_whose_window_is_open_are_masked_even_if_positive(shop: Any) -> None:
    with_buys(shop, [(1, 71, 6), (1, 79, 1)])
    shop.run()
    assert [(r["_time"], r["label.cvr"], r["mask.cvr"]) for r in shop.rows("test")] == [(60, 0, True), (70, 1, False)]


def test_the_end_of_the_log_may_be_declared(shop: Any) -> None:
    with_buys(shop, [(1, 71, 6)], end=80)
    shop.run()
    assert shop.column("mask.cvr", "test") == [True, True]


def test_without_match_any_event_of_the_user_counts(shop: Any) -> None:
    with_buys(shop, [(2, 25, None), (9, 99, 9)], match=[])
    shop.run()
    assert shop.column("label.cvr") == [0, 0, 1, 0]


def test_conversions_may_be_rows_of_the_same_log(shop: Any) -> None:
    with_buys(shop, [(1, 1, 1)])
    shop.definition["conversions"][0] |= {"table": "log", "where": [["click", "==", 1]], "match": []}
    del shop.definition["tables"]["buys"]
    shop.run()
    assert shop.column("delay.cvr") == [0, 0, None, None]


def test_conditional_labels_count_where_the_condition_holds(shop: Any) -> None:
    with_buys(shop, [(1, 10, 1), (1, 31, 4), (9, 99, 9)])
    shop.schema["task"][1]["condition"] = "ctr"
    data = shop.run()
    assert shop.column("label.cvr") == [1, 0, 0, 1]
    assert data["labels"]["train"]["cvr"] == {"observed": 2, "positive": 1}
