"""A run that guards itself, spread over processes by gem-parallel: the figures of one process, and weights that travel as they are."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Gem = Callable[..., Any]
SETTINGS = (
    "precision.recipe=mxfp8",
    "precision.options.islands=[]",
    "precision.options.small=8",
    "precision.options.guard.every=2",
    "precision.options.ramp.start=3",
    "model.name=dlrm",
    "data.batch_size=32",
    "train.max_steps=6",
    "optim.lr=0.02",
)


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "precision-guard.jsonl").read_text().splitlines()]


def test_case_G03_two_processes_see_the_pairs_of_one(gem: Gem, torchrun: Gem, tmp_path: Path) -> None:
    words = ("train", "-c", "toy", *(word for setting in SETTINGS for word in ("--set", setting)))
    gem(*words, "--out", "one", OMP_NUM_THREADS="1")
    torchrun(2, *words, "--out", "two", "--set", 'parallel.strategies=["fsdp"]')
    one, two = records(tmp_path / "one"), records(tmp_path / "two")
    assert [record["step"] for record in two] == [4, 6]  # of step 2 no site was low
    for a, b in zip(one, two, strict=True):
        for task, judged in a["tasks"].items():
            assert b["tasks"][task]["ne"] == pytest.approx(judged["ne"], rel=1e-5)
            assert b["tasks"][task]["difference"] == pytest.approx(judged["difference"], abs=1e-5)
        assert b["sites"] == pytest.approx(a["sites"], abs=0.2)
    manifest = json.loads((tmp_path / "two" / "manifest.json").read_text())
    assert manifest["parallel"]["fsdp"]["low_weights"] == []
