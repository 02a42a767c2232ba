"""``gem data inspect``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from gem_core.spec import RequestError
from gem_data.cli.convert import Format, Names, Separator, unescaped


def inspect_command(
    path: Annotated[str, typer.Argument(help="A file, a folder or a pattern.")],
    format: Format = None,
    separator: Separator = None,
    names: Names = None,
    encoding: Annotated[str | None, typer.Option(help="Encoding of text; by default the first bytes tell.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows to look at.")] = 10_000,
    out: Annotated[Path | None, typer.Option(help="Write the proposed schema to this file.")] = None,
) -> None:
    """Propose a schema: what each column is, and why. Read it before you use it."""
    from gem_data.inspect import inspect
    from gem_data.schema import write_schema

    if out is not None and out.exists():
        raise RequestError(f"schema {out}", "it exists already", "Remove it, or name another file.")
    found = inspect(
        path,
        rows=rows,
        format=format,
        separator=None if separator is None else unescaped(separator),
        encoding=encoding,
        names=None if names is None else tuple(names.split(",")),
    )
    console = Console()
    for reason in found.dialect.why if found.dialect else ():
        console.print(reason, markup=False)
    for reason, count in found.dropped.items():
        console.print(f"left aside: {count} ({reason})", markup=False)
    table = Table("COLUMN", "TYPE", "KIND", "WHY", box=None, title=f"first {found.rows} rows", title_justify="left")
    for column in table.columns:
        column.overflow = "fold"  # names are never cut
    for name, verdict in found.verdicts.items():
        table.add_row(*(_plain(text) for text in (name, str(found.types[name]), verdict.kind, verdict.why)))
    console.print(table)
    labels = [name for name, verdict in found.verdicts.items() if verdict.kind == "label"]
    console.print(f"labels: {', '.join(labels) or 'none found; declare a [[task]]'}", markup=False)
    if out is not None:
        write_schema(found.schema, out)
        console.print(f"wrote {out}", markup=False)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
