"""The command ``gem bench scale``. Imports no torch until a command runs."""

import csv
import json as jsonlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from gem_core.spec import MachineError, RequestError, RunFailed
from gem_parallel.charts import check_name
from gem_parallel.scale.figures import FIELDS
from gem_parallel.scale.layouts import LAYOUTS
from gem_parallel.scale.runs import Bench, configuration

_SHOWN = {
    "ranks": 5,
    "layout": 22,
    "samples_per_s": 13,
    "ms": 9,
    "ms_p99": 9,
    "local_ms": 9,
    "exposed_ms": 10,
    "wait_ms": 8,
    "data_ms": 8,
    "predicted_ms": 12,
    "error_pct": 9,
}
LONGEST = 4
"""Collectives that are printed under a row; ``--json`` has all."""


def scale(
    recipe: Annotated[str, typer.Option("--recipe", "-c", help="A TOML file, or the name of a recipe.")],
    gpus: Annotated[str, typer.Option(help="Numbers of ranks. One rank is always run: everything is told relative to it.")] = "1,2,4,8",
    layout: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(LAYOUTS)}; may be repeated. Default: all.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a run; as many go before them untimed.")] = 20,
    scaling: Annotated[Literal["strong", "weak"], typer.Option(help="strong: one global batch for all; weak: it grows with the ranks.")] = "strong",
    device: Annotated[Literal["cuda", "cpu"], typer.Option(help="cpu: ranks are processes that share the cores, over gloo.")] = "cuda",
    overrides: Annotated[list[str] | None, typer.Option("--set", help="PATH=VALUE for all runs; may be repeated.")] = None,
    predict: Annotated[bool, typer.Option(help="Ask the cost model for each run; it takes seconds a row.")] = True,
    machine: Annotated[str | None, typer.Option(help="Predict for this described machine, not the one at hand.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of all runs; what is finished there is kept. Default: runs/scale-RECIPE.")] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write the results to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw samples a second and the step's parts into this .svg file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a recipe on 1, 2, 4 ... ranks in several layouts: samples a second, where a step goes, MFU, and what the cost model predicted."""
    ranks, layouts = rank_counts(gpus), known_layouts(layout or list(LAYOUTS))
    check_name("gem bench scale", plot)
    config = configuration(recipe, overrides or [])
    folder = (out or Path("runs") / f"scale-{Path(recipe).stem}").resolve()
    bench = Bench(recipe=recipe, sets=tuple(overrides or ()), config=config, steps=steps, weak=scaling == "weak", device=device, folder=folder)
    from gem_parallel.scale.predict import Predictor
    from gem_parallel.scale.table import left, measure, wanted

    if device == "cuda" and (counts := left(bench, wanted(bench, ranks, layouts))):
        check_gpus(max(counts))

    rows: list[dict[str, Any]] = []
    details: list[dict[str, Any]] = []
    for row, detail in measure(bench, ranks, layouts, Predictor(bench=bench, machine=machine) if predict else None):
        if not json:
            show(row, detail, head=not rows)
        rows.append(row)
        details.append(detail)
    folder.mkdir(parents=True, exist_ok=True)
    for file in (folder / "results.csv", *([] if csv_file is None else [csv_file])):
        write_rows(file, rows)
    if plot is not None and any(detail["status"] == "ran" for detail in details):
        from gem_parallel.scale.plot import draw

        draw(plot, rows, details)
    if json:
        print(jsonlib.dumps([{**row, **detail} for row, detail in zip(rows, details, strict=True)], indent=2))
    failed = [detail for detail in details if detail["status"] == "failed"]
    if failed:
        so = f"{len(failed)} of {len(rows)} runs failed"
        raise RunFailed("gem bench scale", so, f"Their logs: {', '.join(detail['log'] for detail in failed)}. A second call keeps what is finished.")


def rank_counts(text: str) -> list[int]:
    """``1,2,4`` in ascending order, 1 included.

    Raises:
        RequestError: it is no list of numbers of ranks.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise RequestError(f"gem bench scale --gpus {text}", "it is no list of numbers of ranks", "Write it as in --gpus 1,2,4,8.")
    return sorted({1, *map(int, words)})


def known_layouts(names: Sequence[str]) -> list[str]:
    """The names, each once; RequestError for one that there is not."""
    for name in names:
        if name not in LAYOUTS:
            raise RequestError(f"gem bench scale --layout {name}", "there is no such layout", f"Choose among {', '.join(LAYOUTS)}.")
    return list(dict.fromkeys(names))


def check_gpus(most: int) -> None:
    """Raise MachineError unless torch sees so many GPUs."""
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there < most:
        so = f"this machine has {there}"
        raise MachineError(f"gem bench scale on {most} GPUs", so, "Ask for fewer with --gpus, or run ranks on its cores with --device cpu.")


def show(row: Mapping[str, Any], detail: Mapping[str, Any], *, head: bool) -> None:
    """Print a row, and under it what it consists of."""
    if head:
        print(*(f"{name:>{width}}" for name, width in _SHOWN.items()))
    print(*(f"{_figure(row.get(name, '')):>{width}}" for name, width in _SHOWN.items()), row["note"], flush=True)
    if "mfu" in row:
        identity = f"MFU {row['mfu']:.3%} = local MFU {row['local_mfu']:.3%} x scaling ratio {row['scaling_ratio']:.1%}"
        most = sorted(detail["exposed"].items(), key=lambda item: -item[1])[:LONGEST]
        print(f"      {identity}", *(f"{name} {ms:.2f} ms" for name, ms in most), sep="; ", flush=True)


def _figure(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the results with a head line; a figure that there is not stays empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
