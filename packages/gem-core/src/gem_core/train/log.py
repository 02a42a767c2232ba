"""What a run writes while it goes: ``log.jsonl``, TensorBoard, and a progress bar (on a terminal) or plain lines."""

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger("gem_core.train")


class RunLog:
    """The log of one run; writes only where it is given a folder (the first rank).

    Args:
        folder: the run folder, or None to write nothing.
        total: number of steps, for the bar.
        step: the step a resumed run goes on from; what was logged after that checkpoint is taken out, since it will be logged again.
    """

    def __init__(self, folder: Path | None, *, total: int, step: int = 0) -> None:
        self._open = folder is not None
        if folder is None:
            return
        path = folder / "log.jsonl"
        kept = _until_checkpoint(path, step) if step else []
        path.write_text("".join(kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")
        self._board: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)
        self._bar = None
        if sys.stderr.isatty():
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=total, completed=step)
            self._bar.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def event(self, name: str, step: int, **values: Any) -> None:
        """Append one line to ``log.jsonl``."""
        if self._open:
            self._file.write(json.dumps({"event": name, "step": step, **values}, allow_nan=False, default=str) + "\n")
            self._file.flush()

    def scalars(self, prefix: str, step: int, values: Mapping[str, Any]) -> None:
        """Send every number of a nested mapping to TensorBoard as ``prefix/key``."""
        if not self._open:
            return
        for key, value in values.items():
            if isinstance(value, Mapping):
                self.scalars(f"{prefix}/{key}", step, value)
            elif isinstance(value, int | float):
                self._board.add_scalar(f"{prefix}/{key}", value, step)

    def advance(self, step: int) -> None:
        """Move the bar."""
        if self._open and self._bar is not None:
            self._bar.update(self._task, completed=step)

    def say(self, text: str) -> None:
        """Tell the person: beside the bar on a terminal, else as a line of the program's log."""
        if not self._open:
            return
        if self._bar is not None:
            self._bar.update(self._task, description=text)
        else:
            log.info(text)

    def close(self) -> None:
        """Flush and close everything; may be called twice."""
        if self._open:
            self._open = False
            self._file.close()
            self._board.close()
            if self._bar is not None:
                self._bar.stop()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The records of ``log.jsonl``; a last line that a killed process cut short is left out."""
    path = folder / "log.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _until_checkpoint(path: Path, step: int) -> list[str]:
    """What was logged until the state of a step was taken, and that checkpoints up to it were complete, which is known later."""
    records = read_log(path.parent)
    taken = [i for i, r in enumerate(records) if r["event"] == "saving" and r["step"] == step]
    if taken:
        kept = [r for i, r in enumerate(records) if i <= taken[-1] or (r["event"] == "checkpoint" and r["step"] <= step)]
    else:
        kept = [r for r in records if r["step"] <= step]
    return [json.dumps(record) + "\n" for record in kept]
