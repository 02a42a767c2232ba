"""``gem precision``."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Hold number formats to the quality of a run.")


@app.command()
def guard(
    config: Annotated[str, typer.Option("--config", "-c", help="A TOML file, or the name of a recipe of `gem recipes list`.")],
    recipe: Annotated[str, typer.Option(help="The precision recipe on trial.")],
    out: Annotated[Path, typer.Option(help="Folder for the runs and guard.json; runs that are there are not repeated.")],
    against: Annotated[str, typer.Option(help="The precision recipe it is held against.")] = "bf16_islands",
    seeds: Annotated[str, typer.Option(help="Seeds, with commas: a pair of runs for each.")] = "1,2,3",
    overrides: Annotated[list[str] | None, typer.Option("--set", help="PATH=VALUE for all runs; may be repeated.")] = None,
    options: Annotated[list[str] | None, typer.Option("--option", help="KEY=VALUE: an option of the recipe on trial; may be repeated.")] = None,
) -> None:
    """Train pairs of runs that differ in their number formats alone, and compare normalised entropy and calibration. Exit code 1 on a breach."""
    from rich.console import Console
    from rich.table import Table

    from gem_core.spec import RequestError
    from gem_precision.guard.compare import CALIBRATION_LIMIT
    from gem_precision.guard.runs import Plan, run_pairs

    numbers = seeds.split(",")
    if not all(number.strip().isdecimal() for number in numbers):
        raise RequestError(f"--seeds {seeds}", "they are no whole numbers", "Write --seeds 1,2,3.")
    plan = Plan(
        config=config,
        recipe=recipe,
        against=against,
        seeds=[int(number) for number in numbers],
        overrides=overrides or (),
        options=[f"precision.options.{option}" for option in options or ()],
        folder=out,
    )
    out.mkdir(parents=True, exist_ok=True)
    verdicts = run_pairs(plan, lambda text: print(text, flush=True))
    table = Table("TASK", f"NE {against}", f"NE {recipe}", "DIFFERENCE %", "95 % INTERVAL", "BAND OF SEEDS %", "CALIBRATION %", "VERDICT", box=None)
    for v in verdicts:
        band = "one seed" if v.band is None else f"{v.band:.4f}"
        verdict = "holds" if v.holds else f"BREACH (limits {v.limit:.4f} and {CALIBRATION_LIMIT})"
        interval = f"{v.low:+.4f} .. {v.high:+.4f}"
        table.add_row(v.task, f"{v.ne[0]:.5f}", f"{v.ne[1]:.5f}", f"{v.difference:+.4f}", interval, band, f"{v.calibration:+.4f}", verdict)
    Console(width=160).print(table)
    if not all(v.holds for v in verdicts):
        raise typer.Exit(1)


@app.command()
def sweep(
    config: Annotated[str, typer.Option("--config", "-c", help="A TOML file, or the name of a recipe of `gem recipes list`.")],
    out: Annotated[Path, typer.Option(help="Folder of the run that is probed; precision-probe.json and precision.svg go there.")],
    steps: Annotated[int, typer.Option(min=1, help="Training steps to probe.")] = 20,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="PATH=VALUE for the run; may be repeated.")] = None,
) -> None:
    """Rank the places of a model by what each format would get wrong there, on real batches, and time linear layers. `auto` reads the result."""
    from gem_precision.probe.record import all_times, read_probe
    from gem_precision.probe.report import draw, ranking, speeds
    from gem_precision.run import gem

    words = [word for pair in ("precision.recipe=probe", f"train.max_steps={steps}", *(overrides or ())) for word in ("--set", pair)]
    gem("train", "-c", config, "--out", str(out), *words)
    rows = read_probe(out)
    ranking(rows)
    speeds(all_times(out))
    print(f"drawn: {draw(rows, out)}")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    out: Annotated[Path | None, typer.Option(help="The page to write; by default precision.html in the run's folder.")] = None,
) -> None:
    """Draw a run's number formats: decisions with reasons, what operands looked like, what the guard saw and did, and the probe."""
    from gem_precision.report import PAGE, write_report

    print(f"report: {write_report(run, out or run / PAGE)}")
