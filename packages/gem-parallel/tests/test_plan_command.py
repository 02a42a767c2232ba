"""``gem plan`` as a user calls it, with both engines of this package."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def gem(*words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, "-W", "ignore", "-m", "gem_core", *words], capture_output=True, text=True, timeout=200, env=env)


@pytest.mark.parametrize(("engine", "options"), [("torchrec", "{}"), ("sharded_2d", "{replicas = 8}")])
def test_case_F08_F16_J07_a_plan_of_4096_ranks_without_a_gpu(engine: str, options: str) -> None:
    words = ("--world", "4096", "--machine", "h200", "--json", "--set", f"embedding.engine={engine}", "--set", f"embedding.options={options}")
    done = gem("plan", "-c", "toy", *words)
    assert done.returncode == 0, done.stderr[-2000:]
    out: dict[str, Any] = json.loads(done.stdout)
    assert sorted(entry["table"] for entry in out["tables"]) == ["action", "item", "tags", "user"]
    assert len(out["held"]) == len(out["sent_total"]) == 4096
    assert sum(out["held"]) >= sum(entry["rows"] * entry["dim"] * 4 for entry in out["tables"])


def test_a_pinned_plan_is_read_by_a_run_and_refused_on_other_ranks(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    common = ("-c", "toy", "--set", "embedding.engine=torchrec")
    assert gem("plan", *common, "--world", "1", "--write", str(plan)).returncode == 0
    pinned = ("--set", f"embedding.options.plan={plan}")
    train = gem("train", *common, *pinned, "--set", "train.max_steps=1", "--out", str(tmp_path / "run"))
    assert train.returncode == 0, train.stderr[-2000:]
    other = gem("plan", *common, *pinned, "--world", "2")
    assert other.returncode == 2
    assert "places tables on 1 ranks, here are 2" in other.stderr
