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


PARTS = '["events.*", "layers.*.pffn", "layers.*.attention", "layers.*.pool", "layers.*.ensemble"]'


def test_parts_of_layers_are_planned_apart(gem: Gem, tmp_path: Path) -> None:
    """The losses of a plain run, within the budget; of one layer some parts keep what others compute again."""
    fine = (*BOTH, "--set", f"parallel.options.activations.blocks={PARTS}", "--set", "parallel.options.activations.budget=0.012")
    gem("train", *SHORT, "--set", "train.log_every=1", "--out", "plain")
    gem("train", *SHORT, "--set", "train.log_every=1", "--out", "fine", *fine)
    assert losses(tmp_path / "fine") == losses(tmp_path / "plain")
    told = json.loads((tmp_path / "fine" / "manifest.json").read_text())["parallel"]["activations"]
    assert sum(block["held"] for block in told["plan"]) <= told["budget"] < sum(block["saved"] for block in told["plan"])
    first = {name: policy for name, policy in told["policies"].items() if name.startswith("layers.0.")}
    assert {"layers.0.steps.0.pffn", "layers.0.steps.0.attention", "layers.0.steps.1.pool", "layers.0.ensemble"} <= first.keys()
    assert set(told["policies"].values()) == {"keep", "recompute"}


def test_planned_bytes_of_parts_are_those_alive(gem: Gem) -> None:
    """In all, within a tenth: what lies between two parts counts for the one that reads it."""
    rules = '[{pattern = "*.attention", policy = "recompute"}, {pattern = "*.pool", policy = "recompute"}]'
    fine = (*BOTH, "--set", f"parallel.options.activations.blocks={PARTS}", "--set", f"parallel.options.activations.policies={rules}")
    blocks = json.loads(gem("plan", "--memory", *SHORT, *fine, "--json").stdout)["blocks"]
    held, measured = sum(block["held"] for block in blocks), sum(block["measured"] or 0 for block in blocks)
    assert measured == pytest.approx(held, rel=0.1)
    assert held < 0.7 * sum(block["saved"] for block in blocks)
