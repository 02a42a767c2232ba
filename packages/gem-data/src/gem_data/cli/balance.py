"""``gem data balance``: what balancing does, simulated or on a folder's own rows; and the cost of a row from measured steps."""

import csv
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gem_core.spec import RequestError


def balance_command(
    folder: Annotated[Path | None, typer.Argument(help="Folder with schema.toml: shows costs and mix of its batches, plain and balanced.")] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="Simulate many ranks.")] = False,
    ranks: Annotated[list[int] | None, typer.Option(help="Ranks to simulate; may be repeated. By default 8, 256 and 2048.")] = None,
    rows: Annotated[int, typer.Option(help="Rows of a rank's batch.")] = 1024,
    window: Annotated[int, typer.Option(help="Batches of the window in which a rank balances.")] = 8,
    train: Annotated[str, typer.Option(help="Pattern of the folder's training files; by default those that data.json lists.")] = "",
    out: Annotated[Path | None, typer.Option(help="CSV file to write the table to.")] = None,
    fit: Annotated[Path | None, typer.Option(help="CSV of steps (tokens, pairs, rows, seconds): print the cost model that fits.")] = None,
) -> None:
    """Balance of batches: simulate it, measure it on a folder, or fit the cost model."""
    if sum((folder is not None, simulate, fit is not None)) != 1:
        raise RequestError("gem data balance", "it does one of three things", "Give a folder, --simulate, or --fit STEPS.csv.")
    if fit is not None:
        _fit(fit)
        return
    if simulate:
        from gem_data.feed.simulate import simulate as run

        title = f"{rows} rows a batch, balanced over {window} batches"
        records = [figure.as_dict() for figure in run(ranks or [8, 256, 2048], rows=rows, window=window)]
    else:
        assert folder is not None
        title = f"first {window} batches of {rows} rows of {folder}"
        records = _measure(folder, train, rows, window)
    _show(title, records)
    if out is not None:
        with out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(records[0]))
            writer.writeheader()
            writer.writerows(records)


def _measure(folder: Path, train: str, rows: int, window: int) -> list[dict[str, Any]]:
    from gem_data.sources.files import load

    patterns = (train,) if train else ()
    return load(path=folder, train=patterns, test=patterns, window=rows * window).balance_report(rows)


def _fit(path: Path) -> None:
    import numpy as np

    from gem_data.feed.balance import CostModel

    asked, names = f"measured steps {path}", ("tokens", "pairs", "rows", "seconds")
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
        columns = {name: np.array([float(line[name]) for line in lines]) for name in names}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise RequestError(asked, f"it cannot be read ({error!r})", f"Give a CSV with the columns {', '.join(names)}.") from error
    model = CostModel.fit(*(columns[name] for name in names))
    print(f"a {model.a:.6g} s a token, b {model.b:.6g} s a pair, c {model.c:.6g} s a row")
    # Relative to a token, so that data.options.batch_tokens stays a number of tokens.
    one = model.a or model.c or model.b
    print(f'--set "data.options.cost=[{model.a / one:.6g}, {model.b / one:.6g}, {model.c / one:.6g}]"')


def _show(title: str, records: list[dict[str, Any]]) -> None:
    table = Table(*(name.replace("_", " ") for name in records[0]), title=title, box=None)
    for record in records:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in record.values()))
    Console().print(table)
