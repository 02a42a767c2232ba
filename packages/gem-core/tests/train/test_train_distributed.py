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
from gem_train_ranks import Ranks, run_ranks

from gem_core.train.checkpoint.saved import checkpoints, find_checkpoint
from gem_core.train.log import read_log

CURVE = 1e-5
"""Largest relative difference of the loss curves: sums of float32 in another order."""

DDP = "--set parallel.strategies=['fake-ddp']"
Launch = Callable[..., Ranks]


@pytest.fixture
def launch(recipe: str, tmp_path: Path) -> Launch:
    """Run a ``gem`` command on so many ranks."""
    return lambda size, command: run_ranks(size, tmp_path, command.replace("RECIPE", recipe))


def command(out: Path, *overrides: str, more: str = DDP) -> str:
    return " ".join(["train -c RECIPE --out", str(out), *(f"--set {override}" for override in overrides), more])


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_log(folder) if record["event"] == "train"]


def test_case_E04_two_processes_follow_one_and_checkpoints_change_hands(launch: Launch, tmp_path: Path) -> None:
    """Two epochs on one rank; on two; the first on two and the second on one; the first on one and the second on two: one curve, one result."""
    common = ("data.options.rows=100", "train.log_every=1", "optim.accumulate=2")  # the last batch has 4 rows
    half = (*common, "train.epochs=1")
    one, two, grows, shrinks = (tmp_path / name for name in ("one", "two", "grows", "shrinks"))
    again = "train --set train.epochs=2 --resume"
    for size, words in (
        (1, command(one, *common, more="")),
        (2, command(two, *common)),
        (1, command(grows, *half, more="")),
        (2, f"{again} {grows} {DDP}"),
        (2, command(shrinks, *half)),
        (1, f"{again} {shrinks} --set parallel.strategies=['single']"),
    ):
        ranks = launch(size, words)
        assert ranks.codes == [0] * size, ranks.err
    for other in (two, grows, shrinks):
        assert losses(other) == pytest.approx(losses(one), rel=CURVE), other.name
        got, expected = summary_of(other), summary_of(one)
        assert got["test"]["ctr"]["ne"] == pytest.approx(expected["test"]["ctr"]["ne"], rel=CURVE)
        assert got["test"]["cvr"]["rows"] == expected["test"]["cvr"]["rows"]
        assert (got["ledger"], got["train_flops"]) == (expected["ledger"], expected["train_flops"])
        dense, weights = (find_checkpoint(folder).read()["dense"]["model"] for folder in (other, one))
        assert all(torch.allclose(dense[name], weight, atol=1e-5) for name, weight in weights.items()), other.name
        tables, rows = (find_checkpoint(folder).read()["tables"]["item"] for folder in (other, one))
        assert torch.allclose(tables["weight"], rows["weight"], atol=1e-4), other.name
    assert summary_of(two)["world"] == 2


@pytest.mark.parametrize(("uneven", "steps", "rows", "dropped"), [("stop", 3, 24, 4), ("pad", 10, 64, 0), ("drop", 6, 48, 8)])
def test_case_F01_uneven_ranks_end_within_a_step(launch: Launch, tmp_path: Path, uneven: str, steps: int, rows: int, dropped: int) -> None:
    """Ranks with 5 and 3 batches of 4 rows, two epochs."""
    shares = "data.options.shares={0=5,1=3}"
    ranks = launch(2, command(tmp_path / "run", shares, "data.options.rows=32", "data.batch_size=4", f"train.uneven={uneven}"))
    assert ranks.codes == [0, 0], ranks.err
    summary = summary_of(tmp_path / "run")
    assert (summary["steps"], summary["rows"]) == (steps, rows)
    ledger = summary["ledger"]["train"]
    assert ledger["offered"] == ledger["trained"] + ledger["dropped_uneven"] + ledger["not_read"]
    assert (ledger["trained"], ledger["dropped_uneven"]) == (rows, dropped)
    assert ledger["offered"] == (32 if uneven == "stop" else 64)
    assert ("rank 1 ran out first" in summary["stopped"]) == (uneven == "stop")
    assert ("stopped: rank 1 ran out first" in ranks.out[0]) == (uneven == "stop")


def test_an_error_of_one_rank_ends_all_and_names_the_rank(launch: Launch, tmp_path: Path) -> None:
    """A NaN in a row of rank 1 (unshuffled batches of 16: of the second, rank 1 has rows 24 to 31), and a bad label there."""
    still = ("train.shuffle=false", "train.checkpoint_every=1")
    nan = launch(2, command(tmp_path / "nan", *still, "data.options.nan_row=30"))
    assert nan.codes == [1, 1]
    for err in nan.err:
        assert "training step 2" in err
        assert "the loss is not finite: the batch holds a non-finite value in dense feature 'x' (rank 1)" in err
    assert [path.name for path in checkpoints(tmp_path / "nan" / "checkpoints")] == ["step-1"]
    label = launch(2, command(tmp_path / "label", *still, "data.options.bad_label=30"))
    assert label.codes == [2, 2]
    assert all("it holds 2.0" in err for err in label.err)


def test_the_strategy_of_one_process_refuses_two(launch: Launch, tmp_path: Path) -> None:
    ranks = launch(2, command(tmp_path / "run", more=""))
    assert ranks.codes == [2, 2]
    assert all("the run has 2 processes" in err for err in ranks.err)
    assert not (tmp_path / "run").exists()


TORCHRUN = """
import sys
sys.path.insert(0, sys.argv[1])
import gem_train_ranks
from gem_core.cli.main import main

gem_train_ranks.install_fakes()
sys.argv = ["gem", *sys.argv[2:]]
main()  # which leaves as a rank should, past threads of process groups
"""


def test_torchrun_starts_a_run(recipe: str, tmp_path: Path) -> None:
    """The launcher itself, once: it sets the variables that the tests above set by hand."""
    program = tmp_path / "program.py"
    program.write_text(TORCHRUN)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port), str(program)]
    words = command(tmp_path / "run", "train.epochs=1").replace("RECIPE", recipe).split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launcher, str(Path(__file__).parent), *words], capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (summary_of(tmp_path / "run")["world"], summary_of(tmp_path / "run")["steps"]) == (2, 6)
