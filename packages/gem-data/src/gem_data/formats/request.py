"""How a file is to be read; what every family of formats gets."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import pyarrow as pa

BadLines = Literal["error", "drop"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of ``scan``, checked; ``dropped`` counts lines left out by reason."""

    columns: tuple[str, ...] | None = None
    separator: str | None = None
    header: tuple[str, ...] | None = None
    encoding: str = "utf-8"
    missing: tuple[str, ...] = ("",)
    types: Mapping[str, pa.DataType] = field(default_factory=dict)
    lists: Mapping[str, str] = field(default_factory=dict)
    quote: bool | None = None
    bad_lines: BadLines = "error"
    batch_rows: int = 65_536
    dropped: Counter[str] = field(default_factory=Counter)


class Reader(Protocol):
    """One opened file.

    Args:
        schema: its columns, all of them.
    """

    schema: pa.Schema

    def batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Its rows, with at least these columns, in parts of any size."""
        ...
