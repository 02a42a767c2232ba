"""The largest batch that fits a GPU with and without strategy ``activations``, and what it costs in samples a second.

usage: python3 packages/gem-parallel/benchmarks/memory.py [--start ROWS] [--limit ROWS] [--device DEVICE] [--set PATH=VALUE ...] [--write]

Every trial is ``gem train`` in a fresh process: a batch fits when 12 steps of it end well, and its speed is that of the last 4. The plain model's
largest batch is found by doubling, then to an eighth. ``gem plan --memory`` says what its blocks hold, and at twice the batch each way of planning
gets that many bytes as its budget, times 0.9 and so on until the batch fits. Slowdown compares samples a second with the plain model's largest batch.
``--write`` adds lines to results/memory.csv.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results" / "memory.csv"
COLUMNS = ("date", "device", "torch", "side", "rows", "budget_gb", "samples_per_s", "slowdown", "policies")
MODEL = (
    *("-c", "synthetic", "--set", "data.options.mean_events=200", "--set", "data.options.history_length=512", "--set", "data.options.test_rows=256"),
    *("--set", "model.options.dim=512", "--set", "model.options.layers=6", "--set", "model.options.sequence.dim=512"),
    *("--set", "model.options.sequence.heads=4", "--set", "model.options.sequence.attention=window", "--set", "precision.recipe=bf16"),
)
PLANS = {"recompute": ("recompute",), "recompute, offload": ("recompute", "offload"), "recompute, offload, fp8": ("recompute", "offload", "fp8")}
STEPS, BUDGETS = 12, (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)


class Bench:
    """Trials with one set of settings."""

    def __init__(self, device: str, settings: Sequence[str]) -> None:
        self._words = [*MODEL, "--set", f"run.device={device}", *(word for setting in settings for word in ("--set", setting))]

    def trial(self, rows: int, more: Sequence[str] = ()) -> tuple[float, str] | None:
        """Samples a second and the policies in the manifest; None where memory or the budget does not suffice."""
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            size = ("--set", f"data.batch_size={rows}", "--set", f"data.options.rows={rows * STEPS}", "--set", f"train.max_steps={STEPS}")
            done = self._gem("train", *size, "--set", "train.log_every=4", "--set", "train.checkpoint_background=false", *more, "--out", str(run))
            if done is None:
                return None
            records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
            told = json.loads((run / "manifest.json").read_text())["parallel"].get("activations", {}).get("policies", {})
        counts = {policy: list(told.values()).count(policy) for policy in sorted(set(told.values()))}
        return [r for r in records if r["event"] == "train"][-1]["samples_per_second"], " ".join(f"{n} {policy}" for policy, n in counts.items())

    def held(self, rows: int) -> int:
        """Bytes that the blocks of the plain model hold at this batch."""
        keep = '[{pattern = "*", policy = "keep"}]'
        size = ("--set", f"data.batch_size={rows}", "--set", f"data.options.rows={2 * rows}")
        done = self._gem("plan", "--memory", "--json", *size, *activations(f"parallel.options.activations.policies={keep}"))
        if done is None:
            raise SystemExit(f"{rows} rows fit a run but not the plan of memory")
        return sum(block["held"] for block in json.loads(done)["blocks"])

    def _gem(self, *words: str) -> str | None:
        command = [sys.executable, "-m", "gem_core", words[0], *self._words, *words[1:]]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout
        if "out of memory" in done.stderr or "a budget of" in done.stderr:
            return None
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")


def activations(*settings: str) -> list[str]:
    """The words that bring the strategy into a run."""
    return [word for setting in ('parallel.strategies=["single", "activations"]', *settings) for word in ("--set", setting)]


def largest(bench: Bench, start: int, limit: int) -> tuple[int, float]:
    """The largest batch of the plain model and its samples a second."""
    fits, too_many = 0, limit + 1
    speed, rows = 0.0, start
    while rows <= limit and too_many - fits > max(1, fits // 8):
        found = bench.trial(rows)
        print(f"plain, {rows} rows: {'does not fit' if found is None else f'{found[0]:.0f} samples/s'}", flush=True)
        if found is None:
            too_many = rows
        else:
            fits, speed = rows, found[0]
        rows = 2 * fits if too_many > limit else (fits + too_many) // 2
    if not fits:
        raise SystemExit(f"{start} rows do not fit; use a smaller --start")
    return fits, speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=int, default=256)
    parser.add_argument("--limit", type=int, default=1 << 16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    bench = Bench(asked.device, asked.settings)
    rows, speed = largest(bench, asked.start, asked.limit)
    held = bench.held(rows)
    lines: list[dict[str, Any]] = [{"side": "plain", "rows": rows, "samples_per_s": f"{speed:.1f}", "slowdown": "", "policies": "", "budget_gb": ""}]
    for name, allow in PLANS.items():
        for share in BUDGETS:
            budget = share * held / 1e9
            options = (f"parallel.options.activations.budget={budget:.9f}", f"parallel.options.activations.allow={json.dumps(allow)}")
            found = bench.trial(2 * rows, activations(*options))
            print(f"{name}, {2 * rows} rows in {budget:.3g} GB: {'does not fit' if found is None else f'{found[0]:.0f} samples/s'}", flush=True)
            if found is not None:
                figures = {"samples_per_s": f"{found[0]:.1f}", "slowdown": f"{speed / found[0] - 1:+.1%}", "policies": found[1]}
                lines.append({"side": name, "rows": 2 * rows, "budget_gb": f"{budget:.3f}", **figures})
                break
    machine = torch.cuda.get_device_name() if asked.device == "cuda" else "cpu"
    lines = [{"date": date.today().isoformat(), "device": machine, "torch": torch.__version__, **line} for line in lines]
    writer = csv.DictWriter(sys.stdout, COLUMNS)
    writer.writeheader()
    writer.writerows(lines)
    if asked.write:
        fresh = not RESULTS.exists()
        with RESULTS.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if fresh:
                writer.writeheader()
            writer.writerows(lines)


if __name__ == "__main__":
    main()
