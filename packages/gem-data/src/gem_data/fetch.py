"""Data sets that are taken out of a wheel on the package index: downloaded by pip, never imported, checked, cached."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gem_core.spec import MachineError, RequestError, RunFailed
from gem_data.partial import written_whole

ML_100K_TERMS = """MovieLens-100K was collected by the GroupLens research group at the University of Minnesota. In short, its terms are: use it for
research; do not use it for anything that earns revenue, and do not pass it on, unless GroupLens agrees; do not suggest that the university or
GroupLens endorses your work; it comes without any warranty. Cite it as: F. M. Harper and J. A. Konstan, "The MovieLens Datasets: History and
Context", ACM Transactions on Interactive Intelligent Systems 5(4), article 19, 2015. The binding text is the README of the data set at GroupLens."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """A data set inside a wheel.

    Args:
        name: the data set's name; also its folder in the cache.
        requirement: what pip is asked for.
        folder: where the files lie inside the wheel.
        sha256: ``{file: hexadecimal SHA-256}`` of each file to take out.
        terms: the terms of use in our words.
    """

    name: str
    requirement: str
    folder: str
    sha256: Mapping[str, str]
    terms: str


RELEASES: dict[str, Release] = {
    "ml-100k": Release(
        name="ml-100k",
        requirement="recbole==1.2.1",
        folder="recbole/dataset_example/ml-100k",
        sha256={
            "ml-100k.inter": "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
            "ml-100k.user": "4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972",
            "ml-100k.item": "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
        },
        terms=ML_100K_TERMS,
    )
}


def default_folder(name: str) -> Path:
    """Where ``fetch`` puts a data set: ``$GEM_DATA_HOME/NAME``, else ``~/.cache/gem/data/NAME``."""
    home = os.environ.get("GEM_DATA_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".cache" / "gem" / "data") / name


def find_release(name: str) -> Release:
    """The release of that name; RequestError lists those that exist."""
    if name not in RELEASES:
        raise RequestError(f"fetch {name!r}", f"only {', '.join(RELEASES)} can be fetched", "Name one of them; other data sets are read from a path.")
    return RELEASES[name]


def is_complete(release: Release, folder: Path) -> bool:
    """Whether every file lies in ``folder`` with the right checksum."""
    return all((folder / name).is_file() and _digest((folder / name).read_bytes()) == digest for name, digest in release.sha256.items())


def fetch(release: Release, folder: Path | None = None) -> bool:
    """Put the files of a release into ``folder`` (default: the cache); False when they were there already.

    Nothing is written before every checksum has been verified, and each file appears under its name only when it is whole, so a killed or a second
    concurrent fetch does no harm.

    Raises:
        RequestError: the folder is a file.
        MachineError: pip cannot get the wheel, or the folder cannot be written.
        RunFailed: the wheel lacks a file, or a checksum differs.
    """
    target = default_folder(release.name) if folder is None else folder
    if target.exists() and not target.is_dir():
        raise RequestError(f"fetch {release.name!r}", f"{target} is a file", "Give a folder: --dest or GEM_DATA_HOME.")
    if is_complete(release, target):
        return False
    with tempfile.TemporaryDirectory(prefix="gem-fetch-") as scratch:
        files = _take_out(release, _download(release, Path(scratch)))
    try:
        _write(target, files)
    except OSError as error:
        raise MachineError(
            f"fetch {release.name!r}", f"{target} cannot be written ({error})", "Give another folder: --dest or GEM_DATA_HOME."
        ) from error
    return True


def _write(target: Path, files: Mapping[str, bytes]) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        with written_whole(target / name) as partial:
            partial.write_bytes(content)


def _download(release: Release, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run([*command, "--dest", str(scratch), release.requirement], capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = next(
            (line for line in reversed(done.stderr.strip().splitlines()) if line.startswith("ERROR")), done.stderr.strip()[-300:] or "no wheel came"
        )
        raise MachineError(
            f"fetch {release.name!r}",
            f"pip cannot get {release.requirement} from the package index here ({reason})",
            "Connect to an index and try again, or train on generated data: --set data.source=synthetic --set data.options={}.",
        )
    return wheels[0]


def _take_out(release: Release, wheel: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        for name, digest in release.sha256.items():
            member = f"{release.folder}/{name}"
            if member not in held:
                raise RunFailed(f"fetch {release.name!r}", f"{wheel.name} does not hold {member}", "Check which index pip uses; nothing was written.")
            content = archive.read(member)
            if _digest(content) != digest:
                so = f"{member} has SHA-256 {_digest(content)}, expected {digest}"
                raise RunFailed(f"fetch {release.name!r}", so, "Check which index pip uses; nothing was written.")
            files[name] = content
    return files


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
