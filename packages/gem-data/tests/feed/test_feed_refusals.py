"""What the source ``files`` refuses, and how it names the place: before any row is read, or by file, unit and row."""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gem_core.spec import RequestError, Shard
from gem_data.feed import arrays
from gem_data.feed.units import Place


@pytest.fixture
def folder(kit: ModuleType, tmp_path: Path) -> Path:
    made: Path = kit.write_folder(tmp_path, {"train.parquet": kit.make_table(8), "test.parquet": kit.make_table(3)})
    return made


def refused(kit: ModuleType, folder: Path, table: pa.Table, match: str, ending: str = "parquet") -> None:
    kit.write_folder(folder, {f"train.{ending}": table, f"test.{ending}": kit.make_table(3)}, unit=4)
    with pytest.raises(RequestError, match=match):
        list(kit.open_source(folder, ending).batches("train", batch_size=5, seed=0))


def damaged_lists(offsets: list[int]) -> pa.Array:
    """Lists whose offsets were overwritten after Arrow had looked at them, as a damaged file's are."""
    memory = np.arange(len(offsets), dtype=np.int32)
    column = pa.ListArray.from_buffers(pa.list_(pa.int64()), len(offsets) - 1, [None, pa.py_buffer(memory)], children=[pa.array([1, 2, 3, 4, 5, 6])])
    memory[:] = offsets
    return column


@pytest.mark.parametrize(
    ("offsets", "so"),
    [
        ([0, 4, 2, 6, 6, 6], "offsets fall from 4 to 2 at f.arrow, record batch 0, row 1"),
        ([0, 1, 2, 6, 6, 7], "last offset 7 but 6 values; f.arrow, record batch 0, row 4 runs past"),
        ([-1, 1, 2, 3, 4, 6], "the first offset is -1 at f.arrow, record batch 0, row 0"),
    ],
)
def test_case_B10_and_B11_damaged_offsets_are_named_by_file_unit_and_row(offsets: list[int], so: str) -> None:
    with pytest.raises(RequestError, match=so):
        arrays.spans("m", damaged_lists(offsets), Place("f.arrow", "record batch", 0))


def test_case_B10_a_file_with_falling_offsets_gives_no_batch(kit: ModuleType, tmp_path: Path) -> None:
    schema = '[[multi_id]]\nname="m"\nencode="pass"\nrows=9\n[[task]]\nname="y"\nlabel="y"\n'
    (tmp_path / "schema.toml").write_text(schema)
    for name, offsets in (("train", [0, 4, 2, 6]), ("test", [0, 2, 4, 6])):
        content = pa.table({"m": damaged_lists(offsets), "y": [0, 1, 0]})
        with pa.OSFile(str(tmp_path / f"{name}.arrow"), "wb") as sink, pa.ipc.new_file(sink, content.schema) as writer:
            writer.write_batch(content.to_batches()[0])
    with pytest.raises(RequestError, match=r"offsets fall from 4 to 2 at train.arrow, record batch 0, row 1"):
        list(kit.open_source(tmp_path, "arrow").batches("train", batch_size=5))
    assert kit.origins(kit.open_source(tmp_path, "arrow").batches("test", batch_size=5)) == [0, 1, 2]


def test_case_B13_columns_of_a_group_with_other_lengths_are_refused(kit: ModuleType, tmp_path: Path) -> None:
    table = kit.make_table(10)
    actions = table["clicks.action"].to_pylist()
    actions[6] = [*actions[6], 1]
    so = rf"'clicks': train.parquet, row group 1, row 2 has {len(actions[6]) - 1} values of 'clicks.item' and {len(actions[6])} of 'clicks.action'"
    refused(kit, tmp_path, kit.change(table, "clicks.action", pa.array(actions, pa.list_(pa.int16()))), so)


@pytest.mark.parametrize(
    ("name", "value", "so"),
    [
        ("price", None, r"number 'price': it is nan at train.parquet, row group 1, row 1"),
        ("price", float("inf"), r"number 'price': it is inf at train.parquet, row group 1, row 1"),
        ("click", 2, r"label 'click': it is 2.0 at train.parquet, row group 1, row 1"),
        ("click", None, r"number 'click': it is nan at train.parquet, row group 1, row 1"),
        ("click_weight", -1.0, r"weight 'click_weight': it is -1.0 at train.parquet, row group 1, row 1"),
        ("timestamp", None, r"column 'timestamp': its value 1 is missing in train.parquet, row group 1"),
        ("picture", [1.0], r"embedding 'picture': train.parquet, row group 1, row 1 has 1 values"),
        ("picture", [1.0, None, 2.0], r"number 'picture': it is nan at train.parquet, row group 1, row 1"),
    ],
)
def test_bad_values_are_named_by_file_unit_and_row(kit: ModuleType, tmp_path: Path, name: str, value: Any, so: str) -> None:
    table = kit.make_table(10)
    values = table[name].to_pylist()
    values[5] = value
    refused(kit, tmp_path, kit.change(table, name, pa.array(values, table.schema.field(name).type)), so)


def test_negative_id_weights_and_missing_event_numbers_are_named(kit: ModuleType, tmp_path: Path) -> None:
    table = kit.make_table(10)
    for name, bad, so in (
        ("tag_weights", -1.0, "weight 'tag_weights': it is -1.0 at "),
        ("clicks.dwell", None, "number 'clicks.dwell': it is nan at "),
    ):
        values = table[name].to_pylist()
        row = next(i for i, entry in enumerate(values) if len(entry) > 1)
        values[row][1] = bad
        where = f"train.parquet, row group {row // 4}, row {row % 4}"
        refused(kit, tmp_path / name, kit.change(table, name, pa.array(values, table.schema.field(name).type)), so + where)


@pytest.mark.parametrize(
    ("name", "column", "so"),
    [
        ("price", pa.array(["x"] * 3), r"number 'price' of train.parquet: it holds string"),
        ("tags", pa.array([1, 2, 3]), r"column 'tags' of train.parquet: it holds int64. Give a list column"),
        ("timestamp", pa.array([0.5] * 3), r"column 'timestamp' of train.parquet: it holds double"),
        ("user_id", pa.array([0.5] * 3), r"column 'user_id' of train.parquet: it holds double"),
        ("buy_known", pa.array(["yes"] * 3), r"mask 'buy_known' of train.parquet: it holds string"),
    ],
)
def test_columns_of_wrong_types_are_refused(kit: ModuleType, tmp_path: Path, name: str, column: pa.Array, so: str) -> None:
    refused(kit, tmp_path, kit.change(kit.make_table(3), name, column), so)


def test_files_and_columns_are_checked_before_any_row_is_read(kit: ModuleType, tmp_path: Path) -> None:
    table = kit.make_table(6)
    kit.write_folder(tmp_path, {"train.parquet": table.drop_columns(["price", "click"]), "test.parquet": table})
    with pytest.raises(RequestError, match=r"train.parquet: it lacks price, click; it has buy, "):
        kit.open_source(tmp_path)
    with pytest.raises(RequestError, match=r"matches no file"):
        kit.open_source(tmp_path, "orc")
    with pytest.raises(RequestError, match=r"no data.json lists its files"):
        kit.open_source(tmp_path, train=())
    (tmp_path / "train.csv").write_text("a,b\n1,2\n")
    with pytest.raises(RequestError, match=r"Convert it first: gem data convert"):
        kit.open_source(tmp_path, train=("*.csv",))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(RequestError, match=r"broken.parquet: it cannot be opened"):
        kit.open_source(tmp_path, train=("broken.parquet",))


def test_a_damaged_row_group_is_named(kit: ModuleType, tmp_path: Path) -> None:
    table = kit.make_table(64)
    kit.write_folder(tmp_path, {"train.parquet": table, "test.parquet": table})
    content = bytearray((tmp_path / "train.parquet").read_bytes())
    content[200:2000] = bytes(1800)
    (tmp_path / "train.parquet").write_bytes(content)
    with pytest.raises(RequestError, match=r"train.parquet: row group 0 cannot be read"):
        list(kit.open_source(tmp_path).batches("train", batch_size=8))


@pytest.mark.parametrize(
    ("wrong", "so"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"shard": Shard(rank=2, world=2)}, "rank 2 of 2"),
        ({"epoch": -1}, "epoch is -1"),
        ({"start": -1}, "start is -1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_wrong_requests_are_refused_by_the_call(kit: ModuleType, folder: Path, wrong: dict[str, Any], so: str) -> None:
    with pytest.raises(RequestError, match=so):
        kit.open_source(folder).batches("train", **{"batch_size": 4, **wrong})
    with pytest.raises(RequestError, match="'valid'"):
        kit.open_source(folder).batches("valid", batch_size=4)


def test_options_that_contradict_each_other_are_refused(kit: ModuleType, folder: Path) -> None:
    for wrong in ({"balance": "cost"}, {"balance": "lpt", "batch_tokens": 9}, {"window": 0}, {"cost": (1.0, 0.0)}):
        with pytest.raises(ValueError, match="validation error"):
            kit.open_source(folder, **wrong)
    with pytest.raises(RequestError, match="cost model"):
        kit.open_source(folder, cost=(0.0, 0.0, 0.0))
