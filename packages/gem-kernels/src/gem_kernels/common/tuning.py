"""Configurations that ``gem kernels tune`` found faster on this machine than the ones in the package, kept in files on disk. Imports no torch.

A file holds one op on one GPU under one release of triton, as in ``~/.cache/gem/kernels/NVIDIA-H200/triton-3.6.0/gdpa.json``; ``$GEM_KERNELS_HOME``
takes the place of the first folders. Its keys are the bucketed facts that a configuration depends on, so a file stays small whatever the shapes of a
run. Without a file the configurations of the package count, which were measured on an H200; results are right with any of them.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from gem_core.spec import KernelRequest, RequestError
from gem_kernels.common.direct_launch import stated

Config = TypeVar("Config")
Entry = dict[str, Any]
"""``config``: the fields of a configuration; ``ratio``: its time over that of the package's, the mean over ``shapes``."""

_tried: dict[tuple[str, str], Any] = {}
"""By op and direction, for the whole process: backward passes run in threads of torch's own."""


def home() -> Path:
    """Folder of the files."""
    return Path(os.environ.get("GEM_KERNELS_HOME") or Path.home() / ".cache" / "gem" / "kernels")


def path(op: str, gpu: str) -> Path:
    """The file of an op on a GPU, under the triton that is installed."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return home() / re.sub(r"[^\w.]+", "-", gpu) / f"triton-{triton}" / f"{op}.json"


def key_text(key: Any) -> str:
    """A bucketed key as the files write it."""
    return " ".join(f"{field.name}={getattr(key, field.name)}" for field in fields(key))


def read(op: str, gpu: str) -> dict[str, Entry]:
    """Entries by key; none where there is no file.

    Raises:
        RequestError: the file is not one that ``gem kernels tune`` wrote.
    """
    file = path(op, gpu)
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))["entries"]
        if all(all(type(value) in (int, type(None)) for value in entry["config"].values()) for entry in entries.values()):
            return dict(entries)
        so = "a configuration in it is not made of integers"
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        so = f"it cannot be read: {type(error).__name__}: {error}"
    raise RequestError(f"tuned configurations of {op} in {file}", so, "Delete the file, or run `gem kernels tune` again.")


def write(op: str, gpu: str, entries: dict[str, Entry]) -> Path:
    """Keep entries beside those of other keys; returns the file."""
    file = path(op, gpu)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        before = read(op, gpu)
    except RequestError:
        before = {}
    draft = file.with_suffix(".part")
    draft.write_text(json.dumps({"gpu": gpu, "op": op, "entries": {**before, **entries}}, indent=1), encoding="utf-8")
    draft.replace(file)
    forget()
    return file


def tuned(op: str, key: Any, packaged: Config) -> Config:
    """The configuration to launch with: one that is being tried, else one from disk, else the package's.

    Args:
        op: the op.
        key: a dataclass of bucketed facts, among them ``direction``.
        packaged: the package's configuration, a dataclass; the others are of its type.

    Raises:
        RequestError: the file on disk is not one that ``gem kernels tune`` wrote for this release.
    """
    kind: Any = type(packaged)
    found: Config | None = _tried.get((op, key.direction)) or _of_disk(op, key, kind)
    return packaged if found is None else found


def forget() -> None:
    """Look at the disk again."""
    _of_disk.cache_clear()


@cache
def _of_disk(op: str, key: Any, kind: Any) -> Any:
    import torch

    entry = read(op, torch.cuda.get_device_name()).get(key_text(key)) if torch.cuda.is_available() else None
    return None if entry is None else built(kind, entry, op)


def built(kind: type[Config], entry: Entry, op: str) -> Config:
    """The configuration of an entry."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if set(entry["config"]) != names:
        so = f"a configuration has {', '.join(sorted(entry['config']))}; this release wants {', '.join(sorted(names))}"
        raise RequestError(f"tuned configurations of {op}", so, f"Run `gem kernels tune --op {op}` again.")
    return kind(**entry["config"])


@contextmanager
def tried(op: str, direction: str, config: Any) -> Iterator[None]:
    """Launch ``direction`` of ``op`` with ``config`` inside the block."""
    _tried[op, direction] = config
    try:
        yield
    finally:
        del _tried[op, direction]


def entry_of(config: Any, ratio: float, shapes: list[str]) -> Entry:
    """What a file holds for one key."""
    return {"config": asdict(config), "ratio": round(ratio, 4), "shapes": shapes}


def where(request: KernelRequest, gpu: str) -> str:
    """Where the launch configurations of a kernel come from, for tables; and how it is launched, if that is asked for."""
    try:
        entries = read(request.op, gpu)
    except RequestError as error:
        return f"none: {error}"
    of = f"{len(entries)} tuned in {path(request.op, gpu)}, else the package's" if entries else "the package's, measured on an H200"
    return of + stated()
