"""``gem data known``: which public data sets are read by name, and their export."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from gem_core.spec import RequestError

app = typer.Typer(invoke_without_command=True, help="Public data sets that are read by name from their raw files.")


@app.callback()
def list_known(context: typer.Context, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the public data sets that are read by name, the files that are looked for, and what is unusual in them."""
    if context.invoked_subcommand is not None:
        return
    from gem_data.known.registry import KNOWN

    rows = [
        {"name": k.name, "summary": k.summary, "files": k.files, "quirks": k.quirks, "choices": dict(k.choices), "terms": k.terms}
        for k in KNOWN.values()
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0))
    for heading in ("NAME", "FILES", "QUIRKS", "TERMS"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "NAME")
    for known in KNOWN.values():
        table.add_row(known.name, "\n".join(known.files), "\n".join(known.quirks), known.terms)
    Console(width=None if Console().is_terminal else 150).print(table)


@app.command("export")
def export_command(
    name: Annotated[str, typer.Argument(help="One of `gem data known`.")],
    path: Annotated[Path, typer.Option(help="Folder with the raw files.")],
    out: Annotated[Path, typer.Option(help="Folder to write; it must not exist.")],
    choose: Annotated[list[str] | None, typer.Option(help="A choice of the data set, as NAME=VALUE.")] = None,
) -> None:
    """Write the canonical tables as Parquet, with the schema and the definition that `gem data prepare` takes."""
    definition = write_tables(name, path, out, choose or [])
    print(f"prepare with: gem data prepare {definition} --out FOLDER")


def write_tables(name: str, path: Path, out: Path, choose: Sequence[str]) -> Path:
    """Export a known data set and print what became of its rows; returns the definition that was written.

    Raises:
        RequestError: the name, a choice or a file is wrong, or ``out`` exists.
    """
    from gem_data.known.export import export
    from gem_data.known.registry import known_data_set

    choices = {}
    for choice in choose:
        key, equals, value = choice.partition("=")
        if not equals:
            raise RequestError(f"--choose {choice}", "it is not NAME=VALUE", "Write it as in --choose purchase_without_click=mask.")
        choices[key] = value
    known, console = known_data_set(name), Console(stderr=True)
    with Progress(*Progress.get_default_columns()[:1], "{task.completed} rows", console=console, disable=not console.is_terminal) as progress:
        bars: dict[str, TaskID] = {}

        def told(table: str, rows: int) -> None:
            if table not in bars:
                bars[table] = progress.add_task(table, total=None)
            progress.advance(bars[table], rows)

        ledgers = export(known, path, out, told=told, **choices)
    table = Table("TABLE", "ROWS", "WHAT BECAME OF THEM", box=None)
    for label, ledger in ledgers.items():
        for what, rows in ledger.items():
            table.add_row(label, str(rows), what)
    Console().print(table)
    print(known.terms)
    return out / "definition.toml"
