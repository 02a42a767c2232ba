"""The step ledger of a run in which dense part and tables are sharded: exchanges by name, and parts that add up."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Gem = Callable[..., Any]
SHORT = ("--set", "run.device=cpu", "--set", "data.batch_size=64", "--set", "train.max_steps=8", "--set", "train.log_every=4", "--out", "run")


def test_exchanges_of_strategies_and_engines_are_told_from_computing(torchrun: Gem, tmp_path: Path) -> None:
    """fsdp's weights and gradients, the ids that tables are asked for."""
    torchrun(2, "train", "-c", "toy", *SHORT, "--set", 'parallel.strategies=["fsdp"]', "--set", "embedding.engine=sharded_2d")
    records = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    times = [record["time"] for record in records if record["event"] == "train"]
    assert len(times) == 2
    for time in times:
        assert sum(time["parts"].values()) == pytest.approx(time["step"])
        assert {"exchange: dense: weights of layers.0", "exchange: dense: gradients of layers.0", "exchange: tables: ask"} <= time["parts"].keys()
        assert {"forward", "backward", "optimiser", "tables", "data", "agree", "wait for the slowest"} <= time["parts"].keys()
        assert min(time["parts"].values()) >= 0
        assert time["bound"]["seconds"] <= time["step"]


def test_steps_of_a_run_make_a_cost_model(gem: Gem, tmp_path: Path) -> None:
    gem("train", "-c", "toy", *SHORT, "--set", "train.steps_csv=true", "--set", "train.trace=[3]")
    assert len((tmp_path / "run" / "steps.csv").read_text().splitlines()) == 9
    said = gem("data", "balance", "--fit", "run/steps.csv").stdout
    assert "data.options.cost=" in said
    trace = json.loads((tmp_path / "run" / "trace" / "step-3-rank-0.json").read_text())
    ranges = {event["name"]: event["dur"] for event in trace["traceEvents"] if event.get("name") in ("forward", "backward") and "dur" in event}
    assert min(ranges["forward"], ranges["backward"]) > 0
