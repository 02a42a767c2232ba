"""Ids to table rows: a vocabulary built from training values, or a stable hash. Row 0 is for unknown and missing values."""

import hashlib
from typing import Literal

import polars as pl
import torch
from torch import Tensor

from gem_core.spec import RequestError


class Vocabulary:
    """The distinct values of a column that occur at least ``min_count`` times, in ascending order, as rows 1, 2, ...

    Args:
        name: the feature's name, for messages.
        values: training values of any integer or string type; nulls are skipped.
        min_count: values seen more rarely share row 0.
        unknown: what ``encode`` does with a value that is neither null nor in the vocabulary.
    """

    def __init__(self, name: str, values: pl.Series, *, min_count: int = 1, unknown: Literal["row0", "error"] = "row0") -> None:
        counts = values.alias("value").drop_nulls().value_counts(name="count")
        kept = counts.filter(pl.col("count") >= min_count).get_column("value").sort()
        self._rows = pl.DataFrame({"value": kept, "row": pl.int_range(1, kept.len() + 1, dtype=pl.Int64, eager=True)})
        self.name = name
        self.unknown = unknown

    @property
    def cardinality(self) -> int:
        """Rows of the table, row 0 included."""
        return self._rows.height + 1

    def encode(self, values: pl.Series) -> Tensor:
        """``[values]`` int64 rows.

        Raises:
            RequestError: a value is unknown and ``unknown`` is ``error``.
        """
        rows = pl.DataFrame({"value": values}).join(self._rows, on="value", how="left", maintain_order="left").get_column("row")
        if self.unknown == "error":
            missed = values.filter(rows.is_null() & values.is_not_null())
            if missed.len():
                so = f"{missed.len()} values are not in its vocabulary of {self._rows.height}; the first is {missed[0]!r}"
                raise RequestError(f"ids of {self.name!r}", so, "Train on rows that hold them, or set unknown to row0.")
        return torch.from_numpy(rows.fill_null(0).to_numpy(writable=True))


class HashedIds:
    """Values hashed into rows 1 .. ``rows``: the same row on every machine and in every run, for integers and strings alike.

    Args:
        name: the feature's name; it salts the hash, so that columns collide independently.
        rows: number of hash rows; the table has one more.
    """

    def __init__(self, name: str, rows: int) -> None:
        self.name = name
        self.rows = rows

    @property
    def cardinality(self) -> int:
        return self.rows + 1

    def encode(self, values: pl.Series) -> Tensor:
        """``[values]`` int64 rows; 0 for null."""
        distinct = values.drop_nulls().unique()
        hashed = pl.Series("row", [self._row(str(value)) for value in distinct], dtype=pl.Int64)
        table = pl.DataFrame({"value": distinct, "row": hashed})
        rows = pl.DataFrame({"value": values}).join(table, on="value", how="left", maintain_order="left").get_column("row")
        return torch.from_numpy(rows.fill_null(0).to_numpy(writable=True))

    def _row(self, value: str) -> int:
        digest = hashlib.blake2b(f"{self.name}={value}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % self.rows + 1
