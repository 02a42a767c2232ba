"""``gem data convert``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gem_core.spec import RequestError

Separator = Annotated[str | None, typer.Option(help=r"Text between fields; \t, \x01 and the like may be written so.")]
Format = Annotated[str | None, typer.Option(help="csv, jsonl, parquet, orc, arrow or npz; by default the file tells.")]
Names = Annotated[str | None, typer.Option(help="Names of the columns, with commas, where no line holds them.")]
BATCH_ROWS = 16_384


def convert_command(
    inputs: Annotated[list[str], typer.Argument(metavar="IN...", help="Files, folders or patterns; remote ones by their address.")],
    out: Annotated[Path, typer.Argument(help="The Parquet file to write.")],
    format: Format = None,
    separator: Separator = None,
    names: Names = None,
    encoding: Annotated[str, typer.Option(help="Encoding of text.")] = "utf-8",
    columns: Annotated[str | None, typer.Option(help="Columns to keep, with commas.")] = None,
    missing: Annotated[list[str] | None, typer.Option(help="Text that means a missing value; may be repeated.")] = None,
    type: Annotated[list[str] | None, typer.Option(metavar="COLUMN=TYPE", help="Type of a column; may be repeated.")] = None,
    list: Annotated[list[str] | None, typer.Option(metavar="COLUMN=SEPARATOR", help="Split a text column into a list; may be repeated.")] = None,
    quote: Annotated[bool | None, typer.Option(help="Whether fields may stand in double quotes.")] = None,
    bad_lines: Annotated[str, typer.Option(help="Lines with too few or too many fields: error or drop.")] = "error",
) -> None:
    """Stream files of any format into one Parquet file, and account for every row."""
    from gem_data.convert import convert
    from gem_data.formats import scan

    rows = scan(
        inputs,
        format=format,
        columns=None if columns is None else columns.split(","),
        separator=None if separator is None else unescaped(separator),
        header=True if names is None else names.split(","),
        encoding=encoding,
        missing=["", *(missing or [])],
        types=_pairs("--type", type or []),
        lists={name: unescaped(text) for name, text in _pairs("--list", list or []).items()},
        quote=quote,
        bad_lines=bad_lines,  # type: ignore[arg-type]  # checked by scan
        batch_rows=BATCH_ROWS,
    )
    done = convert(rows, out)
    for name, kind in zip(rows.schema.names, rows.schema.types, strict=True):
        print(f"  {name}: {kind}")
    reasons = "".join(f" + {count} dropped ({reason})" for reason, count in done.dropped.items())
    print(f"{out}: {done.read} rows in = {done.written} rows out{reasons}")


def unescaped(text: str) -> str:
    r"""``\t`` and ``\x01`` as the characters they stand for; RequestError for a broken escape."""
    try:
        return text.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError as error:
        raise RequestError(f"separator {text!r}", f"it is no text ({error.reason})", r"Write a backslash as \\.") from error


def _pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    out = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals or not name or name in out:
            so = "the column is named twice" if name in out else "it is not COLUMN=VALUE"
            raise RequestError(f"{option} {pair}", so, "Give each column once, as COLUMN=VALUE.")
        out[name] = value
    return out
