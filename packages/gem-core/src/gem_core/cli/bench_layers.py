"""``gem bench layers``: every layer of a composed run alone, held against the roofline of this machine. Imports no torch until it runs."""

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gem_core.cli.bench_shared import Config, Json, Overrides, measuring_in, stamp, write_csv
from gem_core.cli.output import print_json, print_table
from gem_core.config.load import load_config

if TYPE_CHECKING:
    from gem_core.bench.layers import LocalMfu


def layers(
    config: Config,
    overrides: Overrides = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write a row for each layer to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the roofline to this file, such as FILE.svg.")] = None,
    repeats: Annotated[int, typer.Option(min=0, help="Repetitions of each layer; 0 takes 20 on a GPU and 3 on a CPU.")] = 0,
    json: Json = False,
) -> None:
    """Time each layer of a configuration alone, forward and backward, and say how far from the roofline it is."""
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_config(config, [*(overrides or []), *measuring_in(folder)])
        from gem_core.bench.layers import measure_layers
        from gem_core.bench.roofline import machine
        from gem_core.train.compose import compose

        run = compose(loaded)
        try:
            found = measure_layers(run, machine(run.world.device, run.precision.compute_dtype()), repeats=repeats)
        finally:
            run.close()
    rows = as_rows(found, loaded.name)
    if csv_file is not None:
        write_csv(csv_file, rows)
    if plot is not None:
        _draw(found, loaded.name, plot)
    if json:
        print_json({**summary(found), "layers": rows})
        return
    _print(found, loaded.name)


def as_rows(found: "LocalMfu", recipe: str) -> list[dict[str, Any]]:
    """A row for each layer: what was measured, and what follows from it."""
    rows = []
    for row in found.rows:
        values = asdict(row)
        times = {f"{name}_ms": round(1e3 * values.pop(name), 6) for name in ("forward", "backward", "host", "floor")}
        ms = 1e3 * row.seconds
        derived = {"ms": round(ms, 6), "intensity": round(row.intensity, 3), "mfu": round(found.mfu_of(row), 6)}
        rows.append({**stamp(recipe, found.machine.name), **values, **times, **derived, "over_floor": round(row.seconds / row.floor, 3)})
    return rows


def summary(found: "LocalMfu") -> dict[str, Any]:
    """Figures of the whole model."""
    peak, where = found.machine.peak, found.machine
    return {
        "local_mfu": found.mfu,
        "covered": found.covered,
        "ms": 1e3 * found.seconds,
        "floor_ms": 1e3 * sum(row.count * row.floor for row in found.counted),
        "model_flops": found.flops,
        "samples": found.samples,
        "device": where.name,
        "peak": {"flops_per_second": peak.flops_per_second, "dtype": peak.dtype, "source": peak.source},
        "bandwidth": where.bandwidth,
    }


def _draw(found: "LocalMfu", recipe: str, path: Path) -> None:
    from gem_core.bench.roofline import Point, draw

    drawn = [row for row in found.counted if row.flops]  # a logarithm has no place for the others
    points = [Point(name=f"{row.layer}  {row.module}", intensity=row.intensity, rate=row.flops / row.seconds, bound=row.bound) for row in drawn]
    title = f"{recipe} on {found.machine.name}: layers alone, forward and backward. Local MFU {100 * found.mfu:.1f} %"
    draw(points, found.machine, title, path)


def _print(found: "LocalMfu", recipe: str) -> None:
    where = found.machine
    print(f"{recipe}, {found.samples} rows, on {where.name}: peak {where.peak.flops_per_second / 1e12:.4g} TFLOP/s {where.peak.dtype}", end=" ")
    print(f"({where.peak.source}), a copy moves {where.bandwidth / 1e9:.4g} GB/s\n")
    columns = ("LAYER", "FIRST", "TIMES", "MS", "GFLOP", "MB", "FLOP/B", "MFU", "FLOOR MS", "BOUND BY", "OVER FLOOR")
    print_table(columns, [_cells(found, row) for row in found.rows])
    print(f"\nlocal MFU {100 * found.mfu:.2f} %: {found.covered * found.flops / 1e9:.4g} GFLOP in {1e3 * found.seconds:.4g} ms, ", end="")
    print(f"{100 * found.covered:.1f} % of the model's FLOPs are in layers; indented rows are parts, counted with their layer")


def _cells(found: "LocalMfu", row: Any) -> tuple[str, ...]:
    name = f"  {row.layer}" if row.part_of else row.layer
    figures = (1e3 * row.seconds, row.flops / 1e9, row.moved / 1e6, row.intensity)
    floor = (f"{1e3 * row.floor:.4g}", row.bound, f"{row.seconds / row.floor:.1f}x")
    return (name, row.module, str(row.count), *(f"{figure:.4g}" for figure in figures), f"{100 * found.mfu_of(row):.2f} %", *floor)
