"""Running a ``gem`` command in several processes that a fork server starts: torch is imported once, not once a process."""

import itertools
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT = 120
"""Seconds after which ranks that wait for each other count as hung."""


@dataclass(frozen=True)
class Ranks:
    """What each rank returned and wrote; a code of None is a rank that hung."""

    codes: list[int | None]
    out: list[str]
    err: list[str]


def run_ranks(size: int, folder: Path, command: str, kill_at_flush: int = 0) -> Ranks:
    """Run a command (words in one string) on ``size`` ranks that know each other as torchrun's do.

    With ``kill_at_flush`` a rank is killed (signal 9) right after it has flushed its so-many-th file or folder to disk.
    """
    context = _fork_server()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    files = [(folder / f"rank{rank}.out", folder / f"rank{rank}.err") for rank in range(size)]
    processes = [context.Process(target=_rank, args=(rank, size, port, command, *files[rank], kill_at_flush)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return Ranks(codes, *([path.read_text() for path in column] for column in zip(*files, strict=True)))


def _rank(rank: int, size: int, port: int, command: str, out: Path, err: Path, kill_at_flush: int) -> None:
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), descriptor)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch

    from gem_core.cli.main import run

    torch.set_num_threads(1)
    if kill_at_flush:
        _kill_after(("fsync",), kill_at_flush)
    install_fakes()
    code = run(command.split())
    sys.stdout.flush()
    sys.exit(code)


def _fork_server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gem_core.train.run", "gem_core.cli.train", "torch._dynamo"])  # torch's optimisers import dynamo on use
    return context


def _kill_after(names: Sequence[str], at: int) -> None:
    """Kill this process right after it has called these functions of ``os`` so many times in all."""
    calls = itertools.count(1)

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **keywords: Any) -> Any:
            result = function(*arguments, **keywords)
            if next(calls) == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return called

    for name in names:
        setattr(os, name, deadly(getattr(os, name)))


def write_until_killed(run: Path, tensors: dict[str, Any], at: int) -> int | None:
    """Write checkpoints of steps 1, 2, ..., with the step added to every tensor and one kept, in a process that dies at a change of the disk.

    ``at`` counts these changes: a flush, a rename, a folder made, a file or folder removed. Returns the exit code.
    """
    process = _fork_server().Process(target=_write, args=(run, tensors, at))
    process.start()
    process.join(LIMIT)
    code: int | None = process.exitcode
    return code


def _write(run: Path, tensors: dict[str, Any], at: int) -> None:
    from gem_core.train.checkpoint.pieces import pieces_of
    from gem_core.train.checkpoint.saver import Content, write_checkpoint

    _kill_after(("fsync", "rename", "unlink", "rmdir", "mkdir"), at)
    for step in range(1, 100):
        pieces = {name: pieces_of(tensor + step) for name, tensor in tensors.items()}
        write_checkpoint(run / "checkpoints", Content(step=step, pieces=pieces, trainer={}, about={}), keep=1)


def install_fakes() -> None:
    """Core and the fakes are the only plugins of this process."""
    import gem_train_fakes

    from gem_core.plugins import LoadedPlugin, load_plugins, manager

    found = [plugin for plugin in load_plugins() if plugin.name == "gem-core"]
    name = "gem_train_fakes"
    found.append(LoadedPlugin(name=name, module=name, distribution="fakes", version="1", status="loaded", plugin=gem_train_fakes))
    manager.load_plugins = lambda *, required=(): found  # type: ignore[attr-defined]
