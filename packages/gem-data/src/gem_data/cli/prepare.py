"""``gem data prepare`` and ``gem data audit``."""

import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from gem_core.spec import RequestError
from gem_data.cli.known import write_tables
from gem_data.splits import SplitWarning

UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}


def prepare_command(
    definition: Annotated[str, typer.Argument(help="TOML file that says what to prepare, or with --path a data set of `gem data known`.")],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    path: Annotated[Path | None, typer.Option(help="Raw files of a known data set; its tables are written to OUT-tables first.")] = None,
    choose: Annotated[list[str] | None, typer.Option(help="A choice of the known data set, as NAME=VALUE.")] = None,
    engine: Annotated[str, typer.Option(help="duckdb: this machine; spark: the Spark session of the environment.")] = "duckdb",
    memory: Annotated[str, typer.Option(help="Memory for DuckDB and the writer; larger data goes through disk.")] = "4GB",
) -> None:
    """Make training rows with point-in-time histories out of raw tables."""
    from gem_data.prepare import prepare

    limit = parse_memory(memory)
    file = Path(definition) if path is None and not choose else _known(definition, path, out, choose or [])
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with (
        warnings.catch_warnings(record=True) as caught,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        warnings.simplefilter("always", SplitWarning)
        task = progress.add_task("starting", total=None)
        data = prepare(file, out, engine=engine, memory=limit, report=lambda step: progress.update(task, description=step))
    for warning in caught:
        print(f"warning: {warning.message}", file=sys.stderr)
    print_account(data)
    print(f"prepared: {out}")


def _known(name: str, path: Path | None, out: Path, choose: Sequence[str]) -> Path:
    """The definition of a known data set, whose tables are written beside ``out``."""
    if path is None:
        raise RequestError("--choose", "it belongs to a known data set, whose raw files --path names", "Give --path, or leave --choose out.")
    if out.exists():
        raise RequestError(f"folder {out}", "it exists already", "Name a new folder, or remove this one.")
    return write_tables(name, path, out.with_name(f"{out.name}-tables"), choose)


def audit_command(folder: Annotated[Path, typer.Argument(help="A folder that `gem data prepare` made.")]) -> None:
    """Count everything in a prepared folder again and compare; exit code 1 where something differs."""
    from gem_data.audit import audit

    data = audit(folder)
    print_account(data)
    print(f"audited: {folder}: the files hold what data.json says")


def parse_memory(text: str) -> int:
    """Bytes of ``4GB`` and the like; RequestError where it is no size of at least 256 MB."""
    for unit, factor in UNITS.items():
        number = text.removesuffix(unit)
        if number != text and number.strip().isdigit() and int(number) * factor >= 256 * UNITS["MB"]:
            return int(number) * factor
    raise RequestError(f"memory {text!r}", "it is no size of 256MB or more", f"Give a whole number and one of {', '.join(UNITS)}.")


def print_account(data: Mapping[str, Any]) -> None:
    """The ledgers as one table: rows, users and the events of each history."""
    table = Table("WHAT", "READ", "BECAME", "COUNT", box=None)
    for what, ledger in {"rows": data["ledger"], "users": data["users"], **{f"events: {name}": e for name, e in data["events"].items()}}.items():
        for k, (part, count) in enumerate((part, count) for part, count in ledger.items() if part != "read"):
            table.add_row(*((what, f"{ledger['read']:,}") if not k else ("", "")), part, f"{count:,}")
    for side, splits in data["sides"].items():
        for split, counts in splits.items():
            table.add_row(f"join: {side}", f"{sum(counts.values()):,}", f"{split} rows without a match", f"{counts['unmatched']:,}")
    for split, counts in data["unknown"].items():
        for feature, count in counts.items():
            if count:
                table.add_row(f"{split}: {feature}", "", "unknown or missing", f"{count:,}")
    Console(width=None if Console().is_terminal else 120).print(table)
    if data["calibration"]:
        c = data["calibration"]
        print(f"negatives of {c['task']}: {c['kept']:,} of {c['negatives']:,} kept at rate {c['rate']}; correct predictions q by {c['correction']}")
