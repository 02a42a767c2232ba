"""A prepared folder appears whole or not at all; killed runs, second runs and too little memory."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from gem_core.spec import MachineError, RequestError
from gem_data.audit import audit
from gem_data.formats.files import Location
from gem_data.prepare import run
from gem_data.prepare import stage as stage_module
from gem_data.prepare.definition import Table
from gem_data.prepare.kept import made_from
from gem_data.prepare.run import make_engine

SLOW = """
import sys, time
from pathlib import Path
from gem_data.prepare import prepare

def report(step):
    print(step, flush=True)
    if step == sys.argv[2]:
        time.sleep(60)

prepare(Path(sys.argv[1]) / "definition.toml", Path(sys.argv[1]) / "out", report=report)
"""


def start_and_wait_for(step: str, folder: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", SLOW, str(folder), step], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for line in child.stdout:
        if line.strip() == step:
            return child
    raise AssertionError(f"the run ended before {step!r}")


@pytest.mark.parametrize("step", ["histories", "writing test", "checking for leakage"])
def test_case_H08_a_killed_run_is_started_again_cleanly(shop: Any, step: str) -> None:
    shop.write()
    child = start_and_wait_for(step, shop.folder)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert not (shop.folder / "out").exists()
    assert (shop.folder / ".out.partial").exists()
    left = shop.folder / ".out.partial" / "train"
    left.mkdir(exist_ok=True)
    (left / "part-99999.parquet").write_text("left behind")
    data = shop.run()
    assert data == audit(shop.folder / "out")
    assert sorted(path.name for path in (shop.folder / "out").iterdir()) == ["data.json", "schema.toml", "test", "train"]
    assert not (shop.folder / ".out.partial").exists()
    assert shop.run("fresh") == data


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tables that are read from their raw files."""
    names: list[str] = []
    plain = stage_module.scan

    def counted(paths: list[str], **options: Any) -> Any:
        names.extend(Path(path).stem for path in paths)
        return plain(paths, **options)

    monkeypatch.setattr(stage_module, "scan", counted)
    return names


def stopped_before_the_histories(shop: Any) -> None:
    shop.write()
    child = start_and_wait_for("histories", shop.folder)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()


def test_case_H08_raw_tables_that_were_read_whole_are_not_read_again(shop: Any, read: list[str]) -> None:
    stopped_before_the_histories(shop)
    data = shop.run()
    assert read == []
    fresh = shop.run("fresh")
    assert read
    assert fresh == data


@pytest.mark.parametrize("change", ["the file", "how it is read", "the place of its rows", "half written"])
def test_a_raw_table_that_changed_is_read_again(shop: Any, read: list[str], change: str) -> None:
    stopped_before_the_histories(shop)
    raw = shop.folder / ".out.partial" / "work" / "raw"
    if change == "the file":
        os.utime(shop.folder / "log.parquet", (1, 1))
    elif change == "how it is read":
        shop.definition["tables"]["log"]["scan"] = {"batch_rows": 2}
    elif change == "the place of its rows":
        shutil.copy(shop.folder / "log.parquet", shop.folder / "later.parquet")
        shop.definition["tables"]["log"]["path"] = "later.parquet"
    else:
        (raw / "log.json").unlink()
    assert (raw / "log.parquet").exists()
    shop.run()
    assert read in (["log"], ["later"])


def test_a_table_that_was_being_written_again_is_not_taken_for_the_one_before(shop: Any, read: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped while a changed definition is read, and started with the old one: what lies there is of neither."""
    stopped_before_the_histories(shop)
    shop.definition["tables"]["log"]["scan"] = {"batch_rows": 2}
    monkeypatch.setattr(stage_module, "keep", lambda *_: (_ for _ in ()).throw(MachineError("the power", "it is gone", "Start again.")))
    with pytest.raises(MachineError, match="the power"):
        shop.run()
    monkeypatch.undo()
    raw = shop.folder / ".out.partial" / "work" / "raw"
    assert (raw / "log.parquet").exists()
    assert not (raw / "log.json").exists()


def test_a_file_system_that_does_not_tell_of_changes_is_read_again() -> None:
    class System:
        def info(self, path: str) -> dict[str, Any]:
            return {"size": 3} | ({"ETag": "1"} if path == "told" else {})

    table = Table(path="any")
    told, untold = (Location(path, System(), path) for path in ("told", "untold"))
    assert made_from(table, ["a"], [told]) is not None
    assert made_from(table, ["a"], [told, untold]) is None


def test_two_runs_into_one_folder_do_not_mix(shop: Any) -> None:
    shop.write()
    child = start_and_wait_for("histories", shop.folder)
    try:
        with pytest.raises(RequestError, match="another process is preparing it"):
            shop.run()
        shop.run("another")
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    shop.run()


def test_an_existing_folder_is_not_touched(shop: Any) -> None:
    shop.run()
    before = {path: path.stat().st_mtime_ns for path in (shop.folder / "out").rglob("*")}
    with pytest.raises(RequestError, match=r"output folder .*out: it exists"):
        shop.run()
    assert {path: path.stat().st_mtime_ns for path in (shop.folder / "out").rglob("*")} == before


def test_the_folder_appears_by_one_rename_when_it_is_complete(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []

    def fail(source: Path, target: Path) -> None:
        seen.append({path.name for path in source.iterdir()})
        raise OSError("the disk is gone")

    monkeypatch.setattr(run.os, "rename", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        shop.run()
    assert seen == [{"train", "test", "schema.toml", "data.json"}]
    assert not (shop.folder / "out").exists()


def test_a_failed_run_leaves_nothing(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "write_schema", fail)
    names = {path.name for path in shop.folder.iterdir()}
    with pytest.raises(KeyboardInterrupt):
        shop.run()
    assert {path.name for path in shop.folder.iterdir()} - names <= {"definition.toml", "schema.toml"}


def test_the_engine_keeps_to_its_share_of_the_memory(tmp_path: Path) -> None:
    engine = make_engine("duckdb", tmp_path, 2**30)
    try:
        assert engine.rows("SELECT current_setting('memory_limit')")[0][0] == "512.0 MiB"
        assert str(tmp_path) in engine.rows("SELECT current_setting('temp_directory')")[0][0]
    finally:
        engine.close()
    assert list(tmp_path.iterdir()) == []


def test_rows_do_not_depend_on_the_memory_and_too_little_is_said(shop: Any, read: list[str]) -> None:
    """300,000 rows; with 64 MiB the engine works through disk, with 20 MiB it cannot work at all."""
    n = 300_000
    rng = np.random.default_rng(0)
    log = {"user": rng.integers(0, 20_000, n), "time": rng.integers(0, 10**6, n), "item": rng.integers(1, 9, n), "click": rng.integers(0, 2, n)}
    shop.table("log", log)
    shop.definition["split"] = {"kind": "time", "test_fraction": 0.1}
    assert shop.run("wide") == shop.run(memory=128 * 2**20)
    for part in ("train/part-00000.parquet", "test/part-00000.parquet"):
        assert pq.read_table(shop.folder / "out" / part).equals(pq.read_table(shop.folder / "wide" / part))
    with pytest.raises(MachineError, match=r"memory of 41,943,040 bytes: it does not suffice .*--memory"):
        shop.run("tight", memory=40 * 2**20)
    assert not (shop.folder / "tight").exists()
    assert sorted(path.name for path in (shop.folder / ".tight.partial").rglob("*")) == ["log.json", "log.parquet", "raw", "work"]
    read.clear()
    shop.run("tight")
    assert read == []


def test_an_unknown_engine_is_named(shop: Any) -> None:
    with pytest.raises(RequestError, match="engine 'polars': the engines are duckdb and spark"):
        shop.run(engine="polars")


def test_spark_that_is_not_installed_is_said(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    with pytest.raises(MachineError, match=r"engine 'spark': pyspark is not installed. Run: pip install 'gem-data\[spark\]'"):
        shop.run(engine="spark")
