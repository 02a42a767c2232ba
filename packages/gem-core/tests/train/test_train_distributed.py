"""Two real processes over gloo: the loss curve of one, uneven ranks without a hang, errors on all ranks, resuming with another number of ranks.

Data parallelism is the fakes' thin wrapping of torch's DDP; gem-parallel's own strategy is tested with all packages together.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gem_core.train.checkpoint import checkpoints, find_checkpoint
from gem_core.train.log import read_log

HERE = Path(__file__).parent

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import gem_train_fakes
from gem_core.plugins import LoadedPlugin, load_plugins, manager
from gem_core.cli.main import run

found = [plugin for plugin in load_plugins() if plugin.name == "gem-core"]
found.append(LoadedPlugin(name="fakes", module="gem_train_fakes", distribution="fakes", version="1", status="loaded", plugin=gem_train_fakes))
manager.load_plugins = lambda *, required=(): found
sys.exit(max(run(line.split()) for line in sys.argv[2].split("|")))
"""

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def launch(recipe: str, tmp_path: Path) -> Launch:
    """Run ``gem`` commands (words in one string, commands separated by ``|``) in so many processes."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def run(processes: int, *commands: str) -> "subprocess.CompletedProcess[str]":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        python = [sys.executable]
        if processes > 1:
            python += ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", str(port)]
        words = [*python, str(program), str(HERE), "|".join(command.replace("RECIPE", recipe) for command in commands)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        return subprocess.run(words, capture_output=True, text=True, env=environment, timeout=240, check=False)

    return run


def command(out: Path, *overrides: str, ddp: bool = True) -> str:
    words = ["train -c RECIPE --out", str(out), *(f"--set {override}" for override in overrides)]
    return " ".join([*words, *(["--set parallel.strategies=['fake-ddp']"] if ddp else [])])


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_log(folder) if record["event"] == "train"]


CURVE = 1e-5
"""Largest relative difference of the loss curves: sums of float32 in another order."""


def test_two_processes_follow_one_and_checkpoints_change_hands(launch: Launch, tmp_path: Path) -> None:
    """Case E04: one epoch on two ranks goes on on one, and one epoch on one rank goes on on two; all end where a single process ends."""
    common = ("data.options.rows=100", "train.log_every=1", "optim.accumulate=2")  # the last batch has 4 rows
    one, two, swapped, back = (tmp_path / name for name in ("one", "two", "swapped", "back"))
    resume = "--set train.epochs=2 --resume"
    first = launch(1, command(one, *common, ddp=False), command(back, *common, "train.epochs=1", ddp=False))
    assert first.returncode == 0, first.stderr[-3000:]
    second = launch(
        2,
        command(two, *common),
        command(swapped, *common, "train.epochs=1"),
        f"train {resume} {back} --set parallel.strategies=['fake-ddp']",
    )
    assert second.returncode == 0, second.stderr[-3000:]
    third = launch(1, f"train {resume} {swapped} --set parallel.strategies=['single']", f"eval {two} --set x".replace(" --set x", ""))
    assert third.returncode in (0, 2), third.stderr[-3000:]
    for other in (two, swapped, back):
        assert losses(other) == pytest.approx(losses(one), rel=CURVE), other.name
        assert summary_of(other)["test"]["ctr"]["ne"] == pytest.approx(summary_of(one)["test"]["ctr"]["ne"], rel=CURVE)
        assert summary_of(other)["test"]["cvr"]["rows"] == summary_of(one)["test"]["cvr"]["rows"]
        assert summary_of(other)["ledger"] == summary_of(one)["ledger"]
        dense, expected = (find_checkpoint(folder).read()["dense"]["model"] for folder in (other, one))
        assert all(torch.allclose(dense[name], weight, atol=1e-5) for name, weight in expected.items()), other.name
    assert summary_of(two)["world"] == 2
    assert summary_of(two)["train_flops"] == summary_of(one)["train_flops"]


@pytest.mark.parametrize(("uneven", "steps", "rows", "dropped"), [("stop", 3, 24, 4), ("pad", 10, 64, 0), ("drop", 6, 48, 8)])
def test_case_F01_uneven_ranks_end_within_a_step(launch: Launch, tmp_path: Path, uneven: str, steps: int, rows: int, dropped: int) -> None:
    """Ranks with 5 and 3 batches of 4 rows, two epochs."""
    shares = "data.options.shares={0=5,1=3}"
    done = launch(2, command(tmp_path / "run", shares, "data.options.rows=32", "data.batch_size=4", f"train.uneven={uneven}"))
    assert done.returncode == 0, done.stderr[-3000:]
    summary = summary_of(tmp_path / "run")
    assert (summary["steps"], summary["rows"]) == (steps, rows)
    ledger = summary["ledger"]["train"]
    assert ledger["offered"] == ledger["trained"] + ledger["dropped_uneven"] + ledger["not_read"]
    assert (ledger["trained"], ledger["dropped_uneven"]) == (rows, dropped)
    assert ledger["offered"] == (32 if uneven == "stop" else 64)
    assert ("rank 1 ran out first" in summary["stopped"]) == (uneven == "stop")
    assert ("stopped: rank 1 ran out first" in done.stdout) == (uneven == "stop")


def test_an_error_of_one_rank_ends_all_and_names_the_rank(launch: Launch, tmp_path: Path) -> None:
    """A NaN in a row of rank 1 (unshuffled batches of 16: rank 1 has rows 8 to 15), and a bad label there."""
    still = ("train.shuffle=false", "train.checkpoint_every=1")
    nan = launch(2, command(tmp_path / "nan", *still, "data.options.nan_row=30"))
    assert nan.returncode != 0
    assert "training step 2: the loss is not finite: the batch holds a non-finite value in dense feature 'x' (rank 1)" in nan.stderr
    assert [path.name for path in checkpoints(tmp_path / "nan" / "checkpoints")] == ["step-1"]
    label = launch(2, command(tmp_path / "label", *still, "data.options.bad_label=30"))
    assert label.returncode != 0
    assert label.stderr.count("label 'ctr': it holds 2.0") >= 1


def test_one_process_strategy_refuses_two(launch: Launch, tmp_path: Path) -> None:
    done = launch(2, command(tmp_path / "run", ddp=False))
    assert done.returncode != 0
    assert "the run has 2 processes" in done.stderr
    assert not (tmp_path / "run").exists()
