"""Checkpoints on disk: where they are, whether they are whole, and reading them without a run.

``checkpoints/step-N/`` holds ``tensors-*.safetensors`` with ``tensors.json`` (every weight, table and optimiser state, by logical name),
``trainer.pt`` (random states, data cursor, counters and training metrics) and ``about.json`` (step, configuration, kernels, data facts, who wrote
it, and the SHA-256 of every other file).
"""

import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gem_core.spec import RequestError, RunFailed
from gem_core.train.checkpoint.pieces import PieceLoader, Pieces, pieces_of
from gem_core.train.checkpoint.store import DTYPES, INDEX, THREADS, Reader, file_sha256

FORMAT = 2
ABOUT, TRAINER = "about.json", "trainer.pt"


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A complete checkpoint; ``about`` is what ``about.json`` holds."""

    path: Path
    about: dict[str, Any]

    @cached_property
    def index(self) -> dict[str, dict[str, Any]]:
        """``{tensor name: {"dtype", "shape", "pieces"}}``."""
        return _read_json(self.path / INDEX)

    def names(self, prefix: str) -> list[str]:
        """What follows a prefix in the names of tensors, in alphabetical order."""
        return sorted(name.removeprefix(prefix) for name in self.index if name.startswith(prefix))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.index[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self.index[name]["dtype"]]

    def nbytes(self, name: str) -> int:
        return self.dtype(name).itemsize * math.prod(self.shape(name))

    def fill(self, pieces: dict[str, Pieces]) -> None:
        """Copy saved values into pieces of the same names and shapes, reading only the rows they hold. Not collective: each process plans alone."""
        planner, reader = PieceLoader(), Reader(self.path, self.index)
        metadata = reader.read_metadata()
        planner.set_up_planner(pieces, metadata)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        reader.read_data(planner.create_local_plan(), planner).wait()

    def tensor(self, name: str) -> Tensor:
        """One whole tensor on the CPU."""
        whole = torch.empty(self.shape(name), dtype=self.dtype(name))
        self.fill({name: pieces_of(whole)})
        return whole

    def trainer(self) -> dict[str, Any]:
        """The content of ``trainer.pt``. Only tensors and plain values are unpickled."""
        content: dict[str, Any] = torch.load(self.path / TRAINER, map_location="cpu", weights_only=True)
        return content

    def read(self) -> dict[str, Any]:
        """Everything, whole, on the CPU, for programs and small models.

        ``{"dense": {"model": {name: tensor}, "optimizer": {slot: {name: tensor}}, "average": {name: tensor}}, "tables": {table: {name: tensor}},
        "trainer": ...}``
        """
        out: dict[str, Any] = {"dense": {"model": {}, "optimizer": {}, "average": {}}, "tables": {}, "trainer": self.trainer()}
        for name in self.index:
            if name.startswith("tables/"):
                table, slot = name.removeprefix("tables/").rsplit("/", 1)
                out["tables"].setdefault(table, {})[slot] = self.tensor(name)
                continue
            _, part, rest = name.split("/", 2)
            held = out["dense"][part]
            if part == "optimizer":
                slot, rest = rest.split("/", 1)
                held = held.setdefault(slot, {})
            held[rest] = self.tensor(name)
        return out

    def verify(self, *, share: int = 0, shares: int = 1) -> None:
        """Compare every file with its SHA-256, or every ``shares``-th one.

        Raises:
            RunFailed: a file is missing or holds other bytes; it is named.
        """
        names = sorted(self.about["files"])[share::shares]
        with ThreadPoolExecutor(THREADS) as pool:
            wrong = [so for so in pool.map(self._wrong, names) if so]
        if wrong:
            raise RunFailed(f"checkpoint {self.path}", "; ".join(wrong), "Use an older checkpoint: remove this folder, or restore the file.")

    def _wrong(self, name: str) -> str | None:
        path, facts = self.path / name, self.about["files"][name]
        if not path.is_file():
            return f"file {name} is missing"
        size = path.stat().st_size
        if size != facts["bytes"]:
            return f"file {name} has {size} bytes and was written with {facts['bytes']}"
        return None if file_sha256(path) == facts["sha256"] else f"file {name} holds other bytes than were written (SHA-256 differs)"


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest step first.

    Among them one that a kill stopped from being replaced by another of the same step: it has been renamed, and is still whole.
    """
    steps: dict[int, Path] = {}
    for start in (REPLACED, "step-"):
        found = [(path.name.removeprefix(start), path) for path in folder.glob(f"{start}*")]
        steps |= {int(step): path for step, path in found if step.isdecimal()}
    return [steps[step] for step in sorted(steps)]


REPLACED = ".replaced-step-"


def find_checkpoint(path: Path) -> Saved:
    """A checkpoint folder, or the newest complete checkpoint of a run folder.

    Raises:
        RequestError: there is none, or its format is another one.
        RunFailed: its ``about.json`` cannot be read.
    """
    if not (path / ABOUT).is_file():
        found = checkpoints(path / "checkpoints")
        if not found:
            raise RequestError(f"the checkpoint of {path}", "there is no complete one", "Name a run folder or a checkpoint; or train anew.")
        path = found[-1]
    about = _read_json(path / ABOUT)
    version = about.get("format")
    if version != FORMAT:
        do = "Install a newer gem-core." if isinstance(version, int) and version > FORMAT else "Use the gem-core that wrote it, or train anew."
        raise RequestError(f"checkpoint {path}", f"its format is {version}, this version reads {FORMAT}", do)
    return Saved(path=path, about=about)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        so = f"file {path.name} cannot be read: {error}"
        raise RunFailed(f"checkpoint {path.parent}", so, "Use an older checkpoint: remove this folder, or restore the file.") from error
    return content


def differing(a: Sequence[str], b: Sequence[str]) -> list[str]:
    """Names that stand on one side only."""
    return sorted(set(a) ^ set(b))
