"""Where files lie, local or remote, and what their first bytes say about them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pyarrow as pa

from gem_core.spec import MachineError, RequestError

MAGIC = {b"PAR1": "parquet", b"ORC": "orc", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow", b"PK\x03\x04": "npz"}
COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
SUFFIXES = {
    "csv": "csv",
    "tsv": "csv",
    "tab": "csv",
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "json": "jsonl",
    "parquet": "parquet",
    "pq": "parquet",
    "orc": "orc",
    "arrow": "arrow",
    "ipc": "arrow",
    "feather": "arrow",
    "npz": "npz",
}
FORMATS = ("csv", "jsonl", "parquet", "orc", "arrow", "npz")


@dataclass(frozen=True)
class Location:
    """A file of some file system, by its address for people and its path on that file system."""

    address: str
    system: Any
    path: str

    @property
    def asked(self) -> str:
        return f"file {self.address}"

    def open(self) -> Any:
        """The file opened for reading bytes; RequestError where it cannot be."""
        try:
            return self.system.open(self.path, "rb")
        except OSError as error:
            raise RequestError(self.asked, f"it cannot be opened ({error})", "Check the path and its permissions.") from error

    def source(self) -> Any:
        """What pyarrow reads best: the path of a local file, else the opened file."""
        return self.path if "file" in _protocols(self.system) else self.open()

    def head(self, size: int = 8) -> bytes:
        with self.open() as file:
            return bytes(file.read(size))


def locate(paths: str | Path | Sequence[str | Path]) -> list[Location]:
    """The files that ``paths`` name: files, folders (their visible files) or patterns with ``*``, each group in the order of its numbers and names.

    Raises:
        RequestError: a path leads to no file, or a file is named twice.
        MachineError: the package for a remote file system is not installed.
    """
    found: list[Location] = []
    for given in [paths] if isinstance(paths, str | Path) else paths:
        found += _expand(str(given))
    if not found:
        raise RequestError("files to read", "no path was given", "Name a file, a folder or a pattern.")
    twice = {place.address for place in found if sum(other.address == place.address for other in found) > 1} if len(found) > 1 else set()
    if twice:
        raise RequestError("files to read", f"{min(twice)} is named twice", "Name each file once, so that no row is read twice.")
    return found


def _expand(given: str) -> list[Location]:
    asked = f"path {given}"
    try:
        system, path = fsspec.core.url_to_fs(given)
    except ImportError as error:
        raise MachineError(asked, f"its file system needs a package ({error})", "Install that package.") from error
    except ValueError as error:
        raise RequestError(asked, f"its file system is unknown ({error})", "Check the part before '://'.") from error
    if system.isfile(path):
        paths = [path]
    elif system.isdir(path):
        paths = [p for p in system.ls(path, detail=False) if system.isfile(p) and not p.rsplit("/", 1)[-1].startswith((".", "_"))]
    else:
        paths = [p for p in system.glob(path) if system.isfile(p)] if "*" in path else []
    if not paths:
        raise RequestError(asked, "it leads to no file", "Check the path.")
    remote = "file" not in _protocols(system)
    return [Location(system.unstrip_protocol(p) if remote else p, system, p) for p in sorted(paths, key=natural)]


def natural(path: str) -> list[tuple[int, str]]:
    """Sorts ``part-2`` before ``part-10``; ``part-01`` and ``part-1`` stand together and never count as one."""
    return [(int(piece) if piece.isdigit() else -1, piece) for piece in re.split(r"(\d+)", path)]


def _protocols(system: Any) -> tuple[str, ...]:
    protocol = system.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def binary_format(place: Location) -> str | None:
    """The format by the first bytes; None for text."""
    head = place.head()
    return next((name for magic, name in MAGIC.items() if head.startswith(magic)), None)


def format_of(place: Location) -> str:
    """The format by the first bytes, else by the ending, ``.gz`` and ``.zst`` left aside.

    Raises:
        RequestError: neither tells.
    """
    if known := binary_format(place):
        return known
    suffix = suffix_of(place)
    if suffix in SUFFIXES:
        return SUFFIXES[suffix]
    raise RequestError(
        place.asked, "its name does not tell its format", f"Name the format, one of {', '.join(FORMATS)}, or the separator of its lines."
    )


def suffix_of(place: Location) -> str:
    name = re.sub(r"\.(gz|gzip|zst|zstd)$", "", place.path.rsplit("/", 1)[-1].lower())
    return name.rsplit(".", 1)[-1] if "." in name else ""


def open_bytes(place: Location) -> Any:
    """The file's content, decompressed on the fly if its first bytes are those of gzip or Zstandard."""
    head, file = place.head(), place.open()
    for magic, codec in COMPRESSED.items():
        if head.startswith(magic):
            return pa.CompressedInputStream(pa.PythonFile(file, "r"), codec)
    return file
