"""The leakage check finds an event that is not before its impression, whoever put it there."""

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem_core.spec import RunFailed
from gem_data.prepare import histories
from gem_data.prepare.leakage import check_leakage
from gem_data.schema import read_schema

LATER = pa.array([[], [10], [], [10, 20]], pa.list_(pa.int64()))


def plant(shop: Any, part: str, column: str, values: pa.Array) -> None:
    path = shop.folder / "out" / part
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.schema.get_field_index(column), column, values), path)


def check(shop: Any, data: dict[str, Any], lag: int = 0) -> dict[str, int]:
    folder = shop.folder / "out"
    return check_leakage(folder, read_schema(folder / "schema.toml"), data["splits"], {"clicks": lag})


def test_every_event_of_every_split_is_checked(shop: Any) -> None:
    data = shop.run()
    events = sum(len(row["clicks.time"]) for split in ("train", "test") for row in shop.rows(split))
    assert check(shop, data) == data["leakage"] == {"clicks": events}


@pytest.mark.parametrize(("event", "row"), [(20, 1), (21, 1), (10**12, 3), (30, 3)])
def test_a_planted_event_turns_it_red(shop: Any, event: int, row: int) -> None:
    data = shop.run()
    lists = LATER.to_pylist()
    lists[row].append(event)
    plant(shop, "train/part-00000.parquet", "clicks.time", pa.array(lists, LATER.type))
    with pytest.raises(
        RunFailed, match=rf"part-00000.parquet: an event of 1 at time {event} is not before its impression at {20 if row == 1 else 30}"
    ):
        check(shop, data)


def test_an_event_just_before_is_no_leak_unless_there_is_a_lag(shop: Any) -> None:
    data = shop.run()
    plant(shop, "train/part-00000.parquet", "clicks.time", pa.array([[9], [19], [], []], LATER.type))
    assert check(shop, data)["clicks"] >= 2
    with pytest.raises(RunFailed, match="time 9 is not before its impression at 10 less the lag of 1"):
        check(shop, data, lag=1)


def test_shared_histories_are_held_to_the_first_row_of_the_request(shop: Any) -> None:
    shop.schema["request"] = "request"
    shop.table("log", {**shop.log, "request": [1, 2, 3, 2, 4, 5]})
    shop.definition["impressions"]["share_histories"] = True
    data = shop.run()
    assert [row["clicks.time"] for row in shop.rows()] == [[], [10], [10], []]
    plant(shop, "train/part-00000.requests.parquet", "clicks.time", pa.array([[], [20], []], LATER.type))
    with pytest.raises(RunFailed, match=r"part-00000.requests.parquet: an event of 1 at time 20 is not before its impression at 20"):
        check(shop, data)


def test_a_fault_in_the_relational_part_leaves_no_folder(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: events of the impression's own second sort before it."""
    original = histories.count_events

    class Wrong:
        def __init__(self, engine: Any) -> None:
            self.engine = engine

        def create(self, name: str, sql: str) -> None:
            self.engine.create(name, sql.replace("ORDER BY gem_moment, gem_kind ", "ORDER BY gem_moment, gem_kind DESC "))

    monkeypatch.setattr("gem_data.prepare.run.count_events", lambda engine, plan: original(Wrong(engine), plan))
    with pytest.raises(RunFailed, match=r"leakage check of part-00000.parquet"):
        shop.run()
    assert not (shop.folder / "out").exists()


def test_a_sequence_without_times_cannot_be_checked_and_is_not_listed(shop: Any) -> None:
    del shop.schema["sequence"][0]["time"]
    assert shop.run()["leakage"] == {}
