"""Compiled blocks of whole models in low precision: the losses of a run without compiling, within the limit that a user has by default."""

import json
from pathlib import Path

import pytest
import torch

from gem_core.config.load import load_config
from gem_core.train import compiled
from gem_core.train.log import read_log
from gem_core.train.run import train

SMALL = [
    "run.device=cpu", "run.threads=1", "data.options.rows=96", "data.batch_size=32", "train.epochs=1", "train.log_every=1",
    "kernels.prefer=['reference']", "kernels.on_reference=allow", "model.options.layers=1", "precision.options.small=0",
]  # fmt: skip
HSTU = ["model.name=hstu", "model.options.dim=16", "model.options.bias=none"]


def losses(folder: Path, *words: str) -> tuple[list[float], int]:
    """The training losses of a run, and the graphs it compiled."""
    summary = train(load_config("toy", [*SMALL, f"run.out={json.dumps(str(folder))}", *words]))
    return [record["loss"] for record in read_log(folder) if record["event"] == "train"], summary["compile"]["graphs"]


@pytest.mark.parametrize(
    ("words", "most"),
    [
        ([*HSTU, "precision.recipe=fp8_block", "precision.options.ramp={start=2}", "precision.options.guard={every=2}"], 24),
        (["precision.recipe=mxfp8"], 100),
    ],
    ids=["hstu", "gem"],
)
def test_a_run_in_low_precision_compiles_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], most: int) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "eager")  # traced and cut; code generation is torch's own business, and slow on a CPU
    torch._dynamo.reset()
    want, none = losses(tmp_path / "plain", *words)
    got, graphs = losses(tmp_path / "compiled", *words, "compile.blocks=default", "compile.dynamic=always")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    assert (len(got), none) == (3, 0)
    assert 4 <= graphs <= most
