"""Checkpoints: complete or absent, independent of how many ranks wrote them, and never holding a value that is not finite.

``checkpoints/step-N/`` holds ``dense.pt`` (weights, optimiser, averaged weights, all by parameter name), ``tables.pt`` (whole embedding tables with
their optimiser state), ``trainer.pt`` (random states, data cursor, training metrics) and ``about.json`` (step, configuration, kernels, data facts).
The folder is written under another name, flushed to disk and renamed.
"""

import json
import logging
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from gem_core.config.load import flat
from gem_core.config.schema import RunConfig
from gem_core.spec import Embeddings, RequestError, RunFailed, Source
from gem_core.train.world import World

log = logging.getLogger("gem_core.train")

FORMAT = 1
FIXED = (
    "run.seed",
    "data.source",
    "data.batch_size",
    "model",
    "embedding.optimizer",
    "precision",
    "train.shuffle",
    "train.ema_decay",
)
"""Configuration that a resumed run cannot change: the data cursor, the weights or their state would mean something else."""

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_FILES = ("dense", "tables", "trainer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A complete checkpoint on disk; ``about`` is what ``about.json`` holds."""

    path: Path
    about: dict[str, Any]

    def read(self) -> dict[str, dict[str, Any]]:
        """The content of ``dense``, ``tables`` and ``trainer``, on the CPU. Only tensors and plain values are unpickled."""
        return {name: torch.load(self.path / f"{name}.pt", map_location="cpu", weights_only=True) for name in _FILES}


def save_checkpoint(folder: Path, step: int, state: Mapping[str, Mapping[str, Any]], about: Mapping[str, Any], *, keep: int) -> Path:
    """Write ``folder/step-N`` and remove all but the newest ``keep``. For the first rank.

    Args:
        state: the content of ``dense``, ``tables`` and ``trainer``: nested mappings of tensors and plain values.
        about: plain values for ``about.json``.

    Raises:
        RunFailed: a tensor holds a value that is not finite; nothing is written and older checkpoints stay.
    """
    refuse_non_finite(state, step)
    folder.mkdir(parents=True, exist_ok=True)
    remove_unfinished(folder)
    target, draft = folder / f"step-{step}", folder / f".writing-step-{step}"
    draft.mkdir()
    for name in _FILES:
        with (draft / f"{name}.pt").open("wb") as file:
            torch.save(dict(state[name]), file)
            _flush(file.fileno())
    with (draft / "about.json").open("w", encoding="utf-8") as text:
        json.dump({"format": FORMAT, "step": step, **about}, text, indent=1)
        text.flush()
        _flush(text.fileno())
    _flush_folder(draft)
    if target.exists():  # written before this run went back to an older one
        _remove(target)
    draft.rename(target)
    _flush_folder(folder)
    for old in checkpoints(folder)[:-keep]:
        _remove(old)
    return target


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest step first."""
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def find_checkpoint(run: Path) -> Saved:
    """The newest complete checkpoint of a run folder.

    Raises:
        RequestError: there is none, or it was written in a newer format.
    """
    found = checkpoints(run / "checkpoints")
    if not found:
        raise RequestError(f"the checkpoint of {run}", "there is no complete one", "Train anew, without --resume.")
    about = json.loads((found[-1] / "about.json").read_text(encoding="utf-8"))
    if about["format"] > FORMAT:
        so = f"its format is {about['format']}, this version reads up to {FORMAT}"
        raise RequestError(f"checkpoint {found[-1]}", so, "Install a newer gem-core.")
    return Saved(path=found[-1], about=about)


def check_same_run(about: Mapping[str, Any], config: RunConfig) -> None:
    """Whether a checkpoint can go on under a configuration. What else differs is allowed, and told in the log.

    Raises:
        RequestError: a value of ``FIXED`` differs.
    """
    before, now = (dict(flat(c)) for c in (RunConfig.model_validate(about["config"]), config))
    for path in sorted(set(before) | set(now)):
        old, new = before.get(path), now.get(path)
        if old == new or path == "run.out":
            continue
        if any(path == fixed or path.startswith(f"{fixed}.") for fixed in FIXED):
            raise RequestError(f"resuming with {path} = {new!r}", f"the run was started with {old!r}", "Leave it as it was, or start a new run.")
        log.warning("resuming with %s = %r; the run was started with %r", path, new, old)


def data_facts(source: Source) -> dict[str, Any]:
    """What must be the same when a run goes on: rows and columns."""
    return {"rows": {split: source.rows(split) for split in ("train", "test")}, "schema": repr(source.schema())}


def check_same_data(about: Mapping[str, Any], source: Source) -> None:
    """Raise RequestError unless the source gives the rows and columns that the run was started with: a data cursor means nothing else."""
    facts = data_facts(source)
    for name, value in facts.items():
        if about["data"][name] != value:
            so = f"the data source gives {name} {value}, the run was started with {about['data'][name]}"
            raise RequestError("resuming", so, "Give the same data, or start a new run.")


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process left half written or half removed."""
    for leftover in [*folder.glob(".writing-*"), *folder.glob(".removing-*")]:
        shutil.rmtree(leftover)


def dense_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Weights and optimiser state by parameter name, whole tensors on the CPU whatever the layout. Collective."""
    return {"model": get_model_state_dict(model, options=_WHOLE), "optimizer": get_optimizer_state_dict(model, optimizer, options=_WHOLE)}


def restore_dense(model: nn.Module, saved: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None) -> None:
    """Load weights, and the optimiser's state when one is given.

    Raises:
        RequestError: names or shapes differ from the model's.
    """
    own, theirs = model.state_dict(), saved["model"]
    differ = sorted(set(own) ^ set(theirs)) or [name for name in own if own[name].shape != theirs[name].shape]
    if differ:
        so = f"{len(differ)} weights have other names or shapes, the first is {differ[0]!r}"
        raise RequestError("the dense weights of the checkpoint", so, "Use the model and options the run was started with.")
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=_WHOLE)
    set_model_state_dict(model, theirs, options=_WHOLE)


def restore_tables(embeddings: Embeddings, tables: dict[str, Any]) -> None:
    """Load whole tables into any engine. Collective when sharded.

    Raises:
        RequestError: the engine has other tables.
    """
    differ = sorted(set(embeddings.table_names()) ^ set(tables))
    if differ:
        so = f"they differ in {differ[0]!r}"
        raise RequestError("the tables of the checkpoint", so, "Use the data and model options the run was started with.")
    embeddings.import_tables(tables)


def seed_random_state(seed: int, world: World) -> None:
    """Seed torch, numpy and Python, each rank in its own way: dropout differs from rank to rank. Weights and tables have seeds of their own."""
    own = (seed * 1_000_003 + world.rank) % 2**32
    torch.manual_seed(own)
    np.random.seed(own)
    random.seed(own)


def random_state(world: World) -> list[dict[str, Any]]:
    """The random states of all ranks. Collective."""
    _kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    own = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(world.device) if world.device.type == "cuda" else torch.zeros(0, dtype=torch.uint8),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy_tail": torch.tensor([float(position), float(has_gauss), float(gauss)], dtype=torch.float64),
        "python": torch.tensor(random.getstate()[1], dtype=torch.int64),
        "python_tail": random.getstate()[2],
    }
    return world.gather_objects(own)


def restore_random_state(states: list[dict[str, Any]], world: World) -> None:
    """Continue this rank's random states; with more ranks than were saved, the new ones keep the states they have from their seed."""
    if world.rank >= len(states):
        return
    own = states[world.rank]
    torch.set_rng_state(own["torch"])
    if world.device.type == "cuda" and own["cuda"].numel():
        torch.cuda.set_rng_state(own["cuda"], world.device)
    position, has_gauss, gauss = own["numpy_tail"].tolist()
    np.random.set_state(("MT19937", own["numpy"].numpy().astype(np.uint32), int(position), int(has_gauss), gauss))
    random.setstate((3, tuple(own["python"].tolist()), own["python_tail"]))


def refuse_non_finite(state: Mapping[str, Any], step: int) -> None:
    """Raise RunFailed naming the first tensor of ``state`` that holds a value that is not finite."""
    for name, tensor in _tensors(state, ""):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            so = f"{name} holds a value that is not finite"
            raise RunFailed(f"the checkpoint of step {step}", so, "Nothing was written; the checkpoint before it is kept.")


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{name}/{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{name}/{index}")


def _remove(folder: Path) -> None:
    """Remove a checkpoint so that a kill on the way leaves no half one under its name."""
    doomed = folder.with_name(f".removing-{folder.name}")
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _flush(descriptor: int) -> None:
    os.fsync(descriptor)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
