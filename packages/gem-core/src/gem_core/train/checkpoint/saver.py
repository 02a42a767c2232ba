"""Writing checkpoints: beside training or at once, complete or absent, and never holding a value that is not finite.

The files are written under another name, flushed to disk and renamed. Beside training means: the pieces are copied to host memory, training goes on,
and a background thread of each rank writes them. The thread's few messages to the other ranks go through a process group of their own.
"""

import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from gem_core.spec import GemError, RunFailed
from gem_core.train.checkpoint.pieces import HostCopy, PiecePlanner, Pieces, divided
from gem_core.train.checkpoint.saved import ABOUT, FORMAT, REPLACED, TRAINER, checkpoints
from gem_core.train.checkpoint.store import INDEX, KEPT, FileFacts, Writer, file_sha256
from gem_core.train.checkpoint.values import refuse_non_finite
from gem_core.train.world import World

log = logging.getLogger("gem_core.train")

# save says so whenever a single process saves. The filter is global because the warning may come from a background thread.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What goes into a checkpoint.

    Args:
        step: names it.
        pieces: tensors, as far as this rank saves them.
        trainer: nested plain values and tensors; those of the first rank are written.
        about: plain values for ``about.json``; those of the first rank are written.
    """

    step: int
    pieces: dict[str, Pieces]
    trainer: Mapping[str, Any]
    about: Mapping[str, Any]


def write_checkpoint(folder: Path, content: Content, *, keep: int, rank: int = 0, group: Any = None) -> Path:
    """Write ``folder/step-N`` and remove all but the newest ``keep``. Collective over ``group``.

    Raises:
        RunFailed: a value is not finite, or a file cannot be written; on every rank, and older checkpoints stay.
    """
    draft = folder / f".writing-step-{content.step}"
    finish = partial(_publish, folder, draft, content, keep)
    writer = Writer(draft, rank, begin=partial(_begin, folder, draft), finish=finish)
    try:
        save(content.pieces, storage_writer=writer, planner=PiecePlanner(), process_group=group)
    except CheckpointException as error:
        if rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
        raise _failed(error, content.step) from error
    except RuntimeError as error:  # of the process group: a rank is gone
        so = f"rank {rank} lost the others while it was written: {error}"
        raise RunFailed(f"the checkpoint of step {content.step}", so, KEPT) from error
    return folder / f"step-{content.step}"


def _begin(folder: Path, draft: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    remove_unfinished(folder)
    draft.mkdir()


def _publish(folder: Path, draft: Path, content: Content, keep: int, index: Mapping[str, Any], files: Sequence[FileFacts]) -> None:
    """Complete the draft, give it its name, and remove the oldest. On the first rank, when all ranks have written."""
    refuse_non_finite(content.trainer, "trainer")
    with (draft / TRAINER).open("wb") as file:
        torch.save(dict(content.trainer), file)
        file.flush()
        os.fsync(file.fileno())
    _write_json(draft / INDEX, index)
    facts = {file.name: {"sha256": file.sha256, "bytes": file.size} for file in files}
    for path in (draft / TRAINER, draft / INDEX):
        facts[path.name] = {"sha256": file_sha256(path), "bytes": path.stat().st_size}
    _write_json(draft / ABOUT, {"format": FORMAT, "step": content.step, **content.about, "files": facts})
    _flush_folder(draft)
    target, replaced = folder / f"step-{content.step}", folder / f"{REPLACED}{content.step}"
    if target.exists():  # written before this run went back to an older one
        target.rename(replaced)
    draft.rename(target)
    _flush_folder(folder)
    if replaced.exists():
        shutil.rmtree(replaced)
    for old in checkpoints(folder)[:-keep]:
        _remove(old)


def _failed(error: CheckpointException, step: int) -> RunFailed:
    """The first rank's reason in three parts."""
    rank, cause = sorted((rank, failure[0]) for rank, failure in error.failures.items())[0]
    asked = f"the checkpoint of step {step}"
    if isinstance(cause, GemError):
        return RunFailed(asked, cause.so, cause.do)
    return RunFailed(asked, f"rank {rank} could not write it: {type(cause).__name__}: {cause}", KEPT)


class Saver:
    """Saves checkpoints of one run, one at a time.

    Args:
        folder: ``checkpoints`` of the run.
        world: the ranks; all of them save together.
        keep: how many checkpoints stay.
        told: called in the training thread of each rank with step and folder of a checkpoint that is complete.
    """

    def __init__(self, folder: Path, world: World, *, keep: int, told: Callable[[int, Path], None]) -> None:
        self._folder, self._world, self._keep, self._told = folder, world, keep, told
        self._group: Any = None
        self._pool: ThreadPoolExecutor | None = None
        self._pending: tuple[int, Future[Path]] | None = None
        self._host = HostCopy()

    def save(self, content: Content, *, background: bool) -> None:
        """Write a checkpoint, after the one before. Collective.

        Args:
            background: copy the pieces and return; errors are raised by the next ``save`` or ``wait``.

        Raises:
            RunFailed: this checkpoint (not in the background) or the one before could not be written.
        """
        self.wait()
        if self._world.size > 1 and self._group is None:
            self._group = dist.new_group(backend="gloo")
        pieces = divided(content.pieces)
        content = Content(step=content.step, pieces=self._host.take(pieces) if background else pieces, trainer=content.trainer, about=content.about)
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        write = partial(write_checkpoint, self._folder, content, keep=self._keep, rank=self._world.rank, group=self._group)
        self._pending = content.step, self._pool.submit(write)
        if not background:
            self.wait()

    def poll(self) -> None:
        """Tell of a checkpoint that has become complete; raises nothing, since ranks become ready at different times."""
        if self._pending is not None and self._pending[1].done() and self._pending[1].exception() is None:
            self.wait()

    def wait(self) -> None:
        """Wait for the checkpoint under way.

        Raises:
            RunFailed: it could not be written; raised on every rank.
        """
        if self._pending is not None:
            (step, future), self._pending = self._pending, None
            self._told(step, future.result())

    def close(self) -> None:
        """Wait, and end the thread. An error goes to the log: the run is ending for another reason."""
        try:
            self.wait()
        except Exception as error:
            log.error("%s", error)
        if self._pool is not None:
            self._pool.shutdown()


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process left half written, half removed or replaced."""
    for leftover in [*folder.glob(".writing-*"), *folder.glob(".removing-*")]:
        shutil.rmtree(leftover)
    for old in folder.glob(f"{REPLACED}*"):
        target = folder / f"step-{old.name.removeprefix(REPLACED)}"
        if target.exists():
            shutil.rmtree(old)
        else:
            old.rename(target)


def _remove(folder: Path) -> None:
    """Remove a checkpoint so that a kill on the way leaves no half one under its name."""
    doomed = folder.with_name(f".removing-{folder.name}")
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _write_json(path: Path, value: Any) -> None:
    with path.open("w", encoding="utf-8") as text:
        json.dump(value, text, indent=1)
        text.flush()
        os.fsync(text.fileno())


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
