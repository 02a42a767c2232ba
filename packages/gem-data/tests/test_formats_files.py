"""Columnar formats, archives, folders and remote files."""

import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import feather, ipc, orc

from gem_core.spec import MachineError, RequestError
from gem_data.formats import Scan, scan
from gem_data.formats.files import locate, natural


def table_of(found: Scan) -> pa.Table:
    return pa.Table.from_batches(list(found.batches()), found.schema)


def sample(rows: int = 7) -> pa.Table:
    return pa.table(
        {
            "id": pa.array([2**63 + k for k in range(rows)], pa.uint64()),
            "city": pa.array([None if k % 3 == 1 else f"c{k % 2}" for k in range(rows)], pa.string()),
            "clicks.item": pa.array([None if k % 4 == 3 else list(range(k)) for k in range(rows)], pa.list_(pa.int64())),
            "x": pa.array([k / 2 for k in range(rows)], pa.float32()),
        }
    )


def write_stream(table: pa.Table, path: Path) -> None:
    with ipc.new_stream(str(path), table.schema) as out:
        out.write_table(table, max_chunksize=3)


WRITERS: dict[str, Callable[[pa.Table, Path], Any]] = {
    "a.parquet": lambda table, path: pq.write_table(table, path, row_group_size=3),
    "a.orc": lambda table, path: orc.write_table(table.set_column(0, "id", table["id"].cast(pa.string())), str(path)),
    "a.feather": lambda table, path: feather.write_feather(table, str(path), chunksize=3),
    "a.arrows": write_stream,
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("batch_rows", [1, 3, 100])
def test_every_columnar_format_gives_its_rows_in_batches_of_the_size_asked_for(tmp_path: Path, name: str, rows: int, batch_rows: int) -> None:
    table = sample(rows)
    WRITERS[name](table, tmp_path / name)
    types = {"id": "string"} if name == "a.orc" else None
    found = scan(tmp_path / name, batch_rows=batch_rows, types=types)
    expected = table.set_column(0, "id", table["id"].cast(pa.string())) if types else table
    assert table_of(found).to_pylist() == expected.to_pylist()
    assert [batch.num_rows for batch in found.batches()] == [min(batch_rows, rows - k) for k in range(0, rows, batch_rows)]
    chosen = table_of(scan(tmp_path / name, columns=["clicks.item", "city"]))
    assert chosen.to_pylist() == table.select(["clicks.item", "city"]).to_pylist()


def test_case_H15_row_groups_dictionaries_and_extra_columns_are_read_and_missing_ones_named(tmp_path: Path) -> None:
    table = sample(1000).append_column("extra", pa.array([[k] * 9 for k in range(1000)]))
    coded = table.set_column(1, "city", table["city"].dictionary_encode())
    nested = pa.ListArray.from_arrays(pa.array(range(1001), pa.int32()), table["city"].combine_chunks().dictionary_encode())
    coded = coded.append_column("cities", nested).replace_schema_metadata({"owner": "someone", "pandas": "{}"})
    pq.write_table(coded, tmp_path / "a.parquet", row_group_size=64)
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups > 10
    found = scan(tmp_path / "a.parquet", columns=["city", "cities", "id"])
    assert found.schema.field("city").type == pa.string()
    assert found.schema.field("cities").type.value_type == pa.string()
    cities = table["city"].to_pylist()
    assert table_of(found).to_pydict() == {"city": cities, "cities": [[c] for c in cities], "id": table["id"].to_pylist()}
    with pytest.raises(RequestError, match=r"a\.parquet: it lacks the columns 'citi', 'nope'; it has 'id', 'city', .*; did you mean 'cities'"):
        scan(tmp_path / "a.parquet", columns=["citi", "id", "nope"])


def test_parts_of_different_widths_take_the_first_ones_types_or_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array([1], pa.int64())}), tmp_path / "part-1.parquet")
    pq.write_table(pa.table({"a": pa.array([2], pa.int8()), "b": [1]}), tmp_path / "part-2.parquet")
    assert table_of(scan(tmp_path)).to_pydict() == {"a": [1, 2]}
    pq.write_table(pa.table({"a": pa.array([2**63], pa.uint64())}), tmp_path / "part-3.parquet")
    with pytest.raises(RequestError, match=r"part-3\.parquet: column 'a' holds uint64, which does not fit int64"):
        table_of(scan(tmp_path))
    assert table_of(scan(tmp_path, types={"a": "uint64"})).to_pydict() == {"a": [1, 2, 2**63]}


@pytest.mark.parametrize("name", [*WRITERS, "a.npz"])
def test_damaged_files_are_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "a.npz":
        np.savez(path, a=np.arange(1000))
    else:
        WRITERS[name](sample(1000), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RequestError, match=rf"{name}: (it cannot be read as|its rows cannot be read)"):
        table_of(scan(path))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 9), st.sampled_from(["<i4", ">i8", "<u8", "<f4", "|b1", "<U3", "<f2"]), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_arrays_of_an_archive_are_columns(
    tmp_path_factory: pytest.TempPathFactory, rows: int, kind: str, width: int, batch_rows: int, packed: bool
) -> None:
    rng = np.random.default_rng(rows)
    matrix = rng.integers(0, 100, (rows, width)).astype(kind)
    path = tmp_path_factory.mktemp("n") / "a.npz"
    (np.savez_compressed if packed else np.savez)(path, numbers=np.arange(rows), matrix=matrix)
    found = scan(path, batch_rows=batch_rows)
    assert table_of(found).to_pydict() == {"numbers": list(range(rows)), "matrix": matrix.tolist()}
    assert table_of(scan(path, columns=["matrix"])).column_names == ["matrix"]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.array([{}])}, "array 'a' holds object"),
        ({"a": np.zeros((2, 2, 2))}, "array 'a' has 3 dimensions"),
        ({"a": np.zeros((2, 0))}, "array 'a' has rows without values"),
        ({"a": np.array(5)}, "array 'a' has 0 dimensions"),
        ({"a": np.asfortranarray(np.zeros((3, 2)))}, "array 'a' lies in column order"),
        ({"a": np.zeros(3), "b": np.zeros(2)}, "array 'b' has 2 entries, 'a' has 3"),
        ({}, "it holds no array"),
    ],
)
def test_archives_that_are_no_table_are_refused(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(RequestError, match=message):
        scan(tmp_path / "a.npz")


def test_a_zip_of_something_else_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.csv", "a,b\n")
    with pytest.raises(RequestError, match=r"a\.zip: it cannot be read as NPZ"):
        scan(tmp_path / "a.zip")


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    for path in system.find("/"):
        system.rm(path)


def test_remote_files_are_read_through_fsspec(memory: Any, tmp_path: Path) -> None:
    for part in (2, 10, 1):
        memory.pipe(f"/logs/part-{part}.csv", f"a,b\n{part},x\n".encode())
    memory.pipe("/logs/_SUCCESS", b"")
    memory.pipe("/logs/.hidden", b"?")
    for address in ("memory://logs", "memory://logs/part-*.csv", [f"memory://logs/part-{k}.csv" for k in (1, 2, 10)]):
        assert table_of(scan(address))["a"].to_pylist() == [1, 2, 10]
    for name, write in WRITERS.items():
        write(sample(), tmp_path / name)
        memory.pipe(f"/one/{name}", (tmp_path / name).read_bytes())
        assert table_of(scan(f"memory://one/{name}")).equals(table_of(scan(tmp_path / name)))
    np.savez(tmp_path / "a.npz", a=np.arange(3))
    memory.pipe("/one/a.npz", (tmp_path / "a.npz").read_bytes())
    assert table_of(scan("memory://one/a.npz")).to_pydict() == {"a": [0, 1, 2]}


def test_paths_that_lead_nowhere_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for nowhere in (tmp_path / "none.csv", tmp_path, f"{tmp_path}/*.csv"):
        with pytest.raises(RequestError, match="it leads to no file"):
            scan(nowhere)
    with pytest.raises(RequestError, match="no path was given"):
        scan([])
    with pytest.raises(RequestError, match="its file system is unknown"):
        scan("nope://x")

    def lacks(address: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", lacks)
    with pytest.raises(MachineError, match="Install s3fs"):
        scan("s3://bucket/x")


def test_no_file_is_read_twice(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a\n1\n")
    with pytest.raises(RequestError, match=r"a\.csv is named twice"):
        scan([tmp_path / "a.csv", tmp_path])


def test_parts_come_in_the_order_of_their_numbers() -> None:
    assert sorted(["p-10", "p-9", "p-01", "p-1", "p", "q-2"], key=natural) == ["p", "p-01", "p-1", "p-9", "p-10", "q-2"]


def test_visible_files_of_a_folder_only(tmp_path: Path) -> None:
    for name in ("b.csv", "a.csv", ".c.csv", "_d.csv"):
        (tmp_path / name).write_text("a\n1\n")
    (tmp_path / "inner").mkdir()
    assert [Path(place.path).name for place in locate(tmp_path)] == ["a.csv", "b.csv"]


def test_a_file_whose_format_nothing_tells_must_be_named(tmp_path: Path) -> None:
    path = tmp_path / "u.data"
    path.write_text("1\t2\n")
    with pytest.raises(RequestError, match=r"u\.data: its name does not tell its format.*csv, jsonl, parquet, orc, arrow, npz"):
        scan(path)
    assert table_of(scan(path, separator="\t", header=["a", "b"])).to_pydict() == {"a": [1], "b": [2]}
    assert table_of(scan(path, format="csv", header=["a"])).to_pydict() == {"a": ["1\t2"]}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"format": "xls"}, "format 'xls': the formats are csv"),
        ({"columns": ["a", "a"]}, "columns: 'a' occurs twice"),
        ({"header": ["a", "a"]}, "header: 'a' occurs twice"),
        ({"header": False}, "header False: columns need names"),
        ({"header": "a,b"}, "columns need names"),
        ({"separator": ""}, "it cannot separate"),
        ({"separator": "\n"}, "it cannot separate"),
        ({"separator": '"'}, "it cannot separate"),
        ({"types": {"a": "integer"}}, "type 'integer' of column 'a': Arrow has no type of that name"),
        ({"types": {"z": "int64"}}, "it lacks the columns 'z'"),
        ({"bad_lines": "skip"}, "the choices are error and drop"),
        ({"batch_rows": 0}, "a batch holds at least one row"),
    ],
)
def test_wrong_arguments_are_refused_before_any_row_is_read(tmp_path: Path, how: dict[str, Any], message: str) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    with pytest.raises(RequestError, match=message):
        scan(tmp_path / "a.csv", **how)


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ({"separator": ","}, "separator"),
        ({"header": ["a"]}, "header"),
        ({"lists": {"a": "^"}}, "lists"),
        ({"quote": False}, "quote"),
        ({"missing": ["", "NULL"]}, "missing"),
    ],
)
def test_case_H08_an_argument_that_would_not_be_used_is_refused(tmp_path: Path, how: dict[str, Any], name: str) -> None:
    pq.write_table(pa.table({"a": ["1^2"]}), tmp_path / "a.parquet")
    with pytest.raises(RequestError, match=f"its format is parquet, and {name} is for CSV"):
        scan(tmp_path / "a.parquet", **how)


def test_types_of_columns_that_are_not_there_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1], "b": [2]}), tmp_path / "a.parquet")
    with pytest.raises(RequestError, match="it lacks the columns 'z'"):
        scan(tmp_path / "a.parquet", columns=["a"], types={"z": "int64"})
    assert table_of(scan(tmp_path / "a.parquet", columns=["a"], types={"b": "string"})).to_pydict() == {"a": [1]}


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.jsonl", "a.npz"])
def test_case_H16_a_file_is_never_in_memory_as_a_whole(tmp_path: Path, name: str) -> None:
    rows, path = 2_000_000 if name in ("a.npz", "a.parquet") else 1_500_000, tmp_path / name
    numbers = np.random.default_rng(0).integers(10**17, 10**18, rows)
    if name == "a.csv":
        path.write_text("a,b\n" + "".join(f"{v},{v}\n" for v in numbers.tolist()))
    elif name == "a.jsonl":
        path.write_text("".join(f'{{"a": {v}, "b": {v}}}\n' for v in numbers.tolist()))
    elif name == "a.npz":
        np.savez(path, a=numbers, b=numbers)
    else:
        pq.write_table(pa.table({"a": numbers, "b": numbers}), path, row_group_size=50_000)
    size = path.stat().st_size
    del numbers
    pool, before = pa.default_memory_pool(), pa.total_allocated_bytes()
    tracemalloc.start()
    count, most = 0, 0
    for batch in scan(path, batch_rows=4096).batches():
        count += batch.num_rows
        if count % 40_960 == 0:
            most = max(most, pool.bytes_allocated() - before)
    python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == rows
    assert most + python < MOST[name]
    assert size > 30_000_000


MOST = {"a.csv": 120_000_000, "a.parquet": 12_000_000, "a.jsonl": 40_000_000, "a.npz": 12_000_000}
"""Bytes of Arrow's pool and of Python together; text comes in blocks of 16 MiB."""
