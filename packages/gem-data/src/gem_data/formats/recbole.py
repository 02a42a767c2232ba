"""RecBole's atomic files: tab-separated, with a header of ``name:type``."""

from pathlib import Path

import polars as pl

from gem_core.spec import RequestError

TYPES = ("token", "float", "token_seq", "float_seq")


def read_atomic(path: Path, *, encoding: str = "utf-8") -> pl.DataFrame:
    """Read one atomic file; columns are named without their type.

    ``token`` gives strings, ``float`` float64, ``token_seq`` lists of strings and ``float_seq`` lists of float64, split at blanks. A blank field is
    null in a ``token`` or ``float`` column and an empty list in a sequence. A ``float`` field that is no number is null too: the caller counts it.

    Raises:
        RequestError: the file is missing, is not in ``encoding``, has a bad header, or a line with the wrong number of fields.
    """
    asked = f"atomic file {path}"
    if not path.is_file():
        raise RequestError(asked, "there is no such file", "Check the path.")
    try:
        text = path.read_bytes().decode(encoding)
    except UnicodeDecodeError as error:
        so = f"byte {error.object[error.start]:#04x} at offset {error.start} is not {encoding}"
        raise RequestError(asked, so, "Convert the file, or name its encoding.") from error
    lines = text.replace("\r\n", "\n").rstrip("\n").split("\n")
    columns = _header(asked, lines[0])
    for number, line in enumerate(lines[1:], start=2):
        if line.count("\t") != len(columns) - 1:
            so = f"line {number} has {line.count(chr(9)) + 1} fields, the header has {len(columns)}"
            raise RequestError(asked, so, "Repair or remove the line.")
    body = "\n".join(lines[1:]).encode()
    strings = dict.fromkeys(columns, pl.String)
    frame = pl.read_csv(body, separator="\t", has_header=False, schema=strings, quote_char=None) if body else pl.DataFrame(schema=strings)
    return frame.with_columns([_typed(name, kind) for name, kind in columns.items()])


def _header(asked: str, line: str) -> dict[str, str]:
    columns: dict[str, str] = {}
    for cell in line.removeprefix("\ufeff").split("\t"):
        name, colon, kind = cell.rpartition(":")
        if not colon or not name or kind not in TYPES:
            raise RequestError(asked, f"header cell {cell!r} is not name:type", f"Types are {', '.join(TYPES)}.")
        if name in columns:
            raise RequestError(asked, f"column {name!r} occurs twice", "Name each column once.")
        columns[name] = kind
    return columns


def _typed(name: str, kind: str) -> pl.Expr:
    trimmed = pl.col(name).fill_null("").str.strip_chars()
    filled = pl.when(trimmed == "").then(None).otherwise(trimmed).alias(name)
    if kind == "token":
        return filled
    if kind == "float":
        return filled.cast(pl.Float64, strict=False).alias(name)
    words = trimmed.str.split(" ").list.eval(pl.element().filter(pl.element() != ""))
    return words.alias(name) if kind == "token_seq" else words.list.eval(pl.element().cast(pl.Float64, strict=False)).alias(name)


def require_columns(path: Path, frame: pl.DataFrame, names: tuple[str, ...]) -> None:
    """Raise RequestError naming the columns that ``frame`` lacks; further columns are fine."""
    missing = [name for name in names if name not in frame.columns]
    if missing:
        raise RequestError(f"atomic file {path}", f"it lacks the columns {missing}; it has {frame.columns}", "Give the file of that data set.")
