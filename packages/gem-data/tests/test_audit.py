"""``audit`` counts everything again; each planted fault turns it red."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import tomli_w

from gem_core.spec import RequestError, RunFailed
from gem_data.audit import audit
from gem_data.prepare import prepare

pytestmark = pytest.mark.filterwarnings("ignore::gem_data.splits.SplitWarning")
SCHEMA = {
    "user": "user",
    "request": "request",
    "time": "time",
    "id": [{"name": "item", "encode": "vocabulary"}],
    "sequence": [{"name": "clicks", "max_length": 3, "time": "time", "id": [{"name": "item", "encode": "vocabulary", "table": "item"}]}],
    "task": [{"name": "ctr", "label": "click"}],
}
DEFINITION = {
    "schema": "schema.toml",
    "tables": {"log": {"path": "log.parquet", "user": "user", "time": "time"}},
    "histories": [{"name": "clicks", "table": "log", "where": [["click", "==", 1]]}],
    "split": {"kind": "time", "test_from": 30},
    "sampling": {"task": "ctr", "keep": 0.5},
}


@pytest.fixture
def make(tmp_path: Path) -> Callable[[bool], Path]:
    def prepared(shared: bool = False) -> Path:
        n = 40
        log = {
            "user": [k % 3 for k in range(n)],
            "time": list(range(n)),
            "item": [k % 5 for k in range(n)],
            "click": [int(k % 4 < 2) for k in range(n)],
        }
        pq.write_table(pa.table(log | {"request": [k // 2 for k in range(n)]}), tmp_path / "log.parquet")
        (tmp_path / "schema.toml").write_text(tomli_w.dumps(SCHEMA))
        (tmp_path / "definition.toml").write_text(tomli_w.dumps(DEFINITION | {"impressions": {"table": "log", "share_histories": shared}}))
        prepare(tmp_path / "definition.toml", tmp_path / "out")
        return tmp_path / "out"

    return prepared


def change_table(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    pq.write_table(change(pq.read_table(path)), path)


def put(column: str, row: int, value: Any) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        values = table[column].to_pylist()
        values[row] = value
        return table.set_column(table.schema.get_field_index(column), column, pa.array(values, table.schema.field(column).type))

    return change


def put_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("shared", [False, True])
def test_an_untouched_folder_passes(make: Callable[[bool], Path], shared: bool) -> None:
    folder = make(shared)
    assert audit(folder) == json.loads((folder / "data.json").read_text())


PART = "train/part-00000.parquet"
FAULTS: list[tuple[str, Callable[[pa.Table], pa.Table], str]] = [
    ("a row is lost", lambda t: t.slice(1), r"part-00000.parquet has \d+ rows, not"),
    ("a row is there twice", lambda t: pa.concat_tables([t, t.slice(0, 1)]), r"part-00000.parquet has \d+ rows, not"),
    ("a label is flipped", put("label.ctr", 0, 0), "the labels of train are"),
    ("a mask is flipped", put("mask.ctr", 0, False), "the labels of train are"),
    ("another user", put("_user", 0, 99), "the files hold 4 users, not 3"),
    ("an id beyond its table", put("item", 0, 99), "ids of .item. lie in 1 .. 99, and its table has 6 rows"),
    ("a negative id", put("item", 0, -1), "ids of 'item' lie in -1 .. "),
    ("an id becomes unknown", put("item", 0, 0), "train has 1 unknown values of 'item', not 0"),
    ("an event id beyond its table", put("clicks.item", 5, [1, 99]), "ids of 'clicks.item' lie in 1 .. 99"),
    ("an event is lost of one list", put("clicks.item", -1, [1]), "the lists of history 'clicks' differ in length"),
    ("a row out of order", put("_time", 0, 29), "is not in the order of time"),
    ("a column is gone", lambda t: t.drop_columns(["clicks.time"]), "lacks the columns clicks.time"),
]


@pytest.mark.parametrize(("change", "message"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_a_fault_in_a_part_is_found(make: Callable[[bool], Path], change: Callable[[pa.Table], pa.Table], message: str) -> None:
    folder = make(False)
    change_table(folder / PART, change)
    with pytest.raises(RunFailed, match=message):
        audit(folder)


def test_a_leak_and_lost_events_are_found(make: Callable[[bool], Path]) -> None:
    folder = make(False)
    change_table(folder / PART, lambda t: put("clicks.item", -1, [1])(put("clicks.time", -1, [10**6])(t)))
    with pytest.raises(RunFailed, match="time 1000000 is not before its impression"):
        audit(folder)
    change_table(folder / PART, put("clicks.time", -1, [0]))
    with pytest.raises(RunFailed, match=r"another number of events than data.json says"):
        audit(folder)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (PART, put("request_row", -1, 99), "request_row does not count requests up"),
        (PART, put("request_row", 0, 1), "request_row does not count requests up"),
        (
            PART,
            lambda t: t.set_column(t.schema.get_field_index("request_row"), "request_row", pa.array([0] * t.num_rows)),
            "refers to 1 requests, not",
        ),
        ("train/part-00000.requests.parquet", lambda t: t.slice(1), r"part-00000.requests.parquet has \d+ rows, not"),
        ("train/part-00000.requests.parquet", put("clicks.item", -1, [0]), "differ in length"),
    ],
)
def test_a_fault_in_shared_histories_is_found(make: Callable[[bool], Path], file: str, change: Callable[[pa.Table], pa.Table], message: str) -> None:
    folder = make(True)
    change_table(folder / file, change)
    with pytest.raises(RunFailed, match=message):
        audit(folder)


def test_files_that_are_missing_damaged_or_not_listed_are_found(make: Callable[[bool], Path]) -> None:
    folder = make(False)
    (folder / "train/part-00007.parquet").write_bytes((folder / PART).read_bytes())
    with pytest.raises(RunFailed, match=r"train/part-00007.parquet is not listed"):
        audit(folder)
    (folder / "train/part-00007.parquet").unlink()
    (folder / PART).write_bytes(b"PAR1 no parquet")
    with pytest.raises(RunFailed, match=r"part-00000.parquet cannot be read"):
        audit(folder)
    (folder / PART).unlink()
    with pytest.raises(RunFailed, match=r"part-00000.parquet cannot be read"):
        audit(folder)


def lower(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        for part in path[:-1]:
            data = data[part]
        data[path[-1]] -= 1

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lower("ledger", "read"), r"the ledger of rows adds up to 40, and 39 were read"),
        (lower("ledger", "train"), r"the ledger counts \d+ train rows, the files hold"),
        (lower("ledger", "dropped: negative down-sampling"), "the ledger of rows adds up to 39, and 40 were read"),
        (lower("users", "written"), "the ledger of users adds up to 2, and 3 were read"),
        (lower("events", "clicks", "read"), "the ledger of clicks adds up to 40, and 39 were read"),
        (lower("calibration", "kept"), r"train has \d+ negatives of 'ctr', not"),
        (lower("labels", "test", "ctr", "observed"), "the labels of test are"),
        (lower("unknown", "test", "item"), "test has 0 unknown values of 'item', not -1"),
    ],
)
def test_a_false_figure_is_found(make: Callable[[bool], Path], change: Callable[[dict[str, Any]], None], message: str) -> None:
    folder = make(False)
    put_json(folder / "data.json", change)
    with pytest.raises(RunFailed, match=message):
        audit(folder)


def test_a_vocabulary_of_another_size_is_found(make: Callable[[bool], Path]) -> None:
    folder = make(False)
    change_table(folder / "vocabulary/item.parquet", lambda t: t.filter(pc.greater(t["row"], 1)))
    with pytest.raises(RunFailed, match="the vocabulary of 'item' makes 5 rows, the schema says 6"):
        audit(folder)


def test_other_folders_are_refused(make: Callable[[bool], Path], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"its data.json cannot be read"):
        audit(tmp_path)
    folder = make(False)
    put_json(folder / "data.json", lambda data: data.update(format=2))
    with pytest.raises(RequestError, match="its format is 2, not 1"):
        audit(folder)
    put_json(folder / "data.json", lambda data: (data.update(format=1), data.pop("users"), data.pop("leakage")))
    with pytest.raises(RequestError, match=r"its data.json lacks users, leakage"):
        audit(folder)
