"""``gem bench breakdown``: where the time of a training step goes. Imports no torch until it runs."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gem_core.cli.bench_shared import Config, Json, Overrides, measuring_in, stamp, write_csv
from gem_core.cli.output import print_json, print_table
from gem_core.config.load import load_config

if TYPE_CHECKING:
    from gem_core.bench.breakdown import Breakdown

LONGEST = 48
"""Characters of a kernel's name in the table."""


def breakdown(
    config: Config,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps under the profiler, and as many before it.")] = 5,
    warmup: Annotated[int, typer.Option(min=1, help="Steps before both.")] = 3,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write a row for each category to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a stacked bar to this file, such as FILE.svg.")] = None,
    json: Json = False,
) -> None:
    """Put each microsecond of some profiled steps of a configuration into one category."""
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_config(config, [*(overrides or []), *measuring_in(folder)])
        from gem_core.bench.breakdown import draw, profile_steps
        from gem_core.bench.roofline import device_name
        from gem_core.train.compose import compose

        run = compose(loaded)
        try:
            found = profile_steps(run, steps=steps, warmup=warmup)
            device, leads = device_name(run.world.device), run.world.leads
        finally:
            run.close()
    if not leads:
        return
    rows = as_rows(found, stamp(loaded.name, device))
    if csv_file is not None:
        write_csv(csv_file, rows)
    if plot is not None:
        draw(found, f"{loaded.name} on {device}: a step of {1e3 * found.step:.4g} ms under the profiler, {1e3 * found.plain:.4g} ms without", plot)
    if json:
        names = [{"category": category, "name": name, "ms": 1e3 * spent} for (category, name), spent in found.names.items()]
        print_json({"categories": rows, "names": names})
        return
    _print(found, loaded.name, device)


def as_rows(found: "Breakdown", head: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each category."""
    whole = {"steps": found.steps, "step_ms": round(1e3 * found.step, 6), "plain_ms": round(1e3 * found.plain, 6)}
    parts = ((name, round(1e3 * spent, 6), round(found.share(name), 6)) for name, spent in found.seconds.items())
    return [{**head, "category": name, "ms": ms, "share": share, **whole} for name, ms, share in parts]


def _print(found: "Breakdown", recipe: str, device: str) -> None:
    profiled, plain = f"{1e3 * found.step:.4g} ms under the profiler", f"{1e3 * found.plain:.4g} ms before it"
    print(f"{recipe} on {device}: {found.steps} steps of {profiled}, as many of {plain}\n")
    rows = [(name, f"{1e3 * spent:.4g}", f"{100 * found.share(name):.1f} %", _most(found, name)) for name, spent in found.seconds.items()]
    print_table(("CATEGORY", "MS", "SHARE", "MOST OF IT"), [*rows, ("in all", f"{1e3 * found.step:.4g}", "100 %", "")])


def _most(found: "Breakdown", category: str) -> str:
    name = next((name for of, name in found.names if of == category), "")
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 3]}..."
