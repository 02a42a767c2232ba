"""Writing the rows of one split as Parquet parts."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from gem_data.ids import Encoder
from gem_data.prepare.events import EventLog, Ints, count_missing, gather
from gem_data.prepare.output import REQUEST_ROW, row_columns
from gem_data.prepare.plan import Plan
from gem_data.schema import Schema

GROUP_ROWS = 16_384
PART_ROWS = 32 * GROUP_ROWS
GROUP_EVENTS = 2**22
"""Events of all histories of a row group; bounds the writer's memory where histories are long."""


@dataclass
class SplitSummary:
    """What was written of one split.

    Args:
        files: ``{"file": .., "rows": .., "requests": ..}`` of each part; ``requests`` only where histories are shared.
        unknown: values of row 0 by id feature: unknown or missing ids, and missing numbers by their feature.
        labels: ``{task: [observed, positive]}``, where the task's condition holds.
        matched: rows that found a row in the side table, by its number.
        cold: rows of a later split whose id no training row has, by feature.
    """

    rows: int = 0
    files: list[dict[str, Any]] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)
    labels: dict[str, list[int]] = field(default_factory=dict)
    matched: Counter[int] = field(default_factory=Counter)
    cold: Counter[str] = field(default_factory=Counter)


class _Part:
    """One rows file and, where histories are shared, its requests file; opened by the first batch."""

    def __init__(self, folder: Path, split: str, number: int) -> None:
        self.folder, self.name = folder, f"{split}/part-{number:05d}"
        self.rows = self.requests = 0
        self.last_probe: int | None = None
        self._writers: dict[str, pq.ParquetWriter] = {}

    def write(self, ending: str, batch: pa.RecordBatch) -> None:
        if ending not in self._writers:
            path = self.folder / f"{self.name}{ending}"
            path.parent.mkdir(exist_ok=True)
            # Dictionaries cost more time than they save: the codec finds repeated ids.
            self._writers[ending] = pq.ParquetWriter(path, batch.schema, compression="zstd", compression_level=1, use_dictionary=False)
        self._writers[ending].write_batch(batch, row_group_size=GROUP_ROWS)

    def close(self, shared: bool) -> dict[str, Any]:
        for writer in self._writers.values():
            writer.close()
        entry: dict[str, Any] = {"file": f"{self.name}.parquet", "rows": self.rows}
        return entry | ({"requests": self.requests} if shared else {})


class SplitWriter:
    """Writes a split.

    Args:
        folder: the prepared folder.
        logs: events of each history, in the order of the definition.
        seen: ids of training rows by feature, ``[rows of the table]`` bool; filled by the training split, read by later ones.
    """

    def __init__(
        self, folder: Path, split: str, plan: Plan, encode: dict[str, Encoder], logs: list[EventLog], seen: dict[str, NDArray[np.bool_]]
    ) -> None:
        self.folder, self.split, self.plan, self.encode, self.logs, self.seen = folder, split, plan, encode, logs, seen
        self.schema, self.shared = plan.schema, plan.shared
        self.summary = SplitSummary(labels={t.name: [0, 0] for t in self.schema.task})
        self._part: _Part | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        """Write rows as they come from ``sides.final_rows``."""
        for piece in _pieces(batch, len(self.logs)):
            part = self._part = self._part or _Part(self.folder, self.split, len(self.summary.files))
            columns = dict(row_columns(self.plan, self.encode, piece))
            self._count(piece, columns)
            if self.shared:
                first = self._new_requests(part, piece)
                columns[REQUEST_ROW] = pa.array(part.requests - 1 + np.cumsum(first))
                part.requests += int(first.sum())
                if first.any():
                    part.write(".requests.parquet", pa.RecordBatch.from_pydict(dict(self._histories(piece, first))))
            else:
                columns |= dict(self._histories(piece, np.ones(piece.num_rows, np.bool_)))
            part.write(".parquet", pa.RecordBatch.from_pydict(columns))
            part.rows += piece.num_rows
            if part.rows >= PART_ROWS:
                self._close_part()

    def close(self) -> SplitSummary:
        self._close_part()
        return self.summary

    def _close_part(self) -> None:
        if self._part is not None:
            self.summary.files.append(self._part.close(self.shared))
            self._part = None

    def _new_requests(self, part: _Part, piece: pa.RecordBatch) -> NDArray[np.bool_]:
        """``[rows]``: the row is the first of its request in this part."""
        probes = piece.column("gem_probe").to_numpy()
        first = np.concatenate([[probes[0] != part.last_probe], probes[1:] != probes[:-1]])
        part.last_probe = int(probes[-1])
        return first

    def _histories(self, piece: pa.RecordBatch, chosen: NDArray[np.bool_]) -> Iterator[tuple[str, pa.Array]]:
        for h, log in enumerate(self.logs):
            begin, end = _spans(piece, h)
            for name, lists in gather(log, begin[chosen], end[chosen]):
                if name in self.encode:
                    self.summary.unknown[name] += _zeros(lists)
                yield name, lists

    def _count(self, piece: pa.RecordBatch, columns: dict[str, pa.Array]) -> None:
        summary = self.summary
        summary.rows += piece.num_rows
        for name, (observed, positive) in count_labels(self.schema, columns).items():
            summary.labels[name][0] += observed
            summary.labels[name][1] += positive
        for feature in (*self.schema.id, *self.schema.multi_id):
            summary.unknown[feature.name] += _zeros(columns[feature.name])
        for number in self.schema.number:
            summary.unknown[number.name] += count_missing(piece.column(number.column or number.name))
        for feature in self.schema.id:
            rows = columns[feature.name].to_numpy()
            seen = self.seen.setdefault(feature.name, np.zeros(self.encode[feature.name].cardinality, np.bool_))
            if self.split == "train":
                seen[rows] = True
            else:
                summary.cold[feature.name] += int((~seen[rows]).sum())
        for name in piece.schema.names:
            if name.startswith("gem_matched_"):
                summary.matched[int(name.removeprefix("gem_matched_"))] += int(piece.column(name).to_numpy().sum())


def count_labels(schema: Schema, columns: Mapping[str, pa.Array]) -> dict[str, tuple[int, int]]:
    """``{task: (observed, positive)}``: a label is observed where it is not masked and the task's condition is observed and positive."""
    seen: dict[str, NDArray[np.bool_]] = {}
    positive: dict[str, NDArray[np.bool_]] = {}
    waiting = list(schema.task)
    while waiting:
        task = waiting.pop(0)
        if task.condition is not None and task.condition not in positive:
            waiting.append(task)
            continue
        known = columns[f"mask.{task.name}"].to_numpy(zero_copy_only=False)
        seen[task.name] = known if task.condition is None else known & positive[task.condition]
        positive[task.name] = seen[task.name] & (columns[f"label.{task.name}"].to_numpy() == 1)
    return {name: (int(seen[name].sum()), int(positive[name].sum())) for name in seen}


def _zeros(array: pa.Array) -> int:
    values = array.flatten() if pa.types.is_list(array.type) else array
    return len(values) - int(np.count_nonzero(values.to_numpy()))


def _spans(batch: pa.RecordBatch, h: int) -> tuple[Ints, Ints]:
    return batch.column(f"gem_begin_{h}").to_numpy(), batch.column(f"gem_end_{h}").to_numpy()


def _pieces(batch: pa.RecordBatch, histories: int) -> Iterator[pa.RecordBatch]:
    """Slices of at most ``GROUP_ROWS`` rows and, unless one row alone has more, ``GROUP_EVENTS`` events."""
    events = np.zeros(batch.num_rows, np.int64)
    for h in range(histories):
        begin, end = _spans(batch, h)
        events += end - begin
    total = np.cumsum(events)
    at = 0
    while at < batch.num_rows:
        done = int(total[at - 1]) if at else 0
        fits = int(np.searchsorted(total, done + GROUP_EVENTS, side="right"))
        to = min(max(fits, at + 1), at + GROUP_ROWS, batch.num_rows)
        yield batch.slice(at, to - at)
        at = to
