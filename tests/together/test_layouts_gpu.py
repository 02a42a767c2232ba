"""Two, four or eight GPUs, as many as there are, in the layouts of the five axes, over NCCL, follow one GPU; each run is finished by the next layout,
and one of them by fewer GPUs.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the ranks' script is also read here

from ranks_layouts import SETTINGS, STEPS, chosen
from test_layout_matrix import finish, norms, tensors
from test_layouts import losses

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]
DEVICE = "cuda"
WORLD = max(2, 1 << (min(torch.cuda.device_count(), 8).bit_length() - 1)) if torch.cuda.is_available() else 2
LOSS_BOUND, VALUE_BOUND = 1e-4, 2e-4
"""Relative of losses and norms, absolute of tensors: rows are summed in another order, and by atomic additions."""


def gem(*words: str, folder: Path) -> None:
    """Train in this process's place; the console script is not on every machine with GPUs."""
    settings = [word for value in (*SETTINGS, f"run.device={DEVICE}", f"train.max_steps={STEPS}") for word in ("--set", value)]
    done = subprocess.run([sys.executable, "-m", "gem_core", "train", *words, *settings], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the ranks and one process have worked."""
    folder = tmp_path_factory.mktemp("layouts")
    script = Path(__file__).with_name("ranks_layouts.py")
    command = [sys.executable, str(script), str(folder), str(WORLD), DEVICE]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    errors = "\n".join(path.read_text()[-3000:] for path in folder.glob("error*.txt"))
    assert done.returncode == 0, errors + done.stderr[-3000:]
    gem("-c", "synthetic", "--out", str(folder / "one"), folder=folder)
    return folder


def off(run: Path, one: Path) -> tuple[float, float, str]:
    """Largest relative difference of losses and norms, largest difference of a checkpoint's tensors, and which tensor's that is."""
    figures = [(got(run), got(one)) for got in (losses, norms)]
    for got, want in figures:
        assert got.keys() == want.keys() == set(range(1, STEPS + 1))
    relative = max(abs(got[step] / want[step] - 1) for got, want in figures for step in want)
    theirs, ours = tensors(one), tensors(run)
    assert theirs.keys() == ours.keys()
    values = {name: float((ours[name].double() - tensor.double()).abs().max()) for name, tensor in theirs.items() if tensor.numel()}
    worst = max(values, key=lambda name: values[name])
    return relative, values[worst], worst


def check(found: Sequence[float | str]) -> None:
    print(found)
    assert found[0] < LOSS_BOUND, found
    assert found[1] < VALUE_BOUND, found


@pytest.mark.parametrize("index", range(len(chosen(WORLD))), ids=[str(layout) for layout in chosen(WORLD)])
def test_a_layout_of_several_gpus_equals_one_and_another_goes_on(ran: Path, index: int) -> None:
    check(off(ran / f"run{index}", ran / "one"))


@pytest.mark.parametrize("world", [world for world in (1, 2, 4) if world < WORLD])
def test_case_E01_a_run_of_several_gpus_is_finished_by_fewer(ran: Path, world: int) -> None:
    check(off(finish(ran, world, DEVICE), ran / "one"))


def test_the_comparison_sees_another_run(ran: Path) -> None:
    """The planted fault: another learning rate."""
    gem("-c", "synthetic", "--out", str(ran / "other"), "--set", "optim.lr=0.005", folder=ran)
    with pytest.raises(AssertionError):
        check(off(ran / "other", ran / "one"))
