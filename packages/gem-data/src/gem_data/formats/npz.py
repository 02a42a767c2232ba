"""NPZ archives of arrays with one entry a row: vectors are columns, matrices columns of fixed-size lists. Read a part at a time, never unpickled."""

import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from gem_core.spec import RequestError
from gem_data.formats.files import Location
from gem_data.formats.request import Request


@dataclass(frozen=True)
class Member:
    """One array of the archive: ``shape`` ``[rows]`` or ``[rows, width]``."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def type(self) -> pa.DataType:
        single = pa.string() if self.dtype.kind == "U" else pa.from_numpy_dtype(self.dtype.newbyteorder("="))
        return single if len(self.shape) == 1 else pa.list_(single, self.shape[1])


class NpzReader:
    def __init__(self, place: Location, request: Request) -> None:
        self._place, self._part = place, request.batch_rows
        try:
            self._archive = zipfile.ZipFile(place.open())
            self._members = [self._describe(name) for name in self._archive.namelist()]
        except (zipfile.BadZipFile, OSError, ValueError, EOFError) as error:
            raise RequestError(place.asked, f"it cannot be read as NPZ ({error})", "Check the format, and that the file is whole.") from error
        if not self._members:
            raise RequestError(place.asked, "it holds no array", "Give an archive with one array for each column.")
        self.schema = pa.schema([(member.name, member.type) for member in self._members])
        self._rows = self._members[0].shape[0]
        for member in self._members:
            if member.shape[0] != self._rows:
                so = f"array {member.name!r} has {member.shape[0]} entries, {self._members[0].name!r} has {self._rows}"
                raise RequestError(place.asked, so, "Give arrays with one entry a row.")

    def _describe(self, file: str) -> Member:
        with self._archive.open(file) as stream:
            member, fortran = self._header(file, stream)
        wrong = None
        if member.dtype.kind not in "biufU":
            wrong = f"holds {member.dtype}"
        elif member.shape[1:] == (0,):
            wrong = "has rows without values"
        elif len(member.shape) not in (1, 2):
            wrong = f"has {len(member.shape)} dimensions"
        elif fortran and len(member.shape) == 2:
            wrong = "lies in column order"
        if wrong:
            do = "Save numbers or unicode strings of shape [rows] or [rows, width] in row order."
            raise RequestError(self._place.asked, f"array {member.name!r} {wrong}", do)
        return member

    @staticmethod
    def _header(file: str, stream: Any) -> tuple[Member, bool]:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
        return Member(file.removesuffix(".npy"), shape, dtype), fortran

    def batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        chosen = [member for name in columns for member in self._members if member.name == name]
        with ExitStack() as stack:
            streams = [stack.enter_context(self._archive.open(f"{member.name}.npy")) for member in chosen]
            for member, stream in zip(chosen, streams, strict=True):
                self._header(member.name, stream)
            for start in range(0, self._rows, self._part):
                rows = min(self._part, self._rows - start)
                arrays = [self._read(member, stream, rows) for member, stream in zip(chosen, streams, strict=True)]
                yield pa.RecordBatch.from_arrays(arrays, names=columns)

    def _read(self, member: Member, stream: Any, rows: int) -> pa.Array:
        width = member.shape[1] if len(member.shape) == 2 else 1
        size = rows * width * member.dtype.itemsize
        try:
            data = stream.read(size)
        except (zipfile.BadZipFile, EOFError, OSError) as error:
            raise RequestError(self._place.asked, f"array {member.name!r} is damaged ({error})", "Check that the file is whole.") from error
        if len(data) < size:
            raise RequestError(self._place.asked, f"array {member.name!r} ends early", "Check that the file is whole.")
        flat = np.frombuffer(data, member.dtype).astype(member.dtype.newbyteorder("="))
        single = pa.array(flat.tolist(), pa.string()) if member.dtype.kind == "U" else pa.array(flat)
        return single if len(member.shape) == 1 else pa.FixedSizeListArray.from_arrays(single, width)
