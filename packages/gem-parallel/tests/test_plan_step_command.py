"""``gem plan`` as a user calls it: this package's cost model answers with a mesh, a step and the best layouts."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

COMMON = ("plan", "-c", "toy", "--world", "8", "--machine", "h100", "--set", "embedding.engine=sharded_2d")
EXPERTS = 'model.options.experts=[{kind = "wukong"}, {kind = "linear"}, {kind = "wukong"}, {kind = "linear"}]'


def gem(*words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, "-W", "ignore", "-m", "gem_core", *words], capture_output=True, text=True, timeout=200, env=env)


def test_the_best_layouts_of_eight_ranks() -> None:
    done = gem(*COMMON, "--set", EXPERTS, "--set", 'parallel.strategies=["fsdp"]', "--search", "2", "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    step: dict[str, Any] = json.loads(done.stdout)["step"]
    first, second = step["layouts"]
    assert first["seconds"] <= second["seconds"]
    # replicas of the dense part times experts (1, 2, 4) times replicas of tables: (4 + 3 + 2) x 4
    assert step["considered"] == 36
    for layout in (first, second):
        axes = layout["axes"]
        assert axes["replicate"] * axes["shard"] * axes["expert"] == axes["sparse_shard"] * axes["sparse_replicate"] == 8
        assert sum(layout["parts"].values()) == pytest.approx(layout["seconds"])
    assert any("host 0" in line for line in step["drawing"])


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (('parallel.strategies=["fsdp"]', "parallel.options.fsdp.replicas=3"), "Choose one of 1, 2, 4, 8."),
        (('parallel.strategies=["experts", "ddp"]', "parallel.options.experts.degree=3", EXPERTS), "blocks have 4 experts\n  Choose one of 1, 2, 4."),
    ],
)
def test_impossible_degrees_are_refused_with_the_nearest(sets: tuple[str, ...], said: str) -> None:
    done = gem(*COMMON, *(word for value in sets for word in ("--set", value)))
    assert done.returncode == 2
    assert said in done.stderr
