"""The trainer on a CUDA device: the curve of the CPU, resuming, and figures against the vendor's peak."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gem_core.config.load import LoadedConfig
from gem_core.train.checkpoint.saved import find_checkpoint
from gem_core.train.efficiency import peak_of
from gem_core.train.log import read_log
from gem_core.train.run import evaluate_run, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CURVE = 1e-3
"""Largest relative difference of the loss curves of CPU and GPU: float32 sums in another order, over 12 steps."""

Configure = Callable[..., LoadedConfig]


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_log(folder) if record["event"] == "train"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_gpu_follows_the_curve_of_the_cpu(configure: Configure, tmp_path: Path, accumulate: int) -> None:
    settings = ("train.log_every=1", f"optim.accumulate={accumulate}")
    train(configure(*settings, out="cpu"))
    summary = train(configure(*settings, "run.device=cuda", out="gpu"))
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=CURVE)
    assert 0 < summary["mfu"] < 1


def test_auto_takes_the_gpu_and_bf16_trains(configure: Configure, tmp_path: Path) -> None:
    train(configure("run.device=auto", "precision.recipe=bf16", "train.ema_decay=0.5"))
    weights = find_checkpoint(tmp_path / "run").read()["dense"]["model"]
    assert all(w.dtype == torch.float32 and w.device.type == "cpu" for w in weights.values())


def test_a_gpu_run_resumes_and_is_evaluated(configure: Configure, tmp_path: Path) -> None:
    straight = train(configure("run.device=cuda", "model.options.dropout=0.3", out="straight"))
    train(configure("run.device=cuda", "model.options.dropout=0.3", "train.epochs=1"))
    resumed = train(configure("run.device=cuda", "model.options.dropout=0.3"), resume=tmp_path / "run")
    assert resumed["test"]["ctr"]["ne"] == pytest.approx(straight["test"]["ctr"]["ne"], rel=CURVE)
    assert evaluate_run(tmp_path / "run")["test"]["ctr"]["ne"] == pytest.approx(resumed["test"]["ctr"]["ne"], rel=1e-6)


def test_a_gpus_peak_is_known_or_measured() -> None:
    peak = peak_of(torch.device("cuda", 0), "bf16")
    assert peak.flops_per_second > 1e12
    assert peak.source.startswith(("vendor", "measured"))


def test_case_E13_a_copy_beside_training_is_that_of_the_moment(tmp_path: Path) -> None:
    """Tables on the GPU change on two streams right before and right after they are handed over."""
    from gem_core.train.checkpoint.pieces import pieces_of
    from gem_core.train.checkpoint.saver import Content, Saver
    from gem_core.train.world import World

    live = {f"tables/t{i}/weight": torch.zeros(1 << 20, 16, device="cuda") for i in range(4)}
    side = torch.cuda.Stream()
    saver = Saver(tmp_path / "checkpoints", World(device=torch.device("cuda", 0)), keep=9, told=lambda step, path: None)
    for step in range(1, 4):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for tensor in live.values():
                tensor.add_(1.0)
        pieces = {name: pieces_of(tensor) for name, tensor in live.items()}
        saver.save(Content(step=step, pieces=pieces, trainer={}, about={}), background=True)
        for tensor in live.values():
            tensor.mul_(2.0).div_(2.0)
    saver.close()
    for step in range(1, 4):
        saved = find_checkpoint(tmp_path / "checkpoints" / f"step-{step}")
        assert all(bool((saved.tensor(name) == step).all()) for name in live)
