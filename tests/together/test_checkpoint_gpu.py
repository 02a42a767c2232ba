"""Checkpoints of all engines and layouts between GPUs and the CPU."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # ranks are started by the name of their function

import ranks_checkpoint
from ranks_checkpoint import LAYOUTS, layouts_of, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
GPUS = [world for world in (1, 2) if world <= torch.cuda.device_count()]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the same tables from every layout on each number of GPUs, and from two ranks on the CPU."""
    folder = tmp_path_factory.mktemp("checkpoints")
    run(ranks_checkpoint.save_all, 2, folder)
    for world in GPUS:
        run(ranks_checkpoint.save_all, world, folder, "cuda")
    return folder


@pytest.mark.parametrize(("world", "device"), [*((world, "cuda") for world in GPUS), (1, "cpu")])
def test_case_E01_E02_every_layout_loads_every_other_to_the_bit(saved: Path, world: int, device: str) -> None:
    run(ranks_checkpoint.load_all, world, saved, device)
    written = {rule: len(list((saved / rule).iterdir())) for rule in LAYOUTS}
    assert written["rowwise_adagrad"] == 6 + 9 * len(GPUS)
    for rank in range(world):
        told = saved / f"loaded{rank}.txt"
        assert len(told.read_text().splitlines()) == sum(written[rule] * len(layouts_of(rule, device)) for rule in LAYOUTS)
        told.unlink()
