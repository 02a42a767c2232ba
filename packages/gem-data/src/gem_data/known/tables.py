"""A canonical table: raw files read in pieces, columns brought to agreed names and types, every row accounted for."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from gem_core.spec import RequestError
from gem_data.formats.scan import scan

ROW, FILE = "gem_row", "gem_file"
"""Columns that every raw piece gets: the row's place over all files of the table, from 0, and the name of its file."""

Change = Callable[[pl.DataFrame], pl.DataFrame]


@dataclass(kw_only=True)
class KnownTable:
    """One canonical table of a data set.

    Args:
        files: raw files in the order of their rows.
        read: arguments of ``gem_data.formats.scan``, the same for every file; of a file with a header the columns in ``types`` are
            read, whose names are without outer blanks.
        columns: canonical columns from raw ones, whose names are stripped of outer blanks.
        expand: turns a raw piece into one row for each row that counts; for nested files.
        drop: ``{reason: condition}`` on raw columns; a row goes for the first reason that holds.
        ledger: after ``batches`` has ended: rows ``read``, ``kept`` and ``dropped: REASON``.
        starts: after it: place of the first row of each file, by the file's name.
    """

    files: Sequence[Path]
    columns: Mapping[str, pl.Expr]
    read: Mapping[str, Any] = field(default_factory=dict)
    expand: Change = lambda piece: piece
    drop: Mapping[str, pl.Expr] = field(default_factory=dict)
    ledger: Counter[str] = field(default_factory=Counter)
    starts: dict[str, int] = field(default_factory=dict)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The canonical rows, in the order of the files; each call reads anew.

        Raises:
            RequestError: a file is damaged or lacks a column, or a value does not fit the canonical type.
        """
        self.ledger.clear()
        self.ledger.update(read=0, kept=0)
        for path in self.files:
            self.starts[path.name] = self.ledger["read"]
            for piece in self._pieces(path):
                try:
                    frame = self._kept(piece).select(**self.columns)
                except (pl.exceptions.PolarsError, ValueError) as error:
                    raise RequestError(f"file {path}", f"a value does not fit ({str(error).splitlines()[0]})", "Repair the file.") from error
                self.ledger["kept"] += frame.height
                if frame.height:
                    yield plain(frame)

    def _pieces(self, path: Path) -> Iterator[pl.DataFrame]:
        raw = scan(path, **_arguments(path, self.read))
        for batch in raw.batches():
            piece = pl.DataFrame(pl.from_arrow(batch)).rename(str.strip)
            piece = self.expand(piece.with_columns(pl.lit(path.name).alias(FILE)))
            yield piece.with_columns(pl.int_range(self.ledger["read"], self.ledger["read"] + piece.height, dtype=pl.Int64).alias(ROW))
            self.ledger["read"] += piece.height
        for reason, lines in raw.dropped.items():
            if reason != "blank line":
                self.ledger["read"] += lines
                self.ledger[f"dropped: {reason}"] += lines

    def _kept(self, piece: pl.DataFrame) -> pl.DataFrame:
        for reason, condition in self.drop.items():
            keep = piece.filter(~condition.fill_null(False))
            if keep.height < piece.height:
                self.ledger[f"dropped: {reason}"] += piece.height - keep.height
            piece = keep
        return piece


def _arguments(path: Path, read: Mapping[str, Any]) -> dict[str, Any]:
    """``read`` with types keyed by the names as the file has them; columns without a type are not read, so nothing is guessed of them."""
    types: Mapping[str, Any] = read.get("types", {})
    if not types or not isinstance(read.get("header", True), bool):
        return dict(read)
    found = {name.strip(): name for name in scan(path, **{**read, "types": {}}).schema.names}
    named = {found.get(name, name): kind for name, kind in types.items()}
    return {**read, "types": named, "columns": list(named)}


def plain(frame: pl.DataFrame) -> pa.RecordBatch:
    """As one Arrow batch with ordinary strings and lists, which every reader of Parquet takes."""
    table = frame.to_arrow(compat_level=pl.CompatLevel.oldest())
    table = table.cast(pa.schema([(f.name, _plain_type(f.type)) for f in table.schema])).combine_chunks()
    return table.to_batches()[0]


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_large_string(kind):
        return pa.string()
    return pa.list_(_plain_type(kind.value_type)) if pa.types.is_large_list(kind) else kind


def find(folder: Path, *patterns: str) -> list[Path]:
    """The files of the first pattern that has any, in natural order (``day_2`` before ``day_10``).

    ``folder`` may be such a file itself. A pattern also matches in the folders ``data`` and ``raw_data`` below.

    Raises:
        RequestError: no pattern has a file.
    """
    found = find_any(folder, *patterns)
    if not found:
        so = f"there is no {' and no '.join(patterns)}"
        raise RequestError(f"data set in {folder}", so, "Give the folder that holds the data set's raw files; `gem data known` lists them.")
    return found


def find_any(folder: Path, *patterns: str) -> list[Path]:
    """As ``find``; empty where there is no such file."""
    if folder.is_file():
        return [folder] if any(folder.match(pattern) for pattern in patterns) else []
    for pattern in patterns:
        for place in (folder, folder / "data", folder / "raw_data"):
            found = sorted(place.glob(pattern), key=_natural)
            if found:
                return found
    return []


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def text(*names: str, **read: Any) -> dict[str, Any]:
    """Arguments of ``scan`` for a file without a header whose columns are read as they stand: each name is ``column`` or ``column:type``."""
    columns = dict(_typed(name) for name in names)
    return {"header": list(columns), "types": columns, **read}


def typed(*names: str) -> dict[str, str]:
    """``{column: type}`` of names given as ``column:type``; without a type it is a string."""
    return dict(_typed(name) for name in names)


def _typed(name: str) -> tuple[str, str]:
    column, _, kind = name.partition(":")
    return column, kind or "string"


def same(*names: str) -> dict[str, pl.Expr]:
    """Columns that are taken as they are."""
    return {name: pl.col(name) for name in names}


def taken_apart(piece: pl.DataFrame, lists: Sequence[str]) -> pl.DataFrame:
    """One row for each element of the list columns, which are of equal lengths in each row; missing and empty lists give none.

    Raises:
        RequestError: the lists of a row differ in length.
    """
    table = piece.to_arrow()
    parents = pc.list_parent_indices(table.column(lists[0]))
    for name in lists[1:]:
        if not pc.list_parent_indices(table.column(name)).equals(parents):
            raise RequestError(f"lists {lists[0]!r} and {name!r}", "they differ in length in some row", "Give lists of equal lengths.")
    columns = {name: pc.list_flatten(table.column(name)) if name in lists else table.column(name).take(parents) for name in table.column_names}
    return pl.DataFrame(pl.from_arrow(pa.table(columns)))


def whole(name: str) -> pl.Expr:
    """A column of floats as int64; one that is not whole is an error, where a cast would cut it off."""
    return pl.col(name).map_batches(_whole, return_dtype=pl.Int64)


def _whole(values: pl.Series) -> pl.Series:
    parts = values.drop_nulls().filter(values.drop_nulls() != values.drop_nulls().floor())
    if parts.len():
        raise ValueError(f"{parts[0]} is no whole number")
    return values.cast(pl.Int64)
