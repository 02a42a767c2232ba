"""Bytes that ranks keep of tables, and that they send in a step: the formulas behind ``gem plan``.

Everything is an average over batches: a rank looks up what ``BatchFacts`` says, and its ids are spread evenly over the rows of a table.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gem_core.spec import BatchFacts, SparseOptimizer, TableSpec
from gem_parallel.sparse.placement import SPLITS_ROWS, Cluster, Place

WIDTHS = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Bytes of a number."""
NAMES = ("ids", "vectors", "gradients", "gradients of copied tables", "average of copies")


@dataclass(frozen=True, kw_only=True, slots=True)
class Formats:
    """Bytes of a number: in stored rows, in vectors and in gradients between ranks."""

    rows: int = 4
    vectors: int = 4
    gradients: int = 4


def row_bytes(table: TableSpec, optimizer: SparseOptimizer, width: int) -> int:
    """A row with its optimiser state, which is float32; ``width`` is that of a stored number."""
    state = {"sgd": 0, "rowwise_adagrad": 4, "adam": 8 * table.dim}[optimizer.name]
    return table.dim * width + state


def held_bytes(table: TableSpec, place: Place, optimizer: SparseOptimizer, width: int, local: int) -> Iterator[tuple[int, int]]:
    """``(rank, bytes)`` of each rank that holds a part of the table; hosts have ``local`` ranks."""
    whole = table.rows * row_bytes(table, optimizer, width)
    if place.sharding == "data_parallel":
        yield from ((rank, whole) for rank in place.ranks)
    elif place.sharding not in SPLITS_ROWS:  # rules that cut columns cut all of their state with them
        yield from ((rank, whole // len(place.ranks)) for rank in place.ranks)
    else:
        parts = local if place.sharding == "grid" else len(place.ranks)
        part = -(-table.rows // parts)
        for index, rank in enumerate(place.ranks):
            rows = max(0, min(part, table.rows - index % parts * part))
            yield rank, whole * rows // table.rows // (len(place.ranks) // parts)


def sent_bytes(
    tables: Sequence[TableSpec], places: Mapping[str, Place], facts: BatchFacts, cluster: Cluster, replicas: int, formats: Formats
) -> dict[str, list[float]]:
    """Bytes a step by what they are sent for, ``{name: [ranks of a group]}``; all ``replicas`` groups are alike."""
    out = {name: [0.0] * cluster.world for name in NAMES}
    for table in tables:
        place = places[table.name]
        ids = sum(facts.ids[key] for key in table.features)
        bags = facts.rows * len(table.features)
        if place.sharding == "data_parallel":
            each = (cluster.world * replicas - 1) * facts.distinct[table.name] * (8 + 4 * table.dim)
            _add(out["gradients of copied tables"], range(cluster.world), each)
        elif place.sharding == "row_wise":
            away = (cluster.world - 1) / cluster.world
            _add(out["ids"], range(cluster.world), 8 * ids * away + 8 * bags * (cluster.world - 1))
            _add(out["vectors"], range(cluster.world), ids * away * table.dim * formats.vectors)
            _add(out["gradients"], range(cluster.world), ids * away * table.dim * formats.gradients)
        elif place.sharding in ("table_wise", "column_wise"):
            vectors = (ids if table.pooling == "none" else bags) * table.dim / len(place.ranks)
            for holder in place.ranks:
                others = [rank for rank in range(cluster.world) if rank != holder]
                _add(out["ids"], others, 8 * ids + 8 * bags)
                _add(out["gradients"], others, vectors * formats.gradients)
                out["vectors"][holder] += len(others) * vectors * formats.vectors
        else:
            _by_host(out, table, place, ids, bags, cluster, formats)
    return {name: values for name, values in out.items() if any(values)}


def _by_host(out: dict[str, list[float]], table: TableSpec, place: Place, ids: float, bags: float, cluster: Cluster, formats: Formats) -> None:
    """Rows over a host's ranks: bags are reduced inside the host, then sent to the rank of the same place in each other host."""
    local, hosts = cluster.local, len(place.ranks) // cluster.local
    columns = table.dim / hosts
    for rank in range(cluster.world):
        away = len(place.ranks) - (rank in place.ranks)
        out["ids"][rank] += away * (8 * ids / local + 8 * bags)
        inside = (local - 1) / local * cluster.world * bags * columns if rank in place.ranks else 0.0
        across = (cluster.hosts - 1) * bags * columns
        out["vectors"][rank] += (inside + (across if rank in place.ranks else 0.0)) * formats.vectors
        elsewhere = hosts - (rank in place.ranks)
        out["gradients"][rank] += (inside + elsewhere * bags * columns) * formats.gradients


def _add(values: list[float], ranks: Sequence[int], each: float) -> None:
    for rank in ranks:
        values[rank] += each
