"""CSV and its relatives: lines of fields with any separator, parsed by pyarrow."""

import csv
import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as pacsv

from gem_core.spec import RequestError
from gem_data.formats.files import Location, suffix_of
from gem_data.formats.infer import guess_type
from gem_data.formats.lines import LONGEST_LINE, LineFile, Lines
from gem_data.formats.request import Request

SAMPLE_ROWS = 10_000


class DelimitedReader:
    """A text file of lines of fields; ``schema`` has the given types, and guesses from the first rows for the other columns."""

    def __init__(self, place: Location, request: Request) -> None:
        self._place, self._request = place, request
        self._separator = request.separator or ("\t" if suffix_of(place) in ("tsv", "tab") else ",")
        self._quote = self._separator in (",", ";") if request.quote is None else request.quote
        self._names = list(request.header) if request.header is not None else self._read_header()
        self.schema = pa.schema([(name, request.types.get(name)) for name in self._names] if self._all_typed() else self._guessed())

    def batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Raises RequestError for a ragged line, unless those are dropped, and for a value that does not fit its column."""
        lines = self._lines()
        types = {field.name: pa.string() if field.name in self._request.lists else field.type for field in self.schema}
        for batch in self._parse(lines, columns, types, count=True):
            yield self._split(batch) if self._request.lists else batch
        if lines.blanks:
            self._request.dropped["blank line"] += lines.blanks

    def _split(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Fields of list columns as lists; a missing field is a missing list."""
        arrays = {name: batch.column(k) for k, name in enumerate(batch.schema.names)}
        for name, separator in self._request.lists.items():
            if name in arrays:
                arrays[name] = self._listed(name, pc.split_pattern(arrays[name], separator))
        return pa.RecordBatch.from_pydict(arrays)

    def _listed(self, name: str, values: pa.Array) -> pa.Array:
        kind = self.schema.field(name).type
        try:
            return values.cast(kind)
        except pa.ArrowInvalid as error:
            raise RequestError(self._place.asked, f"list column {name!r} does not fit {kind} ({error})", "Give the type of its values.") from error

    def _all_typed(self) -> bool:
        return all(name in self._request.types for name in self._names)

    def _lines(self) -> Lines:
        # With one column a blank line is a row with a missing value; with more it is no row.
        return Lines(self._place, self._request.encoding, self._separator, blank_lines=len(self._names) == 1, quote=self._quote)

    def _read_header(self) -> list[str]:
        lines = Lines(self._place, self._request.encoding, self._separator, blank_lines=False, quote=self._quote)
        block = next(lines.blocks(), b"")
        if not block.strip():
            raise RequestError(self._place.asked, "it is empty, so it has no header", "Check the file, or give the names of its columns.")
        first = block.split(b"\n", 1)[0].decode().rstrip("\r")
        quoting: Any = csv.QUOTE_MINIMAL if self._quote else csv.QUOTE_NONE
        try:
            names = next(csv.reader([first], delimiter=lines.stand_in, quoting=quoting))
        except csv.Error as error:
            raise RequestError(
                self._place.asked, f"its header cannot be parsed ({error})", "Check its quotes and that lines end in a line feed."
            ) from error
        if "" in names:
            raise RequestError(
                self._place.asked, f"column {names.index('') + 1} of its header has no name", "Name it, or give the names of the columns."
            )
        return names

    def _guessed(self) -> list[tuple[str, pa.DataType]]:
        strings = {name: pa.string() for name in self._names}
        batch = next(self._parse(self._lines(), self._names, strings, count=False), None)
        sample = {} if batch is None else {name: batch.column(k).slice(0, SAMPLE_ROWS) for k, name in enumerate(self._names)}
        return [(n, self._request.types[n] if n in self._request.types else guess_type(sample[n]) if sample else pa.string()) for n in self._names]

    def _parse(self, lines: Lines, columns: list[str], types: dict[str, pa.DataType], *, count: bool) -> Iterator[pa.RecordBatch]:
        """Record batches of ``columns``; ragged lines count only if ``count``: sampling meets them as well."""
        blocks = lines.blocks()
        first = next(blocks, b"")
        if self._request.header is None:
            first = first.split(b"\n", 1)[1]
        if not first:  # pyarrow takes no empty input; a block of blank lines alone is empty too
            first = next((block for block in blocks if block), b"")
            if not first:
                return
        ragged: list[Any] = []

        def judge(row: Any) -> str:
            ragged.append(row)
            if self._request.bad_lines == "drop" or not count:
                if count:  # a quote that is never closed takes all lines after it
                    self._request.dropped["ragged line"] += 1 + row.text.count("\n")
                ragged.clear()
                return "skip"
            return "error"

        restore = self._quote and len(self._separator.encode()) > 1
        try:
            yield from self._opened(_chain(first, blocks), lines.stand_in, columns, types, judge, restore)
        except pa.ArrowException as error:
            raise self._explained(error, lines, ragged) from error

    def _opened(
        self, blocks: Iterator[bytes], separator: str, columns: list[str], types: dict[str, pa.DataType], judge: Any, restore: bool
    ) -> Iterator[pa.RecordBatch]:
        reader = pacsv.open_csv(
            LineFile(blocks),
            read_options=pacsv.ReadOptions(use_threads=False, block_size=LONGEST_LINE, column_names=self._names),
            parse_options=pacsv.ParseOptions(
                delimiter=separator,
                quote_char='"' if self._quote else False,
                newlines_in_values=self._quote,
                ignore_empty_lines=len(self._names) > 1,
                invalid_row_handler=judge,
            ),
            convert_options=pacsv.ConvertOptions(
                column_types=types, include_columns=columns, null_values=list(self._request.missing), strings_can_be_null=True
            ),
        )
        for batch in reader:
            yield _restored(batch, separator, self._separator) if restore else batch

    def _explained(self, error: Exception, lines: Lines, ragged: list[Any]) -> RequestError:
        if ragged:
            row = ragged[-1]
            number = lines.line_of(row.number + (self._request.header is None))
            so = f"line {number} has {row.actual_columns} fields, expected {row.expected_columns}"
            return RequestError(self._place.asked, so, 'Repair the line, or drop such lines and count them: bad_lines="drop".')
        text = str(error)
        where = re.search(r"In CSV column #(\d+): (?:Row #\d+: )?(.*)", text, re.S)
        if where:
            name = self._names[int(where[1])]
            do = f"Give types={{{name!r}: 'string'}}, or add the text to missing if it means no value."
            return RequestError(self._place.asked, f"column {name!r}: {where[2]}", do)
        return RequestError(self._place.asked, f"it cannot be parsed ({text})", "Check the separator and the quotes.")


def _chain(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from (block for block in rest if block)


def _restored(batch: pa.RecordBatch, stand_in: str, separator: str) -> pa.RecordBatch:
    """Quoted fields may hold the separator itself."""
    columns = [pc.replace_substring(c, stand_in, separator) if pa.types.is_string(c.type) else c for c in batch.columns]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)
