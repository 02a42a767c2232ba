"""The largest batch that fits a GPU with and without strategy ``activations``, and what it costs in samples a second.

usage: python3 packages/gem-parallel/benchmarks/memory.py [--start ROWS] [--limit ROWS] [--set PATH=VALUE ...] [--csv FILE] [--write]

The recipe is gem-h200-512 with six layers and smaller tables. A batch fits when some steps of it end well, and its speed is that of the last.
The plain model's largest batch is found by doubling, then to a quarter. At twice that batch each way of planning gets what is left for the
blocks: the device's memory, less what a run keeps between steps, less twice what the plain model's steps take at most outside of its blocks; where
that does not fit, 0.9 and 0.8 of it. Slowdown compares samples a second with the plain model's largest batch. ``--write`` adds to results/memory.csv.
"""

import argparse
import csv
import gc
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch

from gem_core.bench.step import StepFigures, measure_steps
from gem_core.cli.bench_shared import measuring_in
from gem_core.cli.plan_memory import report_of
from gem_core.config.load import load_config
from gem_core.spec import RequestError
from gem_core.train.compose import Run, compose

RESULTS = Path(__file__).parent / "results" / "memory.csv"
COLUMNS = ("date", "device", "torch", "side", "rows", "budget_gb", "peak_gib", "samples_per_s", "slowdown", "policies", "note")
RECIPE = "gem-h200-512"
SETTINGS = (
    *("model.options.layers=6", "data.options.items=2000000", "data.options.users=200000", "data.options.workers=8"),
    *("train.ahead=false", 'parallel.strategies=["single", "activations"]'),
)
KEEP = 'parallel.options.activations.policies=[{pattern = "*", policy = "keep"}]'
PLANS = {"recompute, offload, fp8": ("recompute", "offload", "fp8"), "recompute, offload": ("recompute", "offload"), "recompute": ("recompute",)}
WARMUP, STEPS = 2, 4
SHARES = (1.0, 0.9, 0.8)
USABLE = 0.96
"""Of the device's memory, for what torch allocates."""


@contextmanager
def composed(*settings: str) -> Iterator[Run]:
    """A run in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        run = compose(load_config(RECIPE, [*SETTINGS, *settings, *measuring_in(folder)]))
        try:
            yield run
        finally:
            run.close()


def with_rows(run: Run, rows: int) -> None:
    """Let the run's batches have so many rows."""
    run.config = run.config.model_copy(update={"data": run.config.data.model_copy(update={"batch_size": rows})})


def steps_of(run: Run, rows: int) -> StepFigures | str:
    """Steps of so many rows, or why there are none: memory or the budget does not suffice."""
    with_rows(run, rows)
    try:
        return measure_steps(run, steps=STEPS, warmup=WARMUP)
    except torch.OutOfMemoryError:
        return "out of memory"
    except RequestError as error:
        if "budget" not in str(error):
            raise
        return error.so


def cleared(run: Run) -> int:
    """Bytes that the run keeps between steps, once what a failed step left is gone."""
    run.learner.optimizer.zero_grad()
    gc.collect()
    if run.world.device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(run.world.device)


def largest(run: Run, start: int, limit: int) -> tuple[int, StepFigures]:
    """The largest batch of the plain model, and its figures."""
    best: tuple[int, StepFigures] | None = None
    fits, too_many, rows = 0, limit + 1, start
    while rows <= limit and too_many - fits > max(1, fits // 4):
        found = steps_of(run, rows)
        cleared(run)
        tell("plain", rows, found)
        if isinstance(found, str):
            too_many = rows
        else:
            best, fits = (rows, found), rows
        rows = 2 * fits if too_many > limit else (fits + too_many) // 2
    if best is None:
        raise SystemExit(f"{start} rows do not fit; use a smaller --start")
    return best


def budget_at_twice(run: Run, rows: int, peak_gib: float | None) -> float:
    """GB for the blocks at twice ``rows``; on a CPU, whose memory is not measured, what they hold at ``rows``."""
    kept = cleared(run)
    with_rows(run, rows)
    held = sum(block.held for block in report_of(run).blocks)
    print(f"blocks hold {held / 1e9:.2f} GB of {rows} rows; {kept / 1e9:.2f} GB stay between steps", flush=True)
    if peak_gib is None:
        return held / 1e9
    memory = torch.cuda.get_device_properties(run.world.device).total_memory
    return (USABLE * memory - kept - 2 * (peak_gib * 2**30 - kept - held)) / 1e9


def policies_of(run: Run) -> str:
    """How many blocks have which policy."""
    told = next(strategy.describe()["policies"] for name, _, strategy in run.strategies if name == "activations")
    return " ".join(f"{count} {policy}" for policy, count in sorted(Counter(told.values()).items()))


def tell(side: str, rows: int, found: StepFigures | str) -> None:
    """Print one trial as it ends."""
    text = found if isinstance(found, str) else f"{found.samples_per_s:.1f} samples/s, {found.ms:.1f} ms, peak {found.peak_gib} GiB"
    print(f"{side}, {rows} rows: {text}", flush=True)


def planned(side: str, allow: Sequence[str], rows: int, budget: float, speed: float, common: Sequence[str]) -> dict[str, Any]:
    """A line of results for one way of planning, with the largest share of the budget that fits."""
    why = ""
    for share in SHARES:
        words = (f"parallel.options.activations.budget={share * budget:.9f}", f"parallel.options.activations.allow={json.dumps(list(allow))}")
        with composed(*common, *words) as run:
            found, policies = steps_of(run, rows), policies_of(run)
        del run
        gc.collect()
        torch.cuda.empty_cache()
        tell(f"{side} in {share * budget:.4g} GB ({policies})", rows, found)
        if not isinstance(found, str):
            figures = {
                "samples_per_s": f"{found.samples_per_s:.1f}",
                "slowdown": f"{speed / found.samples_per_s - 1:+.1%}",
                "peak_gib": found.peak_gib,
            }
            return {"side": side, "rows": rows, "budget_gb": f"{share * budget:.3f}", "policies": policies, **figures}
        why = found
    return {"side": side, "rows": rows, "budget_gb": f"{budget:.3f}", "note": why}


def lines(start: int, limit: int, common: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The lines of the results, one by one."""
    with composed(*common, KEEP) as run:
        rows, figures = largest(run, start, limit)
        budget = budget_at_twice(run, rows, figures.peak_gib)
    del run
    gc.collect()
    torch.cuda.empty_cache()
    speed = figures.samples_per_s
    yield {"side": "plain", "rows": rows, "samples_per_s": f"{speed:.1f}", "peak_gib": figures.peak_gib}
    for side, allow in PLANS.items():
        yield {"note": "nothing is left for the blocks", "side": side} if budget <= 0 else planned(side, allow, 2 * rows, budget, speed, common)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=int, default=512)
    parser.add_argument("--limit", type=int, default=1 << 16)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--csv", type=Path, default=None)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    about = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
    }
    for line in lines(asked.start, asked.limit, asked.settings):
        for path in (asked.csv, RESULTS if asked.write else None):
            if path is not None:
                fresh = not path.exists()
                with path.open("a", newline="", encoding="utf-8") as file:
                    writer = csv.DictWriter(file, COLUMNS)
                    if fresh:
                        writer.writeheader()
                    writer.writerow({**about, **line})


if __name__ == "__main__":
    main()
