"""Vocabularies: the distinct values of a training column as rows 1, 2, ... of a table, the most frequent first."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from gem_core.spec import RequestError
from gem_data.ids.hashing import text_keys
from gem_data.ids.values import as_bits, chunks, distinct, is_text, widen

Rows = NDArray[np.int64]


class Vocabulary:
    """Distinct ``values`` (int64, uint64 or string) in row order: ``values[k]`` is row ``k + 1``. ``counts`` ``[values]`` int64."""

    def __init__(self, name: str, values: pa.Array, counts: pa.Array) -> None:
        self.name, self.values, self.counts = name, values, counts
        keys = self._keys(values)
        self._order: Rows = np.argsort(keys, kind="stable")
        self._sorted = keys[self._order]

    @classmethod
    def of(cls, name: str, values: pa.Array | pa.ChunkedArray, *, min_count: int = 1) -> "Vocabulary":
        """Of all values of a training column."""
        builder = VocabularyBuilder(name, min_count=min_count)
        builder.add(values)
        return builder.build()

    @classmethod
    def from_counts(cls, name: str, values: pa.Array, counts: pa.Array, *, min_count: int = 1) -> "Vocabulary":
        """From different values and how often each occurs: those seen at least ``min_count`` times, by falling count, then by rising value."""
        table = pa.table({"value": widen(values), "count": counts.cast(pa.int64())})
        table = table.filter(pc.and_(pc.greater_equal(table["count"], min_count), pc.is_valid(table["value"])))
        table = table.sort_by([("count", "descending"), ("value", "ascending")]).combine_chunks()
        return cls(name, *(_one_array(table[column]) for column in ("value", "count")))

    @property
    def cardinality(self) -> int:
        """Rows of the table, row 0 included."""
        return len(self.values) + 1

    def rows(self, values: pa.Array) -> Rows:
        """``[values]`` int64 rows of different values without missing ones; 0 for a value that the vocabulary does not hold.

        Raises:
            RequestError: the values are texts and the vocabulary holds integers.
        """
        if not len(self.values) or not len(values):
            return np.zeros(len(values), np.int64)
        if is_text(self.values.type):
            values = values if is_text(values.type) else values.cast(pa.large_string())
        elif is_text(values.type):
            do = "Read the column as integers, or build the vocabulary from texts."
            raise RequestError(f"ids of {self.name!r}", "they are texts, and its vocabulary holds integers", do)
        keys = self._keys(values)
        at = np.minimum(np.searchsorted(self._sorted, keys), self._sorted.size - 1)
        found = np.where(self._sorted[at] == keys, self._order[at] + 1, 0)
        return self._verified(values, found)

    def _verified(self, values: pa.Array, found: Rows) -> Rows:
        """``found`` without the rows of values that only look alike: texts of one hash, -1 and 2^64 - 1."""
        held = self.values.take(pa.array(np.maximum(found - 1, 0)))
        if is_text(self.values.type):
            same = pc.equal(held, values).to_numpy(zero_copy_only=False)
        else:
            same = (held.type == values.type) | (as_bits(values) < np.uint64(2**63))
        return np.where(same, found, 0)

    @staticmethod
    def _keys(values: pa.Array) -> NDArray[np.uint64]:
        return text_keys(values) if is_text(values.type) else as_bits(values)

    def write(self, folder: Path) -> Path:
        """Write ``FOLDER/NAME.parquet`` with the columns ``value``, ``row`` and ``count``."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.parquet"
        rows = pa.array(np.arange(1, self.cardinality))
        pq.write_table(pa.table({"value": self.values, "row": rows, "count": self.counts}), path, compression="zstd")
        return path

    @classmethod
    def read(cls, folder: Path, name: str) -> "Vocabulary":
        """The vocabulary that ``write`` wrote; RequestError where it is missing or damaged."""
        path = folder / f"{name}.parquet"
        asked = f"vocabulary {path}"
        try:
            table = pq.read_table(path, columns=["value", "row", "count"]).combine_chunks()
        except FileNotFoundError as error:
            raise RequestError(asked, "there is no such file", "Build it from the training rows: `gem data prepare`.") from error
        except (pa.ArrowException, OSError) as error:
            raise RequestError(asked, f"it cannot be read ({error})", "Build it again from the training rows: `gem data prepare`.") from error
        if not np.array_equal(table["row"].to_numpy(), np.arange(1, table.num_rows + 1)):
            raise RequestError(asked, "its rows are not 1, 2, 3, ... in order", "Build it again from the training rows: `gem data prepare`.")
        return cls(name, widen(_one_array(table["value"])), _one_array(table["count"]))


class VocabularyBuilder:
    """Counts the values of a column part by part; memory grows with the different values, not with the rows."""

    def __init__(self, name: str, *, min_count: int = 1) -> None:
        self.name, self.min_count = name, min_count
        self._counts: pa.Table | None = None
        self._fresh: list[pa.Table] = []

    def add(self, values: pa.Array | pa.ChunkedArray) -> None:
        """Count ``values``; missing ones are skipped.

        Raises:
            RequestError: they are no ids, or texts after integers or the other way round.
        """
        for chunk in chunks(self.name, values):
            found, index = distinct(chunk)
            if not len(found):
                continue
            counts = np.bincount(index[index >= 0], minlength=len(found))
            self._fresh.append(pa.table({"value": found, "count": counts}))
        if len(self._fresh) >= 64:
            self._merge()

    def _merge(self) -> None:
        parts = ([] if self._counts is None else [self._counts]) + self._fresh
        kinds = {part.schema.field("value").type for part in parts}
        if len(kinds) > 1:
            parts = [part.set_column(0, "value", _common(self.name, part["value"], kinds)) for part in parts]
        self._fresh = []
        if parts:
            grouped = pa.concat_tables(parts).group_by("value").aggregate([("count", "sum")])
            self._counts = pa.table({"value": grouped["value"], "count": grouped["count_sum"]})

    def build(self) -> Vocabulary:
        self._merge()
        if self._counts is None:
            return Vocabulary(self.name, pa.array([], pa.int64()), pa.array([], pa.int64()))
        return Vocabulary.from_counts(self.name, _one_array(self._counts["value"]), _one_array(self._counts["count"]), min_count=self.min_count)


def _common(name: str, values: pa.ChunkedArray, kinds: set[pa.DataType]) -> pa.ChunkedArray:
    if any(is_text(kind) for kind in kinds):
        raise RequestError(f"vocabulary of {name!r}", "its values are texts in one part and integers in another", "Read the column with one type.")
    try:
        return values.cast(pa.uint64())
    except pa.ArrowInvalid as error:
        so = "its values are negative in one part and beyond 2^63 in another"
        raise RequestError(f"vocabulary of {name!r}", so, "Read the column as strings.") from error


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    joined = column.combine_chunks()
    if isinstance(joined, pa.ChunkedArray):
        return pa.concat_arrays(joined.chunks) if joined.num_chunks else pa.array([], column.type)
    return joined
