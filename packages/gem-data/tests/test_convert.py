"""gem data convert: every row is written or counted, and nothing half-written stays."""

import gzip
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather, orc
from typer.testing import CliRunner

from gem_core.spec import GemError, MachineError, RequestError, RunFailed
from gem_data.cli import app
from gem_data.cli.convert import unescaped
from gem_data.convert import Converted, convert
from gem_data.formats import scan


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["convert", *map(str, arguments)])
    if isinstance(result.exception, GemError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_rows_in_are_rows_out_and_rows_dropped_by_reason(tmp_path: Path) -> None:
    rng = random.Random(0)
    lines = [f"{k},{k * 2}" if rng.random() < 0.8 else rng.choice(["", f"{k}", f"{k},1,2"]) for k in range(50_000)]
    (tmp_path / "in.csv").write_text("a,b\n" + "\n".join(lines) + "\n")
    done = convert(scan(tmp_path / "in.csv", bad_lines="drop", batch_rows=16_384), tmp_path / "out.parquet")
    good = [line for line in lines if line.count(",") == 1]
    blank = lines.count("")
    assert done == Converted(read=50_000, written=len(good), dropped={"ragged line": len(lines) - len(good) - blank, "blank line": blank})
    assert pq.read_table(tmp_path / "out.parquet")["a"].to_pylist() == [int(line.split(",")[0]) for line in good]
    assert pq.ParquetFile(tmp_path / "out.parquet").num_row_groups == -(-len(good) // 16_384)


def test_the_command_reads_parts_of_any_kind_and_prints_the_account(tmp_path: Path) -> None:
    (tmp_path / "day_0").write_bytes(gzip.compress("1::é::5^7\n2::b\n3::c::\n".encode("latin-1")))
    (tmp_path / "day_1").write_bytes("4::NULL::8\n\n".encode("latin-1"))
    out = tmp_path / "out.parquet"
    options = ["--names", "id,word,clicks", "--list", "clicks=^", "--type", "clicks=int64", "--missing", "NULL", "--bad-lines", "drop"]
    printed = run(tmp_path / "day_0", tmp_path / "day_1", out, "--separator", "::", "--encoding", "latin-1", *options)
    assert f"{out}: 5 rows in = 3 rows out + 1 dropped (ragged line) + 1 dropped (blank line)" in printed.replace("\n", " ").replace("  ", " ")
    assert "clicks: list<" in printed
    assert pq.read_table(out).to_pydict() == {"id": [1, 3, 4], "word": ["é", "c", None], "clicks": [[5, 7], None, [8]]}


def test_separators_may_be_written_with_a_backslash(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a\x01b\n1\x012\n")
    run(tmp_path / "in.txt", tmp_path / "out.parquet", "--separator", r"\x01", "--columns", "b")
    assert pq.read_table(tmp_path / "out.parquet").to_pydict() == {"b": [2]}
    assert [unescaped(text) for text in (r"\t", "::", "é", "\\\\", "\t")] == ["\t", "::", "é", "\\", "\t"]
    with pytest.raises(RequestError, match="it is no text"):
        unescaped("\\x0")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--type", "a"), "--type a: it is not COLUMN=VALUE"),
        (("--type", "=int64"), "--type =int64: it is not COLUMN=VALUE"),
        (("--list", "a=,", "--list", "a=;"), "--list a=;: the column is named twice"),
        (("--type", "a=whole"), "Arrow has no type of that name"),
        (("--bad-lines", "keep"), "the choices are error and drop"),
        (("--format", "xls"), "the formats are csv"),
    ],
)
def test_wrong_options_are_refused_and_write_nothing(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    (tmp_path / "in.csv").write_text("a,b\n1,2\n")
    with pytest.raises(RequestError) as caught:
        run(tmp_path / "in.csv", tmp_path / "out.parquet", *options)
    assert message in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]


def test_a_bad_row_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("a,b\n" + "1,2\n" * 20_000 + "1\n")
    with pytest.raises(RequestError, match="line 20002 has 1 fields"):
        convert(scan(tmp_path / "in.csv"), tmp_path / "out.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]


def test_an_existing_file_and_a_folder_that_is_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("a,b\n1,2\n")
    rows = scan(tmp_path / "in.csv")
    with pytest.raises(RequestError, match=r"in\.csv: it exists already"):
        convert(rows, tmp_path / "in.csv")
    with pytest.raises(RequestError, match="none is no folder"):
        convert(rows, tmp_path / "none" / "out.parquet")
    assert (tmp_path / "in.csv").read_text() == "a,b\n1,2\n"


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError("no space left")

    (tmp_path / "in.csv").write_text("a,b\n1,2\n")
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(MachineError, match="no space left"):
        convert(scan(tmp_path / "in.csv"), tmp_path / "out.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]


def test_case_H08_a_conversion_that_was_killed_is_done_again_and_its_leftovers_go(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("a,b\n" + "1,2\n" * 3_000_000)
    command = [
        sys.executable,
        "-c",
        "import sys; from gem_data.cli import app; app()",
        "convert",
        str(tmp_path / "in.csv"),
        str(tmp_path / "out.parquet"),
    ]
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while killed.poll() is None and not list(tmp_path.glob(".out.parquet.*")):
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    (left,) = tmp_path.glob(".out.parquet.*")
    assert not (tmp_path / "out.parquet").exists()
    os.utime(left, (time.time() - 7200,) * 2)
    done = convert(scan(tmp_path / "in.csv"), tmp_path / "out.parquet")
    assert done.read == done.written == 3_000_000
    assert {path.name for path in tmp_path.iterdir()} == {"in.csv", "out.parquet"}


def test_a_writer_that_loses_rows_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lossy(pq.ParquetWriter):
        def write_batch(self, batch: pa.RecordBatch) -> None:
            super().write_batch(batch.slice(1))

    monkeypatch.setattr(pq, "ParquetWriter", Lossy)
    (tmp_path / "in.csv").write_text("a,b\n1,2\n3,4\n")
    with pytest.raises(RunFailed, match="2 rows were read and 1 written"):
        convert(scan(tmp_path / "in.csv"), tmp_path / "out.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]


def test_no_rows_make_a_file_without_rows(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("a,b\n")
    assert "0 rows in = 0 rows out" in run(tmp_path / "in.csv", tmp_path / "out.parquet").replace("\n", " ")
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 0


@pytest.mark.parametrize("ending", ["csv", "jsonl", "orc", "feather", "parquet"])
def test_every_format_becomes_the_same_parquet(tmp_path: Path, ending: str) -> None:
    table = pa.table({"id": [7, 8, 9], "word": ["a", "é", None], "x": [0.5, None, -1.0]})
    path = tmp_path / f"in.{ending}"
    if ending == "csv":
        path.write_text("id,word,x\n7,a,0.5\n8,é,\n9,,-1.0\n")
    elif ending == "jsonl":
        path.write_text("".join(json.dumps({k: v for k, v in row.items() if v is not None}) + "\n" for row in table.to_pylist()))
    else:
        {"orc": lambda: orc.write_table(table, str(path)), "feather": lambda: feather.write_feather(table, str(path))}.get(
            ending, lambda: pq.write_table(table, path)
        )()
    assert "3 rows in = 3 rows out" in run(path, tmp_path / "out.parquet").replace("\n", " ")
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == table.to_pylist()


def test_reading_files_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("a,b\n1,2\n")
    code = """import sys
from typer.testing import CliRunner
from gem_data.cli import app
for words in (["convert", sys.argv[1], sys.argv[2]], ["inspect", sys.argv[2]]):
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, (result.output, result.exception)
assert "torch" not in sys.modules"""
    command = [sys.executable, "-c", code, str(tmp_path / "in.csv"), str(tmp_path / "out.parquet")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
