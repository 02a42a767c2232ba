"""RecBole's atomic files of any data set: tab-separated, with a header of ``name:type``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from gem_core.spec import RequestError
from gem_data.formats.scan import scan
from gem_data.known.dataset import Choices, KnownDataSet, Tables, sequence, tasks, vocabulary
from gem_data.known.tables import KnownTable, find, find_any
from gem_data.schema.declare import Schema

KINDS = ("token", "float", "token_seq", "float_seq")


def atomic_header(path: Path) -> dict[str, str]:
    """``{column: kind}`` of an atomic file.

    Raises:
        RequestError: a cell of the header is no ``name:type``.
    """
    cells = scan(path, separator="\t", quote=False).schema.names
    out = {}
    for cell in cells:
        name, colon, kind = cell.rpartition(":")
        if not colon or not name or kind not in KINDS:
            raise RequestError(f"atomic file {path}", f"header cell {cell!r} is not name:type", f"Types are {', '.join(KINDS)}.")
        out[name] = kind
    return out


def atomic_table(files: Sequence[Path], columns: Mapping[str, pl.Expr] | None = None) -> KnownTable:
    """A table of atomic files; ``columns`` are made from their columns without the types, by default each as it is.

    ``token`` becomes strings, ``float`` float64, sequences lists of them; a blank field is a missing value or an empty list.
    """
    kinds = atomic_header(files[0])
    lacking = sorted({name for expr in (columns or {}).values() for name in expr.meta.root_names()} - set(kinds))
    if lacking:
        raise RequestError(f"atomic file {files[0]}", f"it lacks the columns {lacking}; it has {list(kinds)}", "Give the files of that data set.")
    raw = {f"{name}:{kind}": "string" for name, kind in kinds.items()}

    def parsed(piece: pl.DataFrame) -> pl.DataFrame:
        return piece.with_columns(**{name: _value(f"{name}:{kind}", kind) for name, kind in kinds.items()})

    read = {"separator": "\t", "quote": False, "types": raw}
    return KnownTable(files=files, read=read, expand=parsed, columns=columns or {name: pl.col(name) for name in kinds})


def _value(column: str, kind: str) -> pl.Expr:
    trimmed = pl.col(column).str.strip_chars()
    if kind == "token":
        return trimmed
    if kind == "float":
        return trimmed.cast(pl.Float64)
    words = trimmed.fill_null("").str.split(" ").list.eval(pl.element().filter(pl.element() != ""))
    return words if kind == "token_seq" else words.cast(pl.List(pl.Float64))


def _open(folder: Path, choices: Choices) -> dict[str, KnownTable]:
    files = find(folder, "*.inter")
    kinds = atomic_header(files[0])
    label = "label" if "label" in kinds else "rating"
    like = pl.col(label) >= (0.5 if label == "label" else float(choices["like_from"]))
    needed = {"user_id": pl.col("user_id"), "item_id": pl.col("item_id"), "timestamp": pl.col("timestamp")}
    others = {name: pl.col(name) for name in kinds if name not in ("user_id", "item_id", "timestamp", "like")}
    out = {"impressions": atomic_table(files, needed | {"like": like.cast(pl.Int8)} | others)}
    sides = {"users": find_any(folder, "*.user"), "items": find_any(folder, "*.item")}
    return out | {name: atomic_table(found) for name, found in sides.items() if found}


def _definition(_: Tables) -> dict[str, Any]:
    return {
        "tables": {"impressions": {"user": "user_id", "time": "timestamp"}},
        "impressions": {"table": "impressions"},
        "histories": [{"name": "liked", "table": "impressions", "where": [["like", "==", 1]]}],
        "split": {"kind": "time", "test_fraction": 0.1},
    }


DATA_SETS = (
    KnownDataSet(
        name="recbole",
        summary="atomic files of any data set with user_id, item_id, timestamp and a rating or label",
        terms="those of the data set",
        files=("*.inter", "*.user and *.item, where there are any"),
        quirks=("the header holds the types", "lists are separated by blanks", "nothing is quoted", "fractions of a second order events"),
        open=_open,
        schema=Schema(
            user="user_id",
            time="timestamp",
            id=tuple(vocabulary("user_id", "item_id")),
            sequence=(sequence("liked", *vocabulary("item_id")),),
            task=tasks("like"),
        ),
        definition=_definition,
        choices={"like_from": ("4", "1", "2", "3", "5")},
    ),
)
