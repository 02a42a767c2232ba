"""The source ``files``: every column of every row against a plain loop, over formats, units, ranks, workers and policies; and what is refused."""

import threading
import time
import tracemalloc
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gem_core.spec import RequestError, ResumableSource, Shard
from gem_data.feed import arrays
from gem_data.feed.decode import _encode
from gem_data.feed.units import ParquetUnits, Place
from gem_data.ids import PassEncoder
from gem_data.schema import Id

ENDINGS = ["parquet", "orc", "arrow"]
QUICK = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def table(kit: ModuleType) -> pa.Table:
    made: pa.Table = kit.make_table(150)
    return made


@pytest.fixture(scope="module")
def folder(kit: ModuleType, table: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 training rows in two files of each format, 30 test rows in one."""
    files = {}
    for ending in ENDINGS:
        files |= {f"train-0.{ending}": table.slice(0, 83), f"train-1.{ending}": table.slice(83), f"test.{ending}": kit.make_table(30, seed=1)}
    made: Path = kit.write_folder(tmp_path_factory.mktemp("files"), files)
    return made


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_column_of_every_row_is_what_the_file_says(kit: ModuleType, folder: Path, table: pa.Table, ending: str) -> None:
    source = kit.open_source(folder, ending)
    assert isinstance(source, ResumableSource)
    assert source.rows("train") == 150
    assert len(source.units("train")) > 3
    seen = []
    for seed in (None, 3):
        batches = list(source.batches("train", batch_size=16, seed=seed))
        for batch in batches:
            kit.check(batch, table)
        assert [batch.rows for batch in batches] == [16] * 9 + [6]
        assert [batch.global_rows for batch in batches] == [16] * 9 + [6]
        seen.append(kit.origins(batches))
    assert seen[0] == list(range(150))
    assert seen[1] != seen[0]
    assert sorted(seen[1]) == seen[0]
    assert source.ledger() == {"read": 180, "train": 150, "test": 30}


@QUICK
@given(
    batch_size=st.sampled_from([1, 7, 16, 64, 1000]),
    world=st.sampled_from([1, 2, 3, 8]),
    window=st.sampled_from([1, 20, 64, 10_000]),
    seed=st.none() | st.integers(0, 5),
    epoch=st.integers(0, 2),
)
def test_case_F04_every_row_goes_to_one_rank_and_no_rank_has_more_batches(
    kit: ModuleType, folder: Path, batch_size: int, world: int, window: int, seed: int | None, epoch: int
) -> None:
    """150 rows divide by none of the worlds but 1, 2 and 3, and by few of the batches."""
    source = kit.open_source(folder, window=window, workers=0)
    ranks = [list(source.batches("train", batch_size=batch_size, shard=Shard(rank=r, world=world), seed=seed, epoch=epoch)) for r in range(world)]
    assert sorted(row for batches in ranks for row in kit.origins(batches)) == list(range(150))
    assert {len(batches) for batches in ranks} == {-(-150 // batch_size)}
    for step in zip(*ranks, strict=True):
        together = sum(batch.rows for batch in step)
        assert {batch.global_rows for batch in step} == {together}
        assert max(batch.rows for batch in step) - min(batch.rows for batch in step) <= 1


def test_case_H13_the_order_is_that_of_the_seed_whatever_the_number_of_workers(kit: ModuleType, folder: Path) -> None:
    def order(workers: int, seed: int, epoch: int) -> list[int]:
        rows: list[int] = kit.origins(kit.open_source(folder, workers=workers).batches("train", batch_size=9, seed=seed, epoch=epoch))
        return rows

    assert order(0, 1, 0) == order(1, 1, 0) == order(3, 1, 0)
    assert order(0, 1, 0) != order(0, 1, 1)
    assert order(0, 1, 0) != order(0, 2, 0)


def test_shuffling_mixes_units_within_a_window_and_files_over_an_epoch(kit: ModuleType, folder: Path) -> None:
    rows = kit.origins(kit.open_source(folder, window=64).batches("train", batch_size=8, seed=0))
    assert len({row // 16 for row in rows[:16]}) > 1
    steps = np.abs(np.diff(rows))
    assert np.median(steps) > 5


def test_reading_twice_gives_the_same_and_starting_later_skips(kit: ModuleType, folder: Path) -> None:
    source = kit.open_source(folder)
    whole = [kit.origins([b]) for b in source.batches("train", batch_size=16, seed=5)]
    assert [kit.origins([b]) for b in source.batches("train", batch_size=16, seed=5, start=4)] == whole[4:]
    assert list(source.batches("train", batch_size=16, seed=5, start=99)) == []


def test_a_reader_that_stops_early_leaves_no_thread(kit: ModuleType, folder: Path) -> None:
    batches = kit.open_source(folder, workers=2).batches("train", batch_size=4, seed=0)
    next(batches)
    assert any(t.name.startswith("gem-feed") for t in threading.enumerate())
    batches.close()
    assert not any(t.name.startswith("gem-feed") for t in threading.enumerate())


def test_two_units_are_read_at_once_and_come_in_their_order(kit: ModuleType, folder: Path, table: pa.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    reading: list[int] = []
    most, plain = [0], ParquetUnits.read

    def read(units: ParquetUnits, unit: int, columns: list[str]) -> pa.Table:
        reading.append(unit)
        time.sleep(0.05 if unit % 2 == 0 else 0.02)
        most[0] = max(most[0], len(reading))
        reading.remove(unit)
        return plain(units, unit, columns)

    monkeypatch.setattr(ParquetUnits, "read", read)
    source = kit.open_source(folder, window=1000, workers=1)
    batches = list(source.batches("train", batch_size=16))
    for batch in batches:
        kit.check(batch, table)
    assert kit.origins(batches) == list(range(150))
    assert most == [2]


def test_budgets_take_each_row_once_and_keep_to_their_target(kit: ModuleType, folder: Path, table: pa.Table) -> None:
    lengths = np.array(
        [min(len(a), 6) + min(len(b), 6) for a, b in zip(table["clicks.item"].to_pylist(), table["carts.item"].to_pylist(), strict=True)]
    )
    for balance in ("none", "cost"):
        source = kit.open_source(folder, batch_tokens=60, balance=balance)
        batches = list(source.batches("train", batch_size=16, seed=2))
        for batch in batches:
            kit.check(batch, table)
        assert sorted(kit.origins(batches)) == list(range(150))
        tokens = [int(lengths[batch.origin.numpy()].sum()) for batch in batches]
        assert max(tokens) <= 60 + 6
        assert min(tokens[:-1]) > 60 - 2 * 6
        assert len({batch.rows for batch in batches}) > 1
    assert max(tokens[:-1]) - min(tokens[:-1]) <= 2, "equal cost fills gaps"


@pytest.mark.parametrize("balance", ["lpt", "bbs"])
def test_balanced_batches_keep_their_sizes_and_rows(kit: ModuleType, folder: Path, table: pa.Table, balance: str) -> None:
    source = kit.open_source(folder, balance=balance, window=64)
    batches = list(source.batches("train", batch_size=16, seed=2))
    for batch in batches:
        kit.check(batch, table)
    assert [b.rows for b in batches] == [16] * 9 + [6]
    assert sorted(kit.origins(batches)) == list(range(150))
    plain = list(kit.open_source(folder, window=64).batches("train", batch_size=16, seed=2))
    spread = [np.std([b.ids["clicks.item"].values.numel() + b.ids["carts.item"].values.numel() for b in some[:8]]) for some in (batches, plain)]
    if balance == "lpt":
        assert spread[0] < spread[1] / 4


def test_balanced_batches_are_even_in_each_history_and_multi_valued_id(kit: ModuleType, tmp_path: Path) -> None:
    table = kit.make_table(2048)
    kit.write_folder(tmp_path, {"train.parquet": table, "test.parquet": table.slice(0, 8)})

    def spread(**options: Any) -> np.ndarray:
        batches = list(kit.open_source(tmp_path, window=2048, **options).batches("train", batch_size=256, seed=2))
        counts = np.array([[batch.ids[key].values.numel() for key in ("clicks.item", "carts.item", "tags")] for batch in batches])
        return counts.std(0) / counts.mean(0)

    plain, even = spread(), spread(balance="lpt")
    assert (plain > 0.02).all()
    assert (even < 0.002).all()


def test_case_H16_batches_of_rows_in_order_gather_from_the_files_memory(kit: ModuleType) -> None:
    """Offsets and values of int64 lists, whole and sliced, are the tensors: nothing is copied until a batch is gathered."""
    column = pa.array([[1, 2], [], [3], [4, 5, 6]], pa.large_list(pa.int64())).slice(1)
    begin, length, child = arrays.spans("x", column, Place("f", "row group", 0))
    assert begin.tolist() == [2, 2, 3]
    assert length.tolist() == [0, 1, 3]
    assert begin.ctypes.data == column.buffers()[1].address + 8
    assert arrays.integers("x", child, Place("f", "row group", 0)).ctypes.data == column.values.buffers()[1].address
    floats = pa.array([1.0, 2.0, 3.0], pa.float32()).slice(1)
    assert arrays.numbers("x", floats, Place("f", "row group", 0)).ctypes.data == floats.buffers()[1].address + 4


def most_held(kit: ModuleType, folder: Path, **options: Any) -> int:
    """The most memory of arrays in an epoch, in bytes: numpy's at any moment, Arrow's at any batch."""
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    source = kit.open_source(folder, **options)
    arrow = max(pa.total_allocated_bytes() - before for _ in source.batches("train", batch_size=50, seed=0))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return arrow + most


def test_case_H16_memory_is_bounded_by_the_window_not_by_the_file(kit: ModuleType, tmp_path: Path) -> None:
    """3,000 rows of 1,000 events are 24 MB; windows of 100 rows are 0.8 MB."""
    schema = '[[sequence]]\nname="h"\nmax_length=1000\n[[sequence.id]]\nname="i"\nencode="pass"\nrows=9\n[[task]]\nname="y"\nlabel="y"\n'
    lists = pa.ListArray.from_arrays(pa.array(np.arange(3001) * 1000, pa.int32()), pa.array(np.arange(3_000_000) % 9))
    table = pa.table({"h.i": lists, "y": np.arange(3000) % 2})
    kit.write_folder(tmp_path, {"train.parquet": table, "test.parquet": table.slice(0, 1)}, unit=100, schema=schema)
    window = 100 * 8000
    for options in ({"workers": 0}, {"workers": 2}, {"workers": 1, "batch_tokens": 50_000}):
        assert most_held(kit, tmp_path, window=100, **options) < 8 * window
    assert most_held(kit, tmp_path, window=3000, workers=0) > 30 * window, "the planted fault: a window as large as the file"


def test_ids_that_are_rows_are_not_copied_and_others_go_through_the_encoder() -> None:
    feature, encoder, place = Id(name="i", encode="pass", rows=9), PassEncoder("i", 9), Place("f.orc", "stripe", 3)
    column = pa.array([1, 8, 0], pa.int64())
    assert _encode(encoder, feature, column, place).ctypes.data == column.buffers()[1].address
    assert encoder.unknown == 0
    for other in (pa.array([1, 9, -1]), pa.array([1, None, None]), pa.array([1, 0, 0], pa.int32())):
        assert _encode(encoder, feature, other, place).tolist() == [1, 0, 0]
    assert (encoder.unknown, encoder.missing) == (2, 2)
    with pytest.raises(RequestError, match=r"2 values are not rows of its table, 0 .. 8; the first is 9 \(f.orc, stripe 3\)"):
        _encode(PassEncoder("i", 9, "error"), feature, pa.array([1, 9, -1]), place)


def test_packed_ids_are_one_tensor_that_torchrec_takes_as_it_is(kit: ModuleType, folder: Path) -> None:
    batch = next(kit.open_source(folder).batches("train", batch_size=16, seed=1))
    ids = batch.ids
    assert ids.starts[-1] == ids.values.numel()
    for key in ids.keys:
        assert ids[key].values.untyped_storage().data_ptr() == ids.values.untyped_storage().data_ptr()
    ids.check_ids({"item": ("item", 50), "clicks.item": ("item", 50), "tags": ("tags", 20)})
    torchrec = pytest.importorskip("torchrec", reason="torchrec is not installed")
    jagged = torchrec.KeyedJaggedTensor(keys=list(ids.keys), values=ids.values, offsets=ids.offsets)
    assert jagged.values().data_ptr() == ids.values.data_ptr()
    assert torch.equal(jagged["clicks.item"].values(), ids["clicks.item"].values)


def test_missing_ids_become_row_0_and_null_lists_are_empty(kit: ModuleType, tmp_path: Path) -> None:
    table = kit.make_table(20)
    items = pa.array([None if i == 3 else i for i in range(20)], pa.int32())
    carts = pa.array([None if i % 2 else [1, 2] for i in range(20)], pa.list_(pa.int64()))
    table = table.set_column(table.column_names.index("item"), "item", items).set_column(table.column_names.index("carts.item"), "carts.item", carts)
    source = kit.open_source(kit.write_folder(tmp_path, {"train.parquet": table, "test.parquet": table}))
    (batch,) = source.batches("train", batch_size=20)
    assert batch.ids.ids("item").tolist() == [0 if i == 3 else i for i in range(20)]
    assert batch.ids["carts.item"].lengths().tolist() == [2, 0] * 10


def test_columns_whose_nulls_hide_values_are_still_aligned(kit: ModuleType, tmp_path: Path) -> None:
    """Arrow keeps values under a null list: the second column has some that the first has not."""
    table = kit.make_table(3)
    hidden = pa.ListArray.from_arrays(pa.array([0, 2, 4, 5], pa.int32()), pa.array([1, 2, 3, 4, 1], pa.int16()), mask=pa.array([False, True, False]))
    others = {"clicks.item": [[7, 8], [], [9]], "clicks.dwell": [[0.5, 0.25], [], [1.0]], "clicks.time": [[1, 2], None, [3]], "clicks.action": hidden}
    for name, column in others.items():
        at = table.column_names.index(name)
        table = table.set_column(at, name, column if name == "clicks.action" else pa.array(column, table.schema.field(name).type))
    kit.write_folder(tmp_path, {"train.arrow": table, "test.arrow": table})
    (batch,) = kit.open_source(tmp_path, "arrow").batches("train", batch_size=3)
    assert batch.ids["clicks.action"].values.tolist() == [1, 2, 1]
    assert batch.ids["clicks.item"].values.tolist() == [7, 8, 9]
    assert batch.ids["clicks.action"].offsets.tolist() == [0, 2, 2, 3]


def test_ids_that_became_row_0_are_counted(kit: ModuleType, tmp_path: Path) -> None:
    table = kit.make_table(20)
    items = pa.array([None, 50, -7, *range(17)], pa.int32())
    table = table.set_column(table.column_names.index("item"), "item", items)
    source = kit.open_source(kit.write_folder(tmp_path, {"train.parquet": table, "test.parquet": kit.make_table(5)}, unit=20))
    assert source.unknown_ids("train") == {}
    for _ in range(2):
        batches = list(source.batches("train", batch_size=20))
        assert batches[0].ids.ids("item")[:3].tolist() == [0, 0, 0]
        assert source.unknown_ids("train") == {"item": 3}, "of one pass"
    assert source.unknown_ids("test") == {}


def test_values_under_null_lists_beside_a_column_without_any(kit: ModuleType, tmp_path: Path) -> None:
    table = kit.make_table(3, longest=0)
    hidden = pa.ListArray.from_arrays(pa.array([0, 0, 2, 2], pa.int32()), pa.array([1, 2]), mask=pa.array([False, True, False]))
    table = kit.change(table, "clicks.item", hidden)
    kit.write_folder(tmp_path, {"train.arrow": table, "test.arrow": table})
    (batch,) = kit.open_source(tmp_path, "arrow").batches("train", batch_size=3)
    assert batch.ids["clicks.item"].lengths().tolist() == [0, 0, 0]


def test_a_feature_may_be_called_weights(kit: ModuleType, tmp_path: Path) -> None:
    schema = '[[multi_id]]\nname="weights"\nencode="pass"\nrows=9\nweights="w"\n[[task]]\nname="y"\nlabel="y"\n'
    table = pa.table({"weights": pa.array([[1, 2], [3]]), "w": pa.array([[0.5, 0.25], [1.0]], pa.list_(pa.float32())), "y": [0, 1]})
    kit.write_folder(tmp_path, {"train.parquet": table, "test.parquet": table}, schema=schema)
    (batch,) = kit.open_source(tmp_path).batches("train", batch_size=2)
    assert batch.ids.ids("weights").tolist() == [1, 2, 3]
    assert batch.id_weights["weights"].tolist() == [0.5, 0.25, 1.0]


@pytest.mark.parametrize(("policy", "kept"), [("newest", [3, 4, 5]), ("oldest", [1, 2, 3]), ("error", None)])
def test_case_B21_histories_are_cut_by_the_named_policy_or_refused(kit: ModuleType, tmp_path: Path, policy: str, kept: list[int] | None) -> None:
    schema = f'[[sequence]]\nname="h"\nmax_length=3\ntruncate="{policy}"\n[[sequence.id]]\nname="i"\nencode="pass"\nrows=9\n'
    schema += '[[task]]\nname="y"\nlabel="y"\n'
    table = pa.table({"h.i": pa.array([[1], [1, 2, 3, 4, 5], []], pa.list_(pa.int64())), "y": [0, 1, 0]})
    kit.write_folder(tmp_path, {"train.parquet": table, "test.parquet": table}, schema=schema)
    batches = kit.open_source(tmp_path).batches("train", batch_size=3)
    if kept is None:
        with pytest.raises(RequestError, match=r"'h': train.parquet, row group 0, row 1 has 5 events, max_length is 3"):
            next(batches)
    else:
        assert next(batches).ids["h.i"].values.tolist() == [1, *kept]


@pytest.mark.parametrize("only", ["sequences", "rows"])
def test_case_B22_a_schema_without_sequences_and_one_without_other_features(kit: ModuleType, tmp_path: Path, only: str) -> None:
    task = '[[task]]\nname="y"\nlabel="y"\n'
    sequence = '[[sequence]]\nname="h"\nmax_length=3\n[[sequence.id]]\nname="i"\nencode="pass"\nrows=9\n'
    schema = {"sequences": sequence, "rows": '[[id]]\nname="i"\nencode="pass"\nrows=9\n'}[only] + task
    table = pa.table({"h.i": pa.array([[1], [2, 3]], pa.list_(pa.int64())), "i": [1, 2], "y": [0, 1]})
    kit.write_folder(tmp_path, {"train.parquet": table, "test.parquet": table}, schema=schema)
    (batch,) = kit.open_source(tmp_path).batches("train", batch_size=2)
    assert batch.ids.values.tolist() == ([1, 2, 3] if only == "sequences" else [1, 2])
    assert batch.time is None


def test_case_B25_all_empty_lists(kit: ModuleType, tmp_path: Path) -> None:
    table = kit.make_table(4, longest=0)
    kit.write_folder(tmp_path, {"train.parquet": table, "test.parquet": table})
    (batch,) = kit.open_source(tmp_path).batches("train", batch_size=4, seed=0)
    kit.check(batch, table)
    assert batch.ids["clicks.item"].values.numel() == 0


def test_timestamps_and_string_users(kit: ModuleType, tmp_path: Path) -> None:
    table = kit.make_table(5)
    times = pa.array([1_500, 2_999, -1, 0, 86_400_000], pa.int64()).cast(pa.timestamp("ms"))
    table = table.set_column(1, "timestamp", times).set_column(0, "user_id", pa.array(["a", "b", "a", "7", "b"]).dictionary_encode())
    kit.write_folder(tmp_path, {"train.arrow": table, "test.arrow": table})
    (batch,) = kit.open_source(tmp_path, "arrow").batches("train", batch_size=5)
    assert batch.time.tolist() == [1, 2, -1, 0, 86_400]
    a, b, again, seven, other = batch.groups.tolist()
    assert a == again
    assert b == other
    assert len({a, b, seven}) == 3
