"""``gem train``: train a model from a configuration file or a recipe, or go on with a run."""

import json as jsonlib
from pathlib import Path
from typing import Annotated, Any

import typer

from gem_core.cli.output import print_table
from gem_core.config.load import LoadedConfig, load_config
from gem_core.spec import RequestError


def train(
    config: Annotated[str | None, typer.Option("--config", "-c", help="A TOML file, or the name of a recipe.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="PATH=VALUE; may be repeated.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Run folder to go on with; without -c its own configuration is used.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Short for --set run.seed=N.")] = None,
    out: Annotated[str | None, typer.Option(help="Run folder; short for --set run.out=DIR.")] = None,
) -> None:
    """Train a model, evaluate it, and write a run folder with checkpoints, curves and a report."""
    loaded = configuration(config, overrides or [], resume=resume, seed=seed, out=out)
    from gem_core.train.run import train as run

    summary = run(loaded, resume=resume)
    if summary:
        print_table(COLUMNS, metric_rows(summary["test"], summary["baselines"]))
        print(closing(summary, Path(loaded.config.run.out)))


def configuration(config: str | None, overrides: list[str], *, resume: Path | None, seed: int | None, out: str | None) -> LoadedConfig:
    """The configuration that a command line asks for; the short options come last and win.

    Raises:
        RequestError: neither a configuration nor a run is named, the run is none, or a resumed run is sent to another folder.
    """
    short = [] if seed is None else [f"run.seed={seed}"]
    if resume is None:
        if config is None:
            raise RequestError("gem train", "no configuration is named", "Use -c FILE or -c RECIPE (`gem recipes list`), or --resume RUN.")
        return load_config(config, [*overrides, *short, *([] if out is None else [_out(out)])])
    from gem_core.train.folder import require_run

    require_run(resume)
    if out is not None and Path(out).resolve() != resume.resolve():
        raise RequestError(f"--resume {resume} --out {out}", "a resumed run goes on in its own folder", "Leave --out away.")
    return load_config(config or resume / "config.toml", [*overrides, *short, _out(str(resume))])


COLUMNS = ("TASK", "MODEL", "AUC", "NE", "CALIBRATION", "ROWS")


def metric_rows(test: dict[str, Any], baselines: dict[str, dict[str, dict[str, float]]]) -> list[tuple[str, ...]]:
    """A line for each task, and one for each of its baselines under it."""
    rows = []
    for task, m in test.items():
        rows.append((task, "this run", *(number(m[key]) for key in ("auc", "ne", "calibration")), str(m["rows"])))
        for name, tasks in baselines.items():
            if task in tasks:
                rows.append(("", name, *(number(tasks[task].get(key)) for key in ("auc", "ne", "calibration")), ""))
    return rows


def number(value: float | None) -> str:
    """Four digits, or a dash where there is no figure."""
    return "-" if value is None else f"{value:.4f}"


def closing(summary: dict[str, Any], folder: Path) -> str:
    """What stands under the table: why a metric is undefined, rates, and where the report is."""
    lines = [f"{task} {name}: {why}" for task, m in summary["test"].items() for name, why in m["reasons"].items()]
    if summary["stopped"]:
        lines.append(f"stopped: {summary['stopped']}")
    rates = f"{summary['samples_per_second']:.0f} samples/s, MFU {100 * summary['mfu']:.2f} % of {summary['peak']['source']}"
    lines.append(f"{summary['rows']} rows in {summary['train_seconds']:.1f} s ({rates}), evaluation {summary['eval_seconds']:.1f} s")
    return "\n".join([*lines, f"report: {folder / 'report.html'}"])


def _out(path: str) -> str:
    return f"run.out={jsonlib.dumps(path)}"
