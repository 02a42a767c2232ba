"""The files of a split: their columns checked, their units read, decoded and put together to windows."""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from gem_core.spec import RequestError
from gem_data.feed.batching import Window
from gem_data.feed.cursor import Trained
from gem_data.feed.decode import Columns, Decoder
from gem_data.feed.order import Ints, Slice, shuffle_keys
from gem_data.feed.part import Part
from gem_data.feed.pipeline import ahead
from gem_data.feed.units import Place, Unit, UnitFile, list_units, open_units

REQUEST_ROW = "request_row"
OPEN_FILES = 4


@dataclass(frozen=True, slots=True)
class SplitFile:
    """A file of rows, and the file of what the rows of a request share, if there is one."""

    rows: Path
    requests: Path | None = None


def index_files(files: Sequence[SplitFile], columns: Sequence[str], promised: Mapping[Path, int]) -> list[Unit]:
    """The units of a split.

    Args:
        columns: what the files must hold.
        promised: rows that a file is said to have.

    Raises:
        RequestError: a file cannot be read, lacks a column, or has another number of rows than was promised.
    """
    listed = []
    for file in files:
        opened = open_units(file.rows)
        held = set(opened.schema.names)
        if file.requests is not None:
            held |= set(open_units(file.requests).schema.names)
            columns = [*columns, REQUEST_ROW] if REQUEST_ROW not in columns else columns
        missing = [name for name in columns if name not in held]
        if missing:
            so = f"it lacks {', '.join(missing)}; it has {', '.join(sorted(held))}"
            raise RequestError(f"data file {file.rows}", so, "Name the columns in schema.toml as they are in the file.")
        if file.rows in promised and promised[file.rows] != sum(opened.sizes):
            so = f"it has {sum(opened.sizes)} rows, data.json says {promised[file.rows]}"
            raise RequestError(f"data file {file.rows}", so, "Prepare the data again: the folder was changed.")
        listed.append((file.rows, opened.sizes))
    return list_units(listed)


class _OpenFiles(threading.local):
    """The files that a thread has open, the last used one last: an open file is read by one thread at a time."""

    def __init__(self) -> None:
        self.files: OrderedDict[Path, UnitFile] = OrderedDict()

    def get(self, path: Path) -> UnitFile:
        file = self.files.pop(path, None) or open_units(path)
        self.files[path] = file
        while len(self.files) > OPEN_FILES:
            self.files.popitem(last=False)
        return file


class Reader:
    """Reads windows of one split, one window at a time.

    Args:
        files: of the split.
        units: of those files.
        decoder: of their columns.
    """

    def __init__(self, files: Sequence[SplitFile], units: Sequence[Unit], decoder: Decoder) -> None:
        self._requests = {file.rows: file.requests for file in files}
        self._units, self._decoder = units, decoder
        self._columns = decoder.schema.columns()
        self._open = _OpenFiles()
        self._last: tuple[int, Part] | None = None

    def window(self, asked: Slice, own: Trained, seed: int | None, epoch: int, pool: ThreadPoolExecutor | None = None) -> Window:
        """The rows of a slice that ``own`` does not hold, shuffled if there is a seed, and the batches that are left of it.

        Two of its units are read at once in ``pool``, if there is one: Arrow decodes the columns of one unit in parallel, and would leave a core idle
        before the last of them is done.
        """
        wanted = [(piece.unit, rows) for piece in asked.pieces if (rows := own.left(piece.unit, piece.rows)).size]
        if not wanted:  # a batch without rows has columns all the same
            wanted = [(asked.pieces[0].unit if asked.pieces else 0, np.zeros(0, np.int64))]
        decoded = self._decoded([unit for unit, _ in wanted], pool)
        parts = [part.take(rows) for part, (_, rows) in zip(decoded, wanted, strict=True)]
        origin = np.concatenate([part.origin for part in parts])
        order = np.arange(origin.size) if seed is None else np.argsort(shuffle_keys(origin, seed, epoch), kind="stable")
        skipped = _done_batches(asked.sizes, origin.size)
        return Window(tuple(parts), order, asked.sizes[skipped:], asked.globals[skipped:])

    def _decoded(self, numbers: Sequence[int], pool: ThreadPoolExecutor | None) -> Iterator[Part]:
        """Units in their order. The last one is kept: a window often ends inside of a unit, and the next one begins there."""
        if self._last is not None and self._last[0] == numbers[0]:
            yield self._last[1]
            numbers = numbers[1:]
        self._last = None
        units = [self._units[number] for number in numbers]
        read = ahead((partial(self._read, unit) for unit in units), pool, 1)
        for unit, number, (columns, place) in zip(units, numbers, read, strict=True):
            part = self._decoder.decode(columns, place, unit.first)
            if number == numbers[-1]:
                self._last = number, part
            pa.default_memory_pool().release_unused()  # what decoding needed goes back, or the next unit would add to it
            yield part

    def _read(self, unit: Unit) -> tuple[Columns, Place]:
        file = self._open.get(unit.path)
        place = Place(unit.path.name, file.kind, unit.index)
        requests = self._requests[unit.path]
        held = set(file.schema.names)
        own = [name for name in self._columns if name in held]
        try:
            if requests is None:
                return Columns(unit.rows, _arrays(file.read(unit.index, own)), {}, np.zeros(0, np.int64)), place
            arrays = _arrays(file.read(unit.index, [*own, REQUEST_ROW]))
            at = arrays.pop(REQUEST_ROW).to_numpy(zero_copy_only=False).astype(np.int64)
            shared = [name for name in self._columns if name not in held]
            low, arrays_of_requests = self._read_requests(requests, at, shared, place)
            return Columns(unit.rows, arrays, arrays_of_requests, at - low), place
        except (OSError, pa.ArrowException) as error:
            so = f"{place.kind} {place.unit} cannot be read: {error}"
            raise RequestError(f"data file {unit.path}", so, "The file is damaged; write it again.") from error

    def _read_requests(self, path: Path, at: Ints, names: Sequence[str], place: Place) -> tuple[int, dict[str, pa.Array]]:
        """The entries ``at.min() .. at.max()`` of a file of requests, and the first of them."""
        file = self._open.get(path)
        ends = np.cumsum(file.sizes)
        low, high = int(at.min()), int(at.max()) + 1
        total = int(ends[-1]) if ends.size else 0
        if low < 0 or high > total:
            row = int(np.flatnonzero((at < 0) | (at >= total))[0])
            so = f"{place.row(row)} names request {int(at[row])}; {path.name} has {total}"
            raise RequestError("rows that share histories", so, "Prepare the data again.")
        first, last = int(np.searchsorted(ends, low, "right")), int(np.searchsorted(ends, high, "left"))
        table = pa.concat_tables([file.read(unit, names) for unit in range(first, last + 1)])
        skip = low - int(ends[first] - file.sizes[first])
        return low, _arrays(table.slice(skip, high - low))


def _arrays(table: pa.Table) -> dict[str, pa.Array]:
    """One array a column; nothing is copied where a column lies in one piece already."""
    out = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        out[name] = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return out


def _done_batches(sizes: Sequence[int], left: int) -> int:
    """How many of the first batches have been trained when ``left`` rows are left."""
    done = 0
    while sum(sizes[done:]) > left:
        done += 1
    return done
