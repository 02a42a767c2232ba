"""Running a ``gem`` command in several processes that a fork server starts: torch is imported once, not once a process."""

import itertools
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable
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


def run_ranks(size: int, folder: Path, command: str, kill_at_save: int = 0) -> Ranks:
    """Run a command (words in one string) on ``size`` ranks that know each other as torchrun's do.

    With ``kill_at_save`` a rank is killed (signal 9) right after it has written its so-many-th file by ``torch.save``.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gem_core.train.run", "gem_core.cli.train", "torch._dynamo"])  # torch's optimisers import dynamo on use
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    files = [(folder / f"rank{rank}.out", folder / f"rank{rank}.err") for rank in range(size)]
    processes = [context.Process(target=_rank, args=(rank, size, port, command, *files[rank], kill_at_save)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return Ranks(codes, *([path.read_text() for path in column] for column in zip(*files, strict=True)))


def _rank(rank: int, size: int, port: int, command: str, out: Path, err: Path, kill_at_save: int) -> None:
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), descriptor)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch

    from gem_core.cli.main import run

    torch.set_num_threads(1)
    if kill_at_save:
        torch.save = deadly(torch.save, kill_at_save)
    install_fakes()
    code = run(command.split())
    sys.stdout.flush()
    sys.exit(code)


def deadly(save: Callable[..., None], at: int) -> Callable[..., None]:
    """``torch.save`` that kills its process after the so-many-th call, before the file is closed."""
    calls = itertools.count(1)

    def save_and_die(content: Any, file: Any) -> None:
        save(content, file)
        if next(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    return save_and_die


def install_fakes() -> None:
    """Core and the fakes are the only plugins of this process."""
    import gem_train_fakes

    from gem_core.plugins import LoadedPlugin, load_plugins, manager

    found = [plugin for plugin in load_plugins() if plugin.name == "gem-core"]
    name = "gem_train_fakes"
    found.append(LoadedPlugin(name=name, module=name, distribution="fakes", version="1", status="loaded", plugin=gem_train_fakes))
    manager.load_plugins = lambda *, required=(): found  # type: ignore[attr-defined]
