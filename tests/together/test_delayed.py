"""Steps of several micro-batches on replicas of shards, which reduce once, follow the losses of one process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RUN = (
    "train",
    "-c",
    "toy",
    "--set",
    "data.options.rows=253",
    "--set",
    "data.batch_size=63",
    "--set",
    "optim.accumulate=2",
    "--set",
    "train.epochs=1",
)
WITH = ("--set", "train.log_every=1", "--set", "train.uneven=pad", "--set", "model.options.layers=1", "--set", "model.options.dim=16")
GRID = ("--set", 'parallel.strategies=["experts", "fsdp"]', "--set", "parallel.options.experts.degree=2", "--set", "parallel.options.fsdp.replicas=2")
EXPERTS = ("--set", 'model.options.experts=[{kind="wukong"}, {kind="linear"}]')
BOUND = 2e-5
"""Largest relative difference of a loss: sums in another order."""


def losses(run: Path) -> list[float]:
    events = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "train"]


def test_replicas_that_reduce_once_a_step_follow_one_process(gem: Callable[..., Any], torchrun: Callable[..., Any], tmp_path: Path) -> None:
    """Two steps of two micro-batches, and one of a single row, which leaves three ranks without. Experts have one shard each, so their gradients are
    reduced in each micro-batch."""
    gem(*RUN, *WITH, *EXPERTS, "--out", "one")
    torchrun(4, *RUN, *WITH, *EXPERTS, *GRID, "--out", "four")
    want, got = losses(tmp_path / "one"), losses(tmp_path / "four")
    assert len(want) == 3
    assert got == pytest.approx(want, rel=BOUND)
    facts = json.loads((tmp_path / "four/manifest.json").read_text())["parallel"]["fsdp"]
    assert (facts["replicas"], facts["reduce"]) == (2, "last")
