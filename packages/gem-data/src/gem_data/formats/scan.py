"""``scan``: the rows of files of any format as record batches, a bounded part in memory at a time."""

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from gem_core.spec import RequestError
from gem_data.formats.columnar import ArrowReader, OrcReader, ParquetReader
from gem_data.formats.delimited import DelimitedReader
from gem_data.formats.files import FORMATS, Location, binary_format, format_of, locate
from gem_data.formats.jsonl import JsonLinesReader
from gem_data.formats.npz import NpzReader
from gem_data.formats.request import BadLines, Reader, Request

FAMILIES: dict[str, Callable[[Location, Request], Reader]] = {
    "csv": DelimitedReader,
    "jsonl": JsonLinesReader,
    "parquet": ParquetReader,
    "orc": OrcReader,
    "arrow": ArrowReader,
    "npz": NpzReader,
}


class Scan:
    """Rows of one or more files.

    Args:
        schema: the columns that the batches have, in this order.
        dropped: lines left out so far, by reason: blank lines, and ragged ones where that was asked for.
    """

    def __init__(self, readers: Sequence[tuple[Location, Callable[[], Reader]]], schema: pa.Schema, request: Request) -> None:
        self._readers, self._request = readers, request
        self.schema = schema
        self.dropped: Counter[str] = request.dropped

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Batches of ``batch_rows`` rows, the last one shorter; file after file. Each call reads anew, and counts anew what it drops.

        Raises:
            RequestError: a file is damaged, or a value does not fit its column's type.
        """
        self.dropped.clear()
        return _resized(self._parts(), self.schema, self._request.batch_rows)

    def _parts(self) -> Iterator[pa.RecordBatch]:
        for place, opened in self._readers:
            reader = opened()
            _require(place, reader.schema, self.schema.names)
            for batch in reader.batches(self.schema.names):
                yield _fitted(place, batch, self.schema)


def scan(
    paths: str | Path | Sequence[str | Path],
    *,
    format: str | None = None,
    columns: Sequence[str] | None = None,
    separator: str | None = None,
    header: bool | Sequence[str] = True,
    encoding: str = "utf-8",
    missing: Sequence[str] = ("",),
    types: Mapping[str, pa.DataType | str] | None = None,
    lists: Mapping[str, str] | None = None,
    quote: bool | None = None,
    bad_lines: BadLines = "error",
    batch_rows: int = 65_536,
) -> Scan:
    """Open files for reading; their rows are read when ``batches`` is.

    Args:
        paths: files, folders or patterns, local or with an address that fsspec knows.
        format: csv, jsonl, parquet, orc, arrow or npz; by default the first bytes and the ending tell.
        columns: those to read, in this order; by default all. Further columns of a file are ignored.
        separator: between the fields of a line, one character or more; by default a tab for .tsv and .tab, else a comma.
        header: whether the first line holds the names of the columns, or the names, where no line does.
        encoding: of text.
        missing: texts that mean a missing value.
        types: types of some columns, as Arrow types or their names; of text, the others are int64 or uint64 where every value of the first rows is
            an integer in plain form, float64 where every value is a number, else strings.
        lists: ``{column: separator}`` of text columns whose fields hold many values; they become lists of strings, or of their type in ``types``.
        quote: whether fields may stand in double quotes; by default with a comma or semicolon as separator only.
        bad_lines: what becomes of a line with too few or too many fields: an error, or dropped and counted.
        batch_rows: rows of a batch.

    Raises:
        RequestError: a file is missing, its format is unknown, it lacks a column, or the arguments do not fit together.
        MachineError: the package for a remote file system is not installed.
    """
    if format is not None and format not in FORMATS:
        raise RequestError(f"format {format!r}", f"the formats are {', '.join(FORMATS)}", "Name one of them.")
    request = Request(
        columns=None if columns is None else tuple(columns),
        separator=separator,
        header=_header(header),
        encoding=encoding,
        missing=tuple(missing),
        types=_types(types or {}, lists or {}),
        lists=dict(lists or {}),
        quote=quote,
        bad_lines=bad_lines,
        batch_rows=batch_rows,
    )
    _check(request)
    places = locate(paths)
    first = _family(places[0], format, request)(places[0], request)
    schema = _schema(places[0], first.schema, request)
    # Text of later files is read with the types of the first; types that only sampling would tell may not differ from file to file.
    fixed = replace(request, types={**{field.name: field.type for field in first.schema}, **request.types})
    later = [(place, _opener(place, _family(place, format, request), fixed)) for place in places]
    return Scan(later, schema, request)


def _opener(place: Location, family: Callable[[Location, Request], Reader], request: Request) -> Callable[[], Reader]:
    return lambda: family(place, request)


def _family(place: Location, format: str | None, request: Request) -> Callable[[Location, Request], Reader]:
    """The reader of a file; RequestError where arguments that only CSV has meet another format."""
    known = binary_format(place)
    if format is None and request.separator is not None and known is None:
        format = "csv"
    found = format or known or format_of(place)
    if found != "csv":
        given = {
            "separator": request.separator is not None,
            "header": request.header is not None,
            "lists": bool(request.lists),
            "quote": request.quote is not None,
            "missing": request.missing != ("",),
        }
        if any(given.values()):
            so = f"its format is {found}, and {next(name for name, there in given.items() if there)} is for CSV and its relatives"
            raise RequestError(place.asked, so, "Leave it out, or name the format.")
    return FAMILIES[found]


def _header(header: bool | Sequence[str]) -> tuple[str, ...] | None:
    if header is True:
        return None
    if header is False or isinstance(header, str) or not header:
        raise RequestError(f"header {header!r}", "columns need names", "Give header=True, or the list of names where the file has none.")
    return tuple(header)


def _types(types: Mapping[str, pa.DataType | str], lists: Mapping[str, str]) -> dict[str, pa.DataType]:
    """With the type of a list's values in the place of the list's."""
    out = {name: _type(name, kind) for name, kind in types.items()}
    for name in lists:
        kind = out.get(name, pa.string())
        out[name] = kind if pa.types.is_list(kind) else pa.list_(kind)
    return out


def _type(name: str, kind: pa.DataType | str) -> pa.DataType:
    if isinstance(kind, pa.DataType):
        return kind
    try:
        return pa.type_for_alias(kind)
    except ValueError as error:
        raise RequestError(f"type {kind!r} of column {name!r}", "Arrow has no type of that name", "Name int64, uint64, float64, string …") from error


def _check(request: Request) -> None:
    if request.batch_rows < 1:
        raise RequestError(f"batch_rows {request.batch_rows}", "a batch holds at least one row", "Give 1 or more.")
    for what, names in (("columns", request.columns), ("header", request.header)):
        twice = [name for name, count in Counter(names or ()).items() if count > 1]
        if twice:
            raise RequestError(what, f"{twice[0]!r} occurs twice", "Name each column once.")
    if request.separator is not None and (
        not request.separator or "\n" in request.separator or "\r" in request.separator or request.separator == '"'
    ):
        raise RequestError(f"separator {request.separator!r}", "it cannot separate the fields of a line", "Give a character or more.")
    empty = [name for name, separator in request.lists.items() if not separator]
    if empty:
        raise RequestError(f"list column {empty[0]!r}", "its separator is empty", "Give the text between its values.")
    if request.bad_lines not in ("error", "drop"):
        raise RequestError(f"bad_lines {request.bad_lines!r}", "the choices are error and drop", "Name one of them.")


def _schema(place: Location, found: pa.Schema, request: Request) -> pa.Schema:
    """The chosen columns with the types that batches have: strings in the place of dictionaries of them."""
    names = list(found.names) if request.columns is None else list(request.columns)
    twice = [name for name, count in Counter(found.names).items() if count > 1]
    if twice:
        raise RequestError(place.asked, f"it has two columns {twice[0]!r}", "Rename one.")
    _require(place, found, [*names, *request.types])
    return pa.schema([(name, request.types.get(name, _plain(found.field(name).type))) for name in names])


def _require(place: Location, found: pa.Schema, names: Iterable[str]) -> None:
    missing = [name for name in names if name not in found.names]
    if not missing:
        return
    close = difflib.get_close_matches(missing[0], found.names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise RequestError(
        place.asked, f"it lacks the columns {', '.join(map(repr, missing))}; it has {', '.join(map(repr, found.names))}{hint}", "Name those."
    )


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return kind.value_type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = _plain(kind.value_type)
        return pa.large_list(inner) if pa.types.is_large_list(kind) else pa.list_(inner)
    return kind


def _fitted(place: Location, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    arrays = []
    for field in schema:
        array = batch.column(batch.schema.get_field_index(field.name))
        try:
            arrays.append(array if array.type == field.type else array.cast(field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            so = f"column {field.name!r} holds {array.type}, which does not fit {field.type} ({error})"
            raise RequestError(place.asked, so, f"Give types={{{field.name!r}: ...}} that hold the values of every file.") from error
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _resized(parts: Iterable[pa.RecordBatch], schema: pa.Schema, rows: int) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of ``rows``; a part of the right size is passed on as it is."""
    held: list[pa.RecordBatch] = []
    count = 0
    for part in parts:
        at = 0
        while at < part.num_rows:
            piece = part.slice(at, rows - count)
            held.append(piece)
            count += piece.num_rows
            at += piece.num_rows
            if count == rows:
                yield _joined(held, schema)
                held, count = [], 0
    if count:
        yield _joined(held, schema)


def _joined(parts: list[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    if len(parts) == 1:
        return parts[0]
    table = pa.Table.from_batches(parts, schema)
    return pa.RecordBatch.from_arrays([pa.concat_arrays(column.chunks) for column in table.columns], schema=schema)
