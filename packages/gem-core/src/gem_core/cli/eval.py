"""``gem eval``: evaluate the newest checkpoint of a run on its test split."""

from pathlib import Path
from typing import Annotated

import typer

from gem_core.cli.output import print_json, print_table
from gem_core.cli.train import COLUMNS, metric_rows


def evaluate(
    run: Annotated[Path, typer.Argument(help="Run folder, for example runs/quickstart.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Replace a configuration value: a.b=c. May be repeated.")] = None,
    predictions: Annotated[Path | None, typer.Option(help="Write logit, label and weight of every row into this NPZ file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Evaluate the newest checkpoint of a run; the run folder stays as it is."""
    from gem_core.train.run import evaluate_run

    done = evaluate_run(run, overrides or (), predictions=predictions)
    if not done:
        return
    if json:
        print_json(done)
        return
    print_table(COLUMNS, metric_rows(done["test"], done["baselines"]))
    print(f"step {done['step']}, {done['eval_seconds']:.1f} s")
