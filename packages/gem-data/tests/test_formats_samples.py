"""Real samples of public data sets, read by us and by Python's csv module."""

import csv
import io
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem_data.convert import convert
from gem_data.formats import scan

RAW = Path(os.environ.get("GEM_TEST_DATA", "/nonexistent")) / "raw"

pytestmark = pytest.mark.skipif(not RAW.is_dir(), reason="GEM_TEST_DATA names no folder that holds raw")


@pytest.mark.parametrize(
    ("name", "separator", "header"),
    [
        ("ali-ccp.csv", ",", True),
        ("aliexpress-click-conversion.csv", ",", True),
        ("avazu.csv", ",", True),
        ("byterec.txt", "\t", False),
        ("criteo-with-header.csv", ",", True),
        ("taobao-ads.csv", ",", True),
    ],
)
def test_case_H21_every_row_and_every_field_is_there(tmp_path: Path, name: str, separator: str, header: bool) -> None:
    lines = list(csv.reader(io.StringIO((RAW / name).read_text()), delimiter=separator))
    names = lines.pop(0) if header else [f"c{k}" for k in range(len(lines[0]))]
    given = None if header else names
    texts = scan(RAW / name, separator=separator, header=given or True, types=dict.fromkeys(names, "string"), missing=())
    table = pa.Table.from_batches(list(texts.batches()), texts.schema)
    assert [list(row.values()) for row in table.to_pylist()] == lines
    done = convert(scan(RAW / name, separator=separator, header=given or True), tmp_path / "x.parquet")
    assert (done.read, done.written, done.dropped) == (len(lines), len(lines), {})
    typed = pq.read_table(tmp_path / "x.parquet")
    for column in typed.column_names:
        for value, text in zip(typed[column].to_pylist(), (line[names.index(column)] for line in lines), strict=True):
            assert value is None if text == "" else str(value) == text or float(value) == float(text)


def test_case_H18_the_twenty_digit_id_of_the_sample_keeps_its_digits() -> None:
    batch = next(scan(RAW / "avazu.csv", columns=["id"]).batches())
    assert 10000169349117863715 in batch["id"].to_pylist()


def test_case_H15_the_parquet_sample_equals_the_text_sample_in_what_both_hold() -> None:
    packed = scan(RAW / "taobao-ads.parquet")
    table = pa.Table.from_batches(list(packed.batches()), packed.schema)
    assert table.num_rows == pq.read_metadata(RAW / "taobao-ads.parquet").num_rows
    assert table.equals(pq.read_table(RAW / "taobao-ads.parquet"))
