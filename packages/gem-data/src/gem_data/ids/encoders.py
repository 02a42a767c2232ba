"""Encoders: an id column in, rows of an embedding table out, and a count of what was not known."""

from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gem_core.spec import RequestError
from gem_data.ids.hashing import hash_keys, mix, text_keys
from gem_data.ids.values import as_bits, chunks, distinct
from gem_data.ids.vocabulary import Vocabulary
from gem_data.schema.declare import Id, Schema

Rows = NDArray[np.int64]
Unknown = Literal["row0", "error"]


class Encoder(Protocol):
    """One feature's way from ids to rows.

    Args:
        unknown: values encoded so far that were neither missing nor known.
        missing: values encoded so far that were null.
    """

    unknown: int
    missing: int

    @property
    def cardinality(self) -> int:
        """Rows of the table, row 0 included."""
        ...

    def encode(self, values: pa.Array | pa.ChunkedArray) -> Rows:
        """``[values]`` int64 in ``[0, cardinality)``; missing and unknown values are 0.

        Raises:
            RequestError: the column holds no ids, or a value is unknown and the feature refuses unknown values; then nothing is counted.
        """
        ...


class _Counting:
    """What the encoders share: the counters, and what becomes of unknown values."""

    def __init__(self, name: str, unknown: Unknown = "row0") -> None:
        self.name, self._rule = name, unknown
        self.unknown = 0
        self.missing = 0

    def encode(self, values: pa.Array | pa.ChunkedArray) -> Rows:
        plain = list(chunks(self.name, values))
        parts = [self._part(chunk) for chunk in plain]
        rows = np.concatenate([rows for rows, _ in parts]) if parts else np.zeros(0, np.int64)
        self.missing += sum(chunk.null_count for chunk in plain)
        self.unknown += sum(unknown for _, unknown in parts)
        return rows

    def _part(self, values: pa.Array) -> tuple[Rows, int]:
        """Rows and the number of unknown values."""
        raise NotImplementedError

    def _refuse(self, count: int, first: object, known: str) -> None:
        if self._rule == "error" and count:
            do = "Train on rows that hold them, or set unknown to row0."
            raise RequestError(f"ids of {self.name!r}", f"{count} values are not {known}; the first is {first!r}", do)


class HashEncoder(_Counting):
    """Values hashed into rows 1 .. ``rows - 1``; none is unknown.

    Args:
        name: the feature's name, for messages.
        rows: rows of the table, row 0 included.
        salt: usually the table's name, so that tables collide independently and features of one table agree.
    """

    def __init__(self, name: str, rows: int, salt: str) -> None:
        super().__init__(name)
        self._rows = rows
        self._salt = text_keys(pa.array([salt], pa.large_string()))

    @property
    def cardinality(self) -> int:
        return self._rows

    def _part(self, values: pa.Array) -> tuple[Rows, int]:
        if not pa.types.is_dictionary(values.type) and pa.types.is_integer(values.type):
            # Mixing an integer costs less than looking for its copies.
            rows = self._buckets(values.fill_null(0) if values.null_count else values)
            return (np.where(_valid(values), rows, 0) if values.null_count else rows), 0
        found, index = distinct(values)
        return np.concatenate([self._buckets(found), [0]])[index], 0

    def _buckets(self, values: pa.Array) -> Rows:
        spread = mix(hash_keys(values) ^ self._salt) % np.uint64(self._rows - 1)
        return spread.astype(np.int64) + 1


class VocabularyEncoder(_Counting):
    """Values looked up in a vocabulary."""

    def __init__(self, name: str, vocabulary: Vocabulary, unknown: Unknown = "row0") -> None:
        super().__init__(name, unknown)
        self._vocabulary = vocabulary

    @property
    def cardinality(self) -> int:
        return self._vocabulary.cardinality

    def _part(self, values: pa.Array) -> tuple[Rows, int]:
        found, index = distinct(values)
        rows = np.concatenate([self._vocabulary.rows(found), [0]])[index]
        missed = (rows == 0) & (index >= 0)
        count = int(missed.sum())
        if count:
            self._refuse(count, found[int(index[missed.argmax()])].as_py(), f"in its vocabulary of {self.cardinality - 1}")
        return rows, count


class PassEncoder(_Counting):
    """Values that are rows already; those outside ``0 .. rows - 1`` are unknown. Row 0 itself passes and is not counted."""

    def __init__(self, name: str, rows: int, unknown: Unknown = "row0") -> None:
        super().__init__(name, unknown)
        self._rows = rows

    @property
    def cardinality(self) -> int:
        return self._rows

    def _part(self, values: pa.Array) -> tuple[Rows, int]:
        plain = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
        if not pa.types.is_integer(plain.type):
            raise RequestError(f"ids of {self.name!r}", f"they are {plain.type}, and its encoding is 'pass'", "Pass integers, or encode it by hash.")
        bits = as_bits(plain.fill_null(0) if plain.null_count else plain)  # negative ones become huge
        outside = bits >= np.uint64(self._rows)
        count = int(outside.sum())
        if not count:
            return bits.view(np.int64), 0
        self._refuse(count, plain[int(outside.argmax())].as_py(), f"rows of its table, 0 .. {self._rows - 1}")
        return np.where(outside, 0, bits.view(np.int64)), count


def encoders(schema: Schema, folder: Path) -> dict[str, Encoder]:
    """``{batch key: encoder}`` of every id feature; each counts for itself, and those of one table share its vocabulary.

    Args:
        folder: holds ``vocabulary/TABLE.parquet``, read for the tables that need one.

    Raises:
        RequestError: a vocabulary is missing or damaged, or its rows are not those that the schema states.
    """
    held: dict[str, Vocabulary] = {}
    out: dict[str, Encoder] = {}
    for key, _, feature in schema.id_columns():
        if feature.encode == "vocabulary" and feature.table_name not in held:
            held[feature.table_name] = Vocabulary.read(folder / "vocabulary", feature.table_name)
        out[key] = _encoder(key, feature, held)
    return out


def _encoder(key: str, feature: Id, held: dict[str, Vocabulary]) -> Encoder:
    if feature.encode == "vocabulary":
        vocabulary = held[feature.table_name]
        if feature.rows not in (None, vocabulary.cardinality):
            so = f"the schema states {feature.rows} rows and its vocabulary has {vocabulary.cardinality}"
            raise RequestError(f"id {key!r}", so, "Use the vocabulary that belongs to the schema, or leave rows out.")
        return VocabularyEncoder(key, vocabulary, feature.unknown)
    assert feature.rows is not None  # the schema refuses hash and pass without rows
    return HashEncoder(key, feature.rows, feature.table_name) if feature.encode == "hash" else PassEncoder(key, feature.rows, feature.unknown)


def _valid(values: pa.Array) -> NDArray[np.bool_]:
    return np.asarray(pc.is_valid(values).to_numpy(zero_copy_only=False))
