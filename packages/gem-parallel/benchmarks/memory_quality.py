"""Entropy of training with activations in eight bits beside training with them as they are.

usage: python3 packages/gem-parallel/benchmarks/memory_quality.py [--seeds N] [--jobs N] [--set PATH=VALUE ...] [--csv FILE]

Recipe ``synthetic`` is trained to its end with every block's saved activations kept, and held in eight bits (policy ``fp8``), from the same
seeds. The figure is the normalised entropy of the test split; a column says by how much that of eight bits differs from its twin.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

COLUMNS = ("date", "device", "torch", "seed", "rows", "ne_keep", "ne_fp8", "off")


def trained(policy: str, seed: int, settings: list[str]) -> dict[str, Any]:
    """Entropy on the test split of one run, and where it ran."""
    rule = f'parallel.options.activations.policies=[{{pattern = "*", policy = "{policy}"}}]'
    words = ['parallel.strategies=["single", "activations"]', rule, "train.checkpoint_last=false", f"run.seed={seed}", *settings]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "gem_core", "train", "-c", "synthetic", *(word for value in words for word in ("--set", value))]
        done = subprocess.run([*command, "--out", str(run)], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
        summary, manifest = (json.loads((run / f"{name}.json").read_text()) for name in ("summary", "manifest"))
    (task,) = summary["test"].values()
    print(f"{policy}, seed {seed}: {task['ne']:.6f}", flush=True)
    return {"ne": task["ne"], "rows": summary["rows"], "device": manifest["machine"]["name"], "torch": manifest["versions"]["torch"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--csv", type=Path, default=None)
    asked = parser.parse_args()
    pairs = [(policy, seed) for seed in range(asked.seeds) for policy in ("keep", "fp8")]
    with ThreadPoolExecutor(asked.jobs) as pool:
        found = dict(zip(pairs, pool.map(lambda pair: trained(*pair, asked.settings), pairs), strict=True))
    rows = []
    for seed in range(asked.seeds):
        keep, fp8 = found["keep", seed], found["fp8", seed]
        about = {"date": date.today().isoformat(), "seed": seed, **{name: keep[name] for name in ("device", "torch", "rows")}}
        rows.append({**about, "ne_keep": f"{keep['ne']:.6f}", "ne_fp8": f"{fp8['ne']:.6f}", "off": f"{fp8['ne'] / keep['ne'] - 1:+.4%}"})
    for target in (sys.stdout, *([] if asked.csv is None else [asked.csv.open("a", newline="", encoding="utf-8")])):
        writer = csv.DictWriter(target, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
