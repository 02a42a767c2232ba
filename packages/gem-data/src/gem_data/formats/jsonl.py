"""JSON lines: one object a line. Integers beyond int64 are uint64; a field that the first lines lack is an error, unless columns are chosen."""

import io
import json
import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyarrow import json as pajson

from gem_core.spec import RequestError
from gem_data.formats.files import Location
from gem_data.formats.lines import LONGEST_LINE, Lines
from gem_data.formats.request import Request

SAMPLE_LINES = 1_000


class JsonLinesReader:
    def __init__(self, place: Location, request: Request) -> None:
        self._place, self._request = place, request
        self.schema = pa.schema(list(request.types.items())) if self._covered() else self._guessed()

    def _covered(self) -> bool:
        """Whether types are given for all columns that were asked for."""
        return bool(self._request.types) and self._request.columns is not None and set(self._request.columns) <= set(self._request.types)

    def _guessed(self) -> pa.Schema:
        lines = self._lines()
        block = next(lines.blocks(), b"")
        if not block:
            raise RequestError(self._place.asked, "it is empty, so its columns are not known", "Check the file, or give columns and types.")
        sample = b"\n".join(block.split(b"\n")[:SAMPLE_LINES])
        longest = _long_integers(self._place, sample)
        given = {name: pa.uint64() for name in longest} | dict(self._request.types)
        table = self._parse(sample, pa.schema(list(given.items())) if given else None, "infer", lines)
        return pa.schema([(field.name, pa.string() if pa.types.is_null(field.type) else field.type) for field in table.schema])

    def _lines(self) -> Lines:
        return Lines(self._place, self._request.encoding, blank_lines=False)

    def batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Raises RequestError for a line that is no object, a value of another type, or a field that nobody named."""
        chosen = pa.schema([self.schema.field(name) for name in columns])
        others = "ignore" if self._request.columns is not None else "error"
        lines = self._lines()
        rows = 0
        for block in lines.blocks():
            if block:
                table = self._parse(block, chosen, others, lines, rows)
                rows += table.num_rows
                yield from table.select(columns).to_batches()
        if lines.blanks:
            self._request.dropped["blank line"] += lines.blanks

    def _parse(self, block: bytes, schema: pa.Schema | None, others: str, lines: Lines, done: int = 0) -> pa.Table:
        try:
            return pajson.read_json(
                io.BytesIO(block),
                read_options=pajson.ReadOptions(use_threads=False, block_size=LONGEST_LINE + len(block)),
                parse_options=pajson.ParseOptions(explicit_schema=schema, unexpected_field_behavior=others),
            )
        except pa.ArrowException as error:
            so = re.sub(r"in row (\d+)", lambda match: f"in line {lines.line_of(done + int(match[1]) + 1)}", str(error))
            raise RequestError(self._place.asked, f"it cannot be parsed ({so})", "Repair the line, or name columns and their types.") from error


def _long_integers(place: Location, sample: bytes) -> set[str]:
    """Fields whose integers need uint64: parsers take them for floats and lose digits."""
    found: dict[str, list[int]] = {}
    if not re.search(rb"[0-9]{19}", sample):
        return set()
    for line in sample.splitlines():
        try:
            entry: Any = json.loads(line)
        except ValueError:
            continue  # the parser names the line
        for name, value in entry.items() if isinstance(entry, dict) else ():
            if isinstance(value, int) and value > 2**63 - 1:
                found.setdefault(name, []).append(value)
    for name, values in found.items():
        if max(values) >= 2**64:
            raise RequestError(place.asked, f"field {name!r} holds {max(values)}, which no integer type holds", "Write such ids as strings.")
    return set(found)
