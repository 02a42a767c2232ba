"""When and between whom the bytes of an embedding engine's plan travel."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gem_core.spec import EmbeddingPlan
from gem_parallel.mesh import Layout

Phase = Literal["ask", "answer", "update", "gather"]
Kind = Literal["all_to_all", "all_gather", "all_reduce"]
SHARD, REPLICATE, ALL = (0,), (1,), (0, 1)
"""Dimensions of the mesh of the tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """One exchange of the tables.

    Args:
        name: what travels.
        phase: ``ask`` may run beside the step before, ``answer`` is waited for before the dense part, ``update`` comes after backward, ``gather``
            runs beside the dense optimiser.
        kind: the collective.
        axes: dimensions of the mesh of the tables along which it runs.
        sent: bytes that the busiest rank sends.
    """

    name: str
    phase: Phase
    kind: Kind
    axes: tuple[int, ...]
    sent: float


def moves(tables: EmbeddingPlan, layout: Layout) -> list[Move]:
    """Every exchange of a step; together they send what the plan says."""
    return [move for name, sent in tables.sent.items() if max(sent) for move in _of(name, max(sent), tables, layout)]


def _of(name: str, sent: float, tables: EmbeddingPlan, layout: Layout) -> Iterator[Move]:
    what = f"tables: {name}"
    away, passed = (layout.sparse_shard - 1) / layout.sparse_shard, (layout.sparse_replicate - 1) / layout.sparse_replicate
    exact = "row numbers" in tables.sent  # the engine's gradients go on from a shard's ranks to the replica that keeps the row
    if name == "row numbers":
        whole = 2 * away + passed
        yield Move(name=what, phase="ask", kind="all_to_all", axes=SHARD, sent=sent * away / whole)
        yield Move(name=what, phase="update", kind="all_to_all", axes=SHARD, sent=sent * away / whole)
        yield Move(name=what, phase="update", kind="all_to_all", axes=REPLICATE, sent=sent * passed / whole)
    elif name == "gradients" and exact:
        yield Move(name=what, phase="update", kind="all_to_all", axes=SHARD, sent=sent * away / (away + passed))
        yield Move(name=what, phase="update", kind="all_to_all", axes=REPLICATE, sent=sent * passed / (away + passed))
    elif name == "shards for replicas":
        yield Move(name=what, phase="gather", kind="all_gather", axes=REPLICATE, sent=sent)
    elif name == "average of copies":
        yield Move(name=what, phase="update", kind="all_reduce", axes=REPLICATE, sent=sent)
    elif name == "gradients of copied tables":
        yield Move(name=what, phase="update", kind="all_gather", axes=ALL, sent=sent)
    else:
        phase: Phase = "ask" if name == "ids" else "answer" if name == "vectors" else "update"
        yield Move(name=what, phase=phase, kind="all_to_all", axes=SHARD, sent=sent)
