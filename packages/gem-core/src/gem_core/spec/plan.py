"""What an embedding engine plans before a run: where tables lie, what they take of each rank's memory, and what ranks send."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchFacts:
    """What one rank looks up in a step, as an average over ranks.

    Args:
        rows: rows of its share of a global batch.
        ids: ids by feature.
        distinct: distinct rows by table.
    """

    rows: float
    ids: Mapping[str, float]
    distinct: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePlan:
    """Where one table lies.

    Args:
        table: its name.
        rows: its rows.
        dim: its width.
        sharding: the engine's word for how it is spread.
        where: the ranks that hold it, in words.
        bytes: weights and optimiser state, over all ranks.
    """

    table: str
    rows: int
    dim: int
    sharding: str
    where: str
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingPlan:
    """What an engine would do on ``world`` ranks.

    Args:
        world: number of ranks.
        tables: every table once.
        held: bytes of weights and optimiser state that each rank keeps, ``[world]``.
        working: bytes a rank needs beside them in a step, for tables that are gathered.
        sent: bytes that each rank sends in a step by what they are sent for, ``{name: [world]}``, estimated from ``BatchFacts``.
        file: text of a plan file that pins the placement; None where nothing can be pinned.
    """

    world: int
    tables: tuple[TablePlan, ...]
    held: tuple[int, ...]
    working: int
    sent: Mapping[str, tuple[float, ...]]
    file: str | None = None
