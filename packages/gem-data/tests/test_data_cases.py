"""Inputs that broke other data layers, by their case ids."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import orc

from gem_core.batch import epoch_batches
from gem_core.spec import DataSchema, IdFeature, RequestError, Shard, Task
from gem_data.collate import MultiIds, Spans, Table
from gem_data.formats.orc import read_orc
from gem_data.formats.recbole import read_atomic
from gem_data.sources.criteo_orc import CATEGORIES, NUMBERS, load
from gem_data.sources.ml_100k import load as load_films


def tags_of(lengths: torch.Tensor, rows: int) -> Table:
    total = int(lengths.sum())
    return Table(
        schema=DataSchema(ids=(IdFeature(name="tags", cardinality=9, multi=True),), tasks=(Task(name="ctr"),)),
        rows=rows,
        labels={"ctr": (torch.arange(rows) % 2).float()},
        multi={"tags": MultiIds(values=torch.arange(total) % 9, spans=Spans.packed(total, "tags", lengths=lengths))},
    )


def write_clicks(
    folder: Path, part: int, rows: int, ids: pa.DataType = pa.int64(), numbers: pa.DataType = pa.float64(), **columns: list[Any]
) -> Path:
    """A part file of lists of at most one value; columns that are not given alternate between two values."""
    folder.mkdir(exist_ok=True)
    arrays = {}
    for name in ("label", *NUMBERS, *CATEGORIES):
        kind = pa.float64() if name == "label" else numbers if name in NUMBERS else ids
        values = columns.get(name, [r % 2 for r in range(rows)])
        cast = [str(v) if pa.types.is_string(kind) and v is not None else v for v in values]
        arrays[name] = pa.array([[] if v is None else [v] for v in cast], pa.list_(kind))
    path = folder / f"part-{part}.orc"
    orc.write_table(pa.table(arrays), str(path))
    return path


def test_case_B11_offsets_that_restart_for_each_feature_are_rejected() -> None:
    restarted = torch.cat([torch.arange(n + 1) for n in (40, 38, 41, 37)])
    with pytest.raises(RequestError, match="offsets fall from 40 to 0 at index 40"):
        Spans.packed(156, "clicks", offsets=restarted)
    with pytest.raises(RequestError, match="last offset 37 but 156 values"):
        Spans.packed(156, "clicks", offsets=torch.arange(38))


def test_case_B27_a_column_of_lengths_one_entry_short_is_rejected() -> None:
    with pytest.raises(RequestError, match=r"'tags \(begin\)'.*shape \[2\]"):
        tags_of(torch.tensor([2, 3]), rows=3)
    assert tags_of(torch.tensor([2, 3, 0]), rows=3).rows == 3


@pytest.mark.parametrize("rows", [17, 18, 23, 24])
def test_case_F04_leftover_rows_are_spread_over_the_ranks(rows: int) -> None:
    ranks, size = 3, 6
    read = [list(epoch_batches(rows, batch_size=size, shard=Shard(rank=r, world=ranks), seed=4)) for r in range(ranks)]
    counts = [sum(index.numel() for index, _ in steps) for steps in read]
    assert sum(counts) == rows
    assert max(counts) - min(counts) <= 1
    assert {len(steps) for steps in read} == {-(-rows // size)}


@pytest.mark.parametrize("title", ["Misérables, Les", "Nénette et Boni"])
def test_case_H06_latin_1_titles_are_read_when_named_and_never_guessed(tmp_path: Path, title: str) -> None:
    path = tmp_path / "old.item"
    path.write_bytes(f"item_id:token\ttitle:token\n1\t{title}\n".encode("latin-1"))
    assert read_atomic(path, encoding="latin-1").get_column("title").to_list() == [title]
    with pytest.raises(RequestError, match=r"byte 0xe9 at offset .* is not utf-8.*name its encoding"):
        read_atomic(path)
    path.write_text(f"item_id:token\ttitle:token\n1\t{title}\n", encoding="utf-8")
    assert read_atomic(path).get_column("title").to_list() == [title]


def test_case_H10_a_source_counts_unknown_ids_by_split_and_feature(tmp_path: Path) -> None:
    write_clicks(tmp_path, 0, 4, c3=[1, 1, 2, 2])
    write_clicks(tmp_path, 1, 4, c3=[1, 3, 4, 2])
    source = load(path=tmp_path, min_count=1)
    assert source.unknown_ids("train") == {}
    assert source.unknown_ids("test") == {"c3": 2}


def test_case_H13_the_order_of_rows_does_not_depend_on_the_number_of_readers(tmp_path: Path) -> None:
    write_clicks(tmp_path, 0, 20, c1=list(range(20)))
    write_clicks(tmp_path, 1, 4)
    source = load(path=tmp_path, min_count=1)

    def order(world: int) -> list[int]:
        parts = [source.batches("train", batch_size=6, seed=3, shard=Shard(rank=r, world=world)) for r in range(world)]
        return [int(v) for together in zip(*parts, strict=True) for batch in together for v in batch.ids["c1"].values]

    assert order(1) == order(2) == order(5)
    assert sorted(order(1)) == list(range(1, 21)) != order(1)


@pytest.mark.parametrize(
    ("ids", "numbers"),
    [(pa.int8(), pa.int32()), (pa.int16(), pa.int64()), (pa.int32(), pa.float32()), (pa.int64(), pa.float64()), (pa.string(), pa.int16())],
)
def test_case_H14_arrow_types_of_ids_and_numbers_give_the_same_rows(tmp_path: Path, ids: pa.DataType, numbers: pa.DataType) -> None:
    columns = {"c1": [1, 2, None, 2], "i1": [-1, 5, None, 0]}
    for part in (0, 1):
        write_clicks(tmp_path / "typed", part, 4, ids, numbers, **columns)
        write_clicks(tmp_path / "plain", part, 4, **columns)
    typed, plain = (load(path=tmp_path / name, min_count=1).table for name in ("typed", "plain"))
    assert torch.equal(typed.ids["c1"], plain.ids["c1"])
    assert torch.equal(typed.dense["i1"], plain.dense["i1"])
    assert typed.ids["c1"].tolist() == [2, 1, 0, 1] * 2  # the frequent one first


def test_case_H14_parts_of_different_integer_widths_join(tmp_path: Path) -> None:
    write_clicks(tmp_path, 0, 4, pa.int32())
    write_clicks(tmp_path, 1, 4, pa.int64(), c1=[2**40, 0, 1, 0])
    assert load(path=tmp_path, min_count=1).table.ids["c1"].tolist() == [1, 2, 1, 2, 0, 1, 2, 1]


def test_case_H15_many_stripes_and_an_extra_column_are_read_and_missing_ones_named(tmp_path: Path) -> None:
    path, rows = tmp_path / "wide.orc", 40_000
    values = [[] if r % 3 == 0 else [r] for r in range(rows)]
    table = pa.table({"a": pa.array(values, pa.list_(pa.int64())), "more": pa.array([[r] * 9 for r in range(rows)])})
    orc.write_table(table, str(path), stripe_size=65_536)
    assert orc.ORCFile(path).nstripes > 1
    assert read_orc(path, ("a",)).get_column("a").to_list() == [None if r % 3 == 0 else r for r in range(rows)]
    with pytest.raises(RequestError, match="it lacks the columns b, c"):
        read_orc(path, ("a", "b", "c"))


def test_case_H21_rows_with_blank_columns_all_train(tmp_path: Path) -> None:
    blank = [None] * 8
    write_clicks(tmp_path, 0, 8, c3=blank, c17=[None, 1] * 4, i1=blank, i10=[None, -1] * 4)
    write_clicks(tmp_path, 1, 4)
    source = load(path=tmp_path, min_count=1)
    assert source.ledger() == {"read": 12, "train": 8, "test": 4}
    batch = next(iter(source.batches("train", batch_size=8)))
    assert batch.rows == 8
    assert batch.ids["c3"].values.tolist() == [0] * 8
    assert batch.dense["i1"].tolist() == [[0.0, 1.0]] * 8


def test_case_H21_users_without_any_earlier_event_all_train(tmp_path: Path) -> None:
    (tmp_path / "ml-100k.user").write_text("user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n")
    (tmp_path / "ml-100k.item").write_text("item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n")
    lines = [f"u{k // 5}\tfilm{k % 3}\t{3 + k % 2}\t7" for k in range(20)]
    (tmp_path / "ml-100k.inter").write_text("\n".join(["user_id:token\titem_id:token\trating:float\ttimestamp:float", *lines]) + "\n")
    source = load_films(path=tmp_path)
    batch = next(iter(source.batches("train", batch_size=99)))
    assert source.ledger() == {"read": 20, "train": 16, "test": 4}
    assert batch.event_offsets["history"].max_length == 0
    assert all(torch.isfinite(values).all() for values in batch.dense.values())
