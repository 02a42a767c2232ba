"""Strategy ``activations`` in runs of the trainer: the losses of a run without it, a plan in the manifest, planned bytes beside those alive."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Gem = Callable[..., Any]
SHORT = ("-c", "toy", "--set", "run.device=cpu", "--set", "run.threads=1", "--set", "data.batch_size=64", "--set", "train.max_steps=4")
BOTH = ("--set", 'parallel.strategies=["single", "activations"]')


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in map(json.loads, (run / "log.jsonl").read_text().splitlines()) if record["event"] == "train"]


def test_a_planned_run_has_the_losses_of_a_plain_one(gem: Gem, tmp_path: Path) -> None:
    gem("train", *SHORT, "--set", "train.log_every=1", "--out", "plain")
    gem("train", *SHORT, "--set", "train.log_every=1", "--out", "planned", *BOTH, "--set", "parallel.options.activations.budget=0.012")
    assert losses(tmp_path / "planned") == losses(tmp_path / "plain")
    told = json.loads((tmp_path / "planned" / "manifest.json").read_text())["parallel"]["activations"]
    assert set(told["policies"].values()) == {"keep", "recompute"}
    assert sum(block["held"] for block in told["plan"]) <= told["budget"] == 12_000_000
    assert sum(block["saved"] for block in told["plan"]) > told["budget"]


@pytest.mark.parametrize("policy", ["recompute", "fp8"])
def test_planned_bytes_of_the_gem_model_are_those_alive(gem: Gem, policy: str) -> None:
    """Within a tenth for each layer: the model's poolings live on beside what is saved."""
    rule = f'parallel.options.activations.policies=[{{pattern = "layers.0", policy = "{policy}"}}]'
    told = json.loads(gem("plan", "--memory", *SHORT, *BOTH, "--set", rule, "--json").stdout)
    layers = [block for block in told["blocks"] if block["name"].startswith("layers")]
    assert [block["policy"] for block in layers] == [policy, "keep"]
    for block in layers:
        assert block["measured"] == pytest.approx(block["held"], rel=0.1), block
    assert layers[0]["held"] < 0.5 * layers[0]["saved"]
