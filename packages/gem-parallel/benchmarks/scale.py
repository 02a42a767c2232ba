"""Communication and scaling on several ranks of one machine: ``gem bench comm``, then ``gem bench scale`` of two recipes, weak and strong.

usage: python3 packages/gem-parallel/benchmarks/scale.py [--device cuda|cpu] [--ranks 1,2,4,8] [--steps N] [--out FOLDER] [--dry] [--write]

On GPUs recipes are measured as they are. On CPUs ranks are gloo processes that share the cores, and recipes are made small by the settings below:
that shows that all of it works and how far predictions are off there, not how GPUs scale. Each command is printed before it runs; one that fails is
told, and the others go on. ``--out`` keeps what is finished for the next call. ``--dry`` prints the commands alone. ``--write`` puts tables, plots
and a list of the commands, with seconds and the load of the machine, into results/, in the place of those of the same device.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
RECIPES = {"gem-h200-1024": ("data.options.test_rows=1024", "data.options.workers=6"), "embedding-heavy": ()}
"""What is set on GPUs: no figure of a step depends on these."""
SMALL = {
    "gem-h200-1024": (
        *("precision.recipe=fp32", "precision.options={}", "kernels.on_reference=warn", "data.options.workers=0", "data.batch_size=64"),
        *("data.options.rows=4096", "data.options.test_rows=64", "data.options.items=20000", "data.options.users=2000"),
        "data.options.sequences=["
        '{name="views", mean=30.0, longest=128}, {name="clicks", mean=15.0, longest=64}, {name="buys", mean=8.0, longest=32}]',
        *("model.options.dim=128", "model.options.layers=2", "model.options.tokens=8", "model.options.x_sum=6", "model.options.head.hidden=[128]"),
        "model.options.experts=[" + ", ".join(['{kind="wukong", rank=16, hidden=[256]}'] * 2 + ['{kind="cross", rank=32}'] * 2) + "]",
        *(
            "model.options.features.embedding_dim=32",
            "model.options.sequences={}",
            "model.options.sequence.dim=128",
            "model.options.sequence.heads=4",
        ),
        *("model.options.sequence.keys_per_token=4", "model.options.sequence.seeds=12", "model.options.sequence.pooled_tokens=4"),
    ),
    "embedding-heavy": (
        *("precision.recipe=fp32", "data.batch_size=512", "data.options.rows=8192", "data.options.test_rows=64", "data.options.users=2000"),
        *("data.options.groups=50", "data.options.items=200000", "data.options.categories=50000", "data.options.history_length=16"),
        "data.options.mean_events=10.0",
    ),
}
"""Recipes for processes on a few cores."""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost", "--nproc-per-node")


def commands(device: str, ranks: list[int], steps: int, out: Path) -> dict[str, list[str]]:
    """By the name of its results."""
    found = {}
    for count in ranks[1:]:
        folder = [f"--csv={out / f'comm-{device}.csv'}", f"--plot={out / f'comm-{device}-{count}.svg'}"]
        found[f"comm-{device}-{count}"] = [*TORCHRUN, str(count), "-m", "gem_core", "bench", "comm", *folder]
    for scaling in ("weak", "strong"):
        for recipe in RECIPES:
            sets = [word for value in (SMALL if device == "cpu" else RECIPES)[recipe] for word in ("--set", value)]
            name = f"scale-{device}-{recipe}-{scaling}"
            asked = ["--device", device, "--gpus", ",".join(map(str, ranks)), "--scaling", scaling, "--steps", str(steps), *sets]
            files = [f"--out={out / name}", f"--csv={out / f'{name}.csv'}", f"--plot={out / f'{name}.svg'}"]
            found[name] = [sys.executable, "-m", "gem_core", "bench", "scale", "--recipe", recipe, *asked, *files]
    return found


def run(name: str, words: list[str], out: Path) -> dict[str, Any]:
    """What was run, when it was, how long it took and beside which load."""
    first = out / name.replace("-strong", "-weak") / "ranks-1"
    if name.endswith("-strong") and first.exists() and not (out / name / "ranks-1").exists():
        shutil.copytree(first, out / name / "ranks-1")  # on one rank both are the same
    load, begun = os.getloadavg()[0], time.monotonic()
    code = subprocess.run(words, env={"OMP_NUM_THREADS": "1" if name.split("-")[1] == "cpu" else "8", **os.environ}).returncode
    shown = [word.replace(str(out), "OUT").replace(sys.executable, "python3") for word in words]
    about = {"date": date.today().isoformat(), "machine": f"{platform.machine()}, {os.cpu_count()} cores", "torch": torch.__version__}
    told = {"load_before": round(load, 1), "load_after": round(os.getloadavg()[0], 1), "seconds": round(time.monotonic() - begun)}
    return {"name": name, "command": " ".join(shown), "exit_code": code, **about, **told}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", default="1,2,4,8")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/scale"))
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    out, device = asked.out.resolve(), asked.device
    out.mkdir(parents=True, exist_ok=True)
    (out / f"comm-{device}.csv").unlink(missing_ok=True)  # to which rows are added
    ran = []
    for name, words in commands(device, sorted({1, *map(int, asked.ranks.split(","))}), asked.steps, out).items():
        print("$", *words, flush=True)
        if not asked.dry:
            ran.append(run(name, words, out))
            (out / f"scale-{device}.json").write_text(json.dumps(ran, indent=1) + "\n", encoding="utf-8")
    if asked.write and not asked.dry:
        for file in sorted(out.glob(f"*-{device}*.*")):
            shutil.copy(file, RESULTS / file.name)
    sys.exit(max((abs(row["exit_code"]) for row in ran), default=0))


if __name__ == "__main__":
    main()
