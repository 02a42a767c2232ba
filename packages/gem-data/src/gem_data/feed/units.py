"""Columnar files as units that are read whole: row groups of Parquet, stripes of ORC, record batches of Arrow IPC."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

import pyarrow as pa
import pyarrow.ipc
import pyarrow.orc
import pyarrow.parquet

from gem_core.spec import RequestError


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row stands, for messages: ``part-0.parquet, row group 3, row 17``."""

    file: str
    kind: str
    unit: int

    def row(self, row: int) -> str:
        return f"{self.file}, {self.kind} {self.unit}, row {row}"


class UnitFile(Protocol):
    """An open columnar file. Its units are read by one thread at a time."""

    kind: ClassVar[str]
    schema: pa.Schema
    sizes: Sequence[int]

    def read(self, unit: int, columns: Sequence[str]) -> pa.Table:
        """The columns of a unit."""
        ...


class ParquetUnits:
    kind: ClassVar[str] = "row group"

    def __init__(self, path: Path) -> None:
        # Without pre-buffering and memory mapping only the unit being decoded is resident.
        self._file = pa.parquet.ParquetFile(path, memory_map=False, pre_buffer=False)
        self.schema = self._file.schema_arrow
        self.sizes = [self._file.metadata.row_group(i).num_rows for i in range(self._file.metadata.num_row_groups)]

    def read(self, unit: int, columns: Sequence[str]) -> pa.Table:
        return self._file.read_row_group(unit, columns=list(columns))


class OrcUnits:
    kind: ClassVar[str] = "stripe"

    def __init__(self, path: Path) -> None:
        self._file = pa.orc.ORCFile(str(path))
        self.schema = self._file.schema

    @cached_property
    def sizes(self) -> Sequence[int]:
        # pyarrow does not expose the rows of a stripe, so one column is read: a plain one where there is one.
        plain = [f.name for f in self.schema if not pa.types.is_nested(f.type)] or self.schema.names
        return [self._file.read_stripe(i, columns=plain[:1]).num_rows for i in range(self._file.nstripes)]

    def read(self, unit: int, columns: Sequence[str]) -> pa.Table:
        return pa.Table.from_batches([self._file.read_stripe(unit, columns=list(columns))]).select(list(columns))


class IpcUnits:
    kind: ClassVar[str] = "record batch"

    def __init__(self, path: Path) -> None:
        self._file = pa.ipc.open_file(pa.memory_map(str(path)))
        self.schema = self._file.schema
        self.sizes = [self._file.get_batch(i).num_rows for i in range(self._file.num_record_batches)]

    def read(self, unit: int, columns: Sequence[str]) -> pa.Table:
        return pa.Table.from_batches([self._file.get_batch(unit)]).select(list(columns))


_KINDS: dict[str, Any] = {".parquet": ParquetUnits, ".orc": OrcUnits, ".arrow": IpcUnits, ".feather": IpcUnits, ".ipc": IpcUnits}


def open_units(path: Path) -> UnitFile:
    """The file by its ending.

    Raises:
        RequestError: the ending is not one of a columnar format, or the file is missing or damaged.
    """
    kind = _KINDS.get(path.suffix.lower())
    if kind is None:
        so = f"training reads Parquet, ORC and Arrow IPC ({', '.join(_KINDS)})"
        raise RequestError(f"data file {path}", so, "Convert it first: gem data convert.")
    try:
        opened: UnitFile = kind(path)
    except (OSError, pa.ArrowException) as error:
        raise RequestError(f"data file {path}", f"it cannot be opened: {error}", "Check the path, or write the file again.") from error
    return opened


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of a split: ``rows`` rows of ``path``, the first of which is row ``first`` of the split."""

    path: Path
    index: int
    rows: int
    first: int


def list_units(files: Sequence[tuple[Path, Sequence[int]]]) -> list[Unit]:
    """The units of a split in file order; ``files`` holds each file with the rows of its units. Units without rows are left out."""
    units, first = [], 0
    for path, sizes in files:
        for index, rows in enumerate(sizes):
            if rows:
                units.append(Unit(path, index, rows, first))
            first += rows
    return units
