"""Tables and JSON on standard output; errors in three lines on standard error."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from gem_core.spec import GemError


def print_json(value: Any) -> None:
    """Print a value as JSON and nothing else."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: with rich on a terminal, as aligned columns elsewhere."""
    if sys.stdout.isatty():
        _rich_table(columns, rows)
        return
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def print_error(error: GemError) -> None:
    """What was asked, what is so, what to do: one line each, on standard error."""
    print(f"gem: {error.asked}\n  {error.so}\n  {error.do}", file=sys.stderr)
