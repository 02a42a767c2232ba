"""``gem bench scale`` as a user calls it: one rank and two train on this machine's cores."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOY = ("--recipe", "toy", "--gpus", "2", "--steps", "3", "--device", "cpu", "--scaling", "weak", "--set", "data.batch_size=16")
SMALL = ("--set", "data.options.rows=640", "--set", "model.options.dim=16", "--set", "model.options.layers=1", "--set", "embedding.engine=sharded_2d")


def gem(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-m", "gem_core", "bench", "scale", *TOY, *SMALL, "--out", "runs", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, env=env)


def test_two_ranks_beside_one(tmp_path: Path) -> None:
    """Every column has a figure, and a second call runs nothing again."""
    done = gem(tmp_path, "--layout", "fsdp", "--csv", "r.csv")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    one, two = csv.DictReader((tmp_path / "r.csv").open())
    for row in (one, two):
        assert all(value for name, value in row.items() if name not in ("note", "exposed_by")), row
        assert "no prediction" not in row["note"]
        own, blocked = float(row["local_ms"]), float(row["exposed_ms"]) + float(row["wait_ms"])
        assert own > 0
        assert (blocked > 0) == (row["ranks"] == "2") == ("dense: weights " in row["exposed_by"])
        assert float(row["mfu"]) == pytest.approx(float(row["local_mfu"]) * float(row["scaling_ratio"]))
    assert float(one["scaling_ratio"]) == 1.0
    parts = json.loads((tmp_path / "runs/ranks-2/fsdp/result.json").read_text())["figures"]["parts"]
    assert any(name.startswith("exchange: dense: weights of layers.0") for name in parts)
    assert not (tmp_path / "runs/ranks-2/fsdp/run/checkpoints").exists(), "checkpoints of large models would fill the disk"
    machine = json.loads((tmp_path / "runs/ranks-2/machine.json").read_text())
    assert machine["world"] == 2
    assert all(machine[name] > 0 for name in ("flops", "memory", "latency", "bandwidth", "scatter", "reduce"))
    assert 0 < machine["host"] < 0.1, "fully_shard does something on the host for each collective"
    logs = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/*/log.txt")}
    assert len(logs) == 2
    again = gem(tmp_path, "--layout", "fsdp", "--csv", "again.csv", "--set", "run.seed=2")
    assert again.returncode == 2
    assert "was measured with other settings" in again.stderr
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/*/log.txt")} == logs
