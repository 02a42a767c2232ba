"""Parquet, ORC and Arrow IPC: one row group, stripe or record batch in memory at a time, chosen columns only."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import ipc

from gem_core.spec import RequestError
from gem_data.formats.files import Location
from gem_data.formats.request import Request


def _opened(place: Location, kind: str, open_file: Any, *args: Any) -> Any:
    try:
        return open_file(*args)
    except (pa.ArrowException, OSError) as error:
        raise RequestError(place.asked, f"it cannot be read as {kind} ({error})", "Check the format, and that the file is whole.") from error


def _guarded(place: Location, parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    try:
        yield from parts
    except (pa.ArrowException, OSError) as error:
        raise RequestError(place.asked, f"its rows cannot be read ({error})", "Check that the file is whole.") from error


class ParquetReader:
    def __init__(self, place: Location, request: Request) -> None:
        self._place, self._rows = place, request.batch_rows
        self._file = _opened(place, "Parquet", lambda: pq.ParquetFile(place.source(), pre_buffer=False, buffer_size=1 << 20))
        self.schema: pa.Schema = self._file.schema_arrow

    def batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        # Row group by row group: pyarrow cannot join the dictionaries of several inside lists.
        groups = range(self._file.num_row_groups)
        parts = (part for k in groups for part in self._file.iter_batches(self._rows, row_groups=[k], columns=columns, use_threads=False))
        return _guarded(self._place, parts)


class OrcReader:
    def __init__(self, place: Location, request: Request) -> None:
        from pyarrow import orc

        self._place = place
        self._file = _opened(place, "ORC", lambda: orc.ORCFile(place.source()))
        self.schema: pa.Schema = self._file.schema

    def batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        stripes = (self._file.read_stripe(k, columns=columns) for k in range(self._file.nstripes))
        return _guarded(self._place, stripes)


class ArrowReader:
    """Arrow IPC, as a file (also called Feather) or as a stream."""

    def __init__(self, place: Location, request: Request) -> None:
        self._place = place
        self._reader = _opened(place, "Arrow IPC", self._open)
        self.schema: pa.Schema = self._reader.schema

    def _open(self) -> Any:
        if self._place.head().startswith(b"ARROW1"):
            source = self._place.source()
            return ipc.open_file(pa.memory_map(source) if isinstance(source, str) else source)
        return ipc.open_stream(self._place.open())

    def batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        reader = self._reader
        parts = (reader.get_batch(k) for k in range(reader.num_record_batches)) if hasattr(reader, "get_batch") else iter(reader)
        return _guarded(self._place, (part.select(columns) for part in parts))
