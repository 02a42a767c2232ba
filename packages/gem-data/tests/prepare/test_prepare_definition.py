"""What a definition may say; each contradiction is named before any table is read."""

from typing import Any

import pytest

from gem_core.spec import RequestError
from gem_data.prepare import read_definition
from gem_data.prepare.where import literal, quote, sql


def set_at(target: dict[str, Any], path: str, value: object) -> None:
    *parents, last = path.split(".")
    for part in parents:
        target = target[int(part)] if isinstance(target, list) else target.setdefault(part, {})
    target[last] = value


HISTORY = {"name": "clicks", "table": "log"}
WRONG = [
    ("impressions.table", "nolog", "table 'nolog' is not among the .tables.: log"),
    ("tables.spare", {"path": "spare.parquet"}, "table 'spare' is used by nothing"),
    ("tables.log", {"path": "log.parquet", "time": "time"}, "gives no `user` column, but impressions needs one"),
    ("tables.log", {"path": "log.parquet", "user": "user"}, "gives no `time` column, but impressions needs one"),
    ("tables.log.unit", "min", "tables.log.unit"),
    ("tables.log.usr", "u", "tables.log.usr: Extra inputs"),
    ("histories", [], "the schema's sequence 'clicks' has no .*histories"),
    ("histories", [HISTORY, HISTORY], "history 'clicks' is given twice"),
    ("histories", [HISTORY, {"name": "views", "table": "log"}], "history 'views' is no .*sequence"),
    ("histories", [{**HISTORY, "columns": {"price": "p"}}], "gives a column for 'price', which its sequence has not"),
    ("histories", [{**HISTORY, "lag": -1}], "histories.0.lag"),
    ("histories", [{**HISTORY, "last": 0}], "histories.0.last"),
    ("histories", [{**HISTORY, "last": True}], "histories.0.last"),
    ("histories", [{**HISTORY, "where": [["click", "=", 1]]}], "is no condition; write"),
    ("histories", [{**HISTORY, "where": [["click", "in", []]]}], "is no condition; write"),
    ("histories", [{**HISTORY, "where": [["click", "in", 3]]}], "is no condition; write"),
    ("positives", [{"task": "ctr", "where": []}], "positives.0.where"),
    ("positives", [{"task": "cvr", "where": [["click", "==", 1]]}], "task 'cvr' is no .*task"),
    ("positives", [{"task": "ctr", "where": [["click", "==", 1]]}] * 2, "task 'ctr' gets its label twice"),
    ("conversions", [{"task": "ctr", "table": "log"}], "conversions.0.within"),
    ("sampling", {"task": "cvr", "keep": 0.1}, "task 'cvr' is no .*task"),
    ("sampling", {"task": "ctr", "keep": 1.0}, "sampling.keep"),
    ("split", {"kind": "time"}, "give either test_from or test_fraction"),
    ("split", {"kind": "time", "test_from": 3, "test_fraction": 0.1}, "give either test_from or test_fraction"),
    ("split", {"kind": "random"}, "split"),
    ("split", {"kind": "hash", "test_fraction": 0.2}, "a split by request needs `request`"),
    ("split", {"kind": "leave_last", "last": 0}, "split.leave_last.last"),
    ("impressions.share_histories", True, "share_histories needs `request`"),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG)
def test_a_wrong_definition_is_named(shop: Any, path: str, value: object, message: str) -> None:
    set_at(shop.definition, path, value)
    with pytest.raises(RequestError, match=message):
        shop.run()
    assert not (shop.folder / "out").exists()


def test_the_definition_that_the_others_change_is_right(shop: Any) -> None:
    definition, schema = read_definition(shop.write())
    assert definition.histories[0].where == (("click", "==", 1),)
    assert schema.task[0].name == "ctr"


def test_a_missing_task_is_named(shop: Any) -> None:
    shop.schema["task"] = []
    with pytest.raises(RequestError, match=r"the schema has no \[\[task\]\]"):
        shop.run()


def test_files_that_are_missing_or_no_toml_are_named(shop: Any) -> None:
    path = shop.write()
    with pytest.raises(RequestError, match="cannot be read"):
        read_definition(shop.folder / "nothing.toml")
    path.write_text("schema = ")
    with pytest.raises(RequestError, match="is no TOML"):
        read_definition(path)
    shop.write()
    (shop.folder / "schema.toml").unlink()
    with pytest.raises(RequestError, match=r"schema.*there is no such file"):
        read_definition(path)


def test_splits_by_user_need_users_and_moments_need_times(shop: Any) -> None:
    shop.schema["sequence"], shop.definition["histories"] = [], []
    for table, split, missing in (
        ({"time": "time"}, {"kind": "leave_last"}, "user"),
        ({"time": "time"}, {"kind": "hash", "by": "user", "test_fraction": 0.5}, "user"),
        ({"user": "user"}, {"kind": "time", "test_from": 3}, "time"),
    ):
        shop.definition |= {"tables": {"log": {"path": "log.parquet", **table}}, "split": split}
        with pytest.raises(RequestError, match=f"gives no `{missing}` column"):
            shop.run()


def test_conditions_become_sql_without_holes() -> None:
    assert sql(()) == "TRUE"
    assert sql((("a", "==", 1), ("b", "!=", "x"), ("c", "in", (1, 2)), ("d", ">=", 0.5))) == (
        '"a" = 1 AND "b" <> \'x\' AND "c" IN (1, 2) AND "d" >= CAST(0.5 AS DOUBLE)'
    )
    assert literal("it's; DROP TABLE x") == "concat('it', chr(39), 's; DROP TABLE x')"
    assert quote('a"b') == '"a""b"'
    assert (literal(True), literal(False), literal(3)) == ("1", "0", "3")


@pytest.mark.parametrize("text", ["plain", "it's", 'say "hi"', "back\\slash", "naïve", ""])
def test_texts_in_conditions_are_taken_as_they_stand(shop: Any, text: str) -> None:
    import pyarrow as pa

    kinds = pa.schema([("user", pa.int64()), ("time", pa.int64()), ("item", pa.int64()), ("click", pa.int64()), ("kind", pa.string())])
    shop.table(
        "log", {"user": [1, 1, 1, 1], "time": [1, 2, 3, 60], "item": [1, 2, 3, 4], "click": [0, 1, 0, 1], "kind": [text, "other", "x", "x"]}, kinds
    )
    shop.definition["histories"][0]["where"] = [["kind", "==", text]]
    shop.run()
    assert shop.column("clicks.item", "test") == [[1]]
