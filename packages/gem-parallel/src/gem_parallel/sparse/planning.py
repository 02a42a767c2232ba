"""Plans of both engines for ``gem plan``: placement, memory and bytes sent, and what to change when tables do not fit."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gem_core.spec import BatchFacts, EmbeddingPlan, MachineError, RequestError, SparseOptimizer, TablePlan, TableSpec, Topology, check_tables
from gem_parallel.sparse.copies import group_cluster
from gem_parallel.sparse.layout import check_fit, lay_out
from gem_parallel.sparse.options import Sharded2DOptions, TableRule, TorchRecOptions
from gem_parallel.sparse.placement import Cluster, Place
from gem_parallel.sparse.planfile import write_plan
from gem_parallel.sparse.planner import RESERVED, torchrec_places
from gem_parallel.sparse.volumes import WIDTHS, Formats, held_bytes, row_bytes, sent_bytes

MOST_RANKS = 1 << 16


def plan_torchrec(
    specs: Sequence[TableSpec], optimizer: SparseOptimizer, /, *, topology: Topology, facts: BatchFacts, **options: Any
) -> EmbeddingPlan:
    """The plan of engine ``torchrec``.

    Raises:
        RequestError: as the engine itself would.
        MachineError: the tables do not fit; the message lists them by size, with need, have and the smallest change that fits.
    """
    tables, chosen = specs, TorchRecOptions(**options)
    check_tables(tables, optimizer)
    check_fit(tables, optimizer, topology.device, chosen)
    cluster = group_cluster(topology.world, _local(topology), topology.device, chosen.replicas, optimizer)
    places = _places(tables, optimizer, cluster, topology, facts, chosen)
    held = _held(tables, places, optimizer, cluster, chosen)
    if _beyond(held, 0, topology):
        _refuse(tables, optimizer, held, 0, topology, WIDTHS[chosen.dtype], _changes(tables, optimizer, topology, chosen))
    formats = Formats(rows=WIDTHS[chosen.dtype], vectors=WIDTHS[chosen.forward_comm], gradients=WIDTHS[chosen.backward_comm])
    sent = sent_bytes(tables, places, facts, cluster, chosen.replicas, formats)
    if chosen.replicas > 1:
        sent["average of copies"] = [2 * (chosen.replicas - 1) / chosen.replicas * n for n in _averaged(tables, places, optimizer, cluster)]
    return EmbeddingPlan(
        world=topology.world,
        tables=tuple(_line(table, places[table.name], optimizer, cluster, chosen) for table in tables),
        held=tuple(n for n in held for _ in range(chosen.replicas)),
        working=0,
        sent={name: tuple(n for n in values for _ in range(chosen.replicas)) for name, values in sent.items()},
        file=write_plan(places, tables, cluster),
    )


def plan_sharded_2d(
    specs: Sequence[TableSpec], optimizer: SparseOptimizer, /, *, topology: Topology, facts: BatchFacts, **options: Any
) -> EmbeddingPlan:
    """The plan of engine ``sharded_2d``; the last ranks' slices may be partly empty, and are counted whole, as they are kept.

    Raises:
        RequestError: ``replicas`` does not divide the ranks.
        MachineError: as ``plan_torchrec``.
    """
    tables, world, replicas = specs, topology.world, Sharded2DOptions(**options).replicas
    check_tables(tables, optimizer)
    if world % replicas:
        raise RequestError(f"engine 'sharded_2d' with replicas = {replicas}", f"{world} ranks cannot be divided by it", "Choose a divisor.")
    held, working = _slices_of_2d(tables, optimizer, world, replicas)
    if _beyond([held], working, topology):
        _refuse(tables, optimizer, [held], working, topology, 4, _more_ranks_2d(tables, optimizer, topology, replicas))
    away, passed = (world // replicas - 1) / (world // replicas), (replicas - 1) / replicas
    rows = {table.name: facts.distinct[table.name] for table in tables}
    floats = sum(rows[table.name] * table.dim for table in tables)
    count = sum(rows.values())
    sent = {
        "shards for replicas": working * passed,
        "row numbers": 8 * count * (2 * away + passed),
        "vectors": 4 * floats * away,
        "gradients": 4 * floats * (away + passed),
    }
    return EmbeddingPlan(
        world=world,
        tables=tuple(
            TablePlan(
                table=table.name,
                rows=table.rows,
                dim=table.dim,
                sharding="sharded_2d",
                where=f"all: {-(-table.rows // world):,} rows each",
                bytes=table.rows * row_bytes(table, optimizer, 4),
            )
            for table in tables
        ),
        held=(held,) * world,
        working=working,
        sent={name: (value,) * world for name, value in sent.items() if value},
    )


def _slices_of_2d(tables: Sequence[TableSpec], optimizer: SparseOptimizer, world: int, replicas: int) -> tuple[int, int]:
    """Bytes a rank keeps, and those of a gathered shard; a shard of one replica is the slice itself."""
    slices = [(table, -(-table.rows // world)) for table in tables]
    held = sum(rows * row_bytes(table, optimizer, 4) for table, rows in slices)
    return held, sum(4 * rows * table.dim for table, rows in slices) * replicas if replicas > 1 else 0


def _more_ranks_2d(tables: Sequence[TableSpec], optimizer: SparseOptimizer, topology: Topology, replicas: int) -> Iterator[tuple[str, bool]]:
    if replicas > 1:
        yield "replicas = 1", not _beyond([_slices_of_2d(tables, optimizer, topology.world, 1)[0]], 0, topology)
    world = topology.world
    while world < MOST_RANKS:
        world += replicas if world < 64 * replicas else world // 64 // replicas * replicas
        held, working = _slices_of_2d(tables, optimizer, world, replicas)
        if not _beyond([held], working, topology):
            yield f"{world} ranks", True
            return


def _local(topology: Topology) -> int:
    return min(topology.tiers[0].size, topology.world) if topology.tiers else topology.world


def _places(
    tables: Sequence[TableSpec], optimizer: SparseOptimizer, cluster: Cluster, topology: Topology, facts: BatchFacts, options: TorchRecOptions
) -> dict[str, Place]:
    if options.sharding == "planner" and options.plan is None:
        places = torchrec_places(tables, optimizer, cluster, topology, facts, options)
    else:
        places = lay_out(tables, optimizer, cluster, options)
    return places or {table.name: Place(sharding="table_wise", ranks=(0,), memory=options.memory) for table in tables}


def _held(
    tables: Sequence[TableSpec], places: Mapping[str, Place], optimizer: SparseOptimizer, cluster: Cluster, options: TorchRecOptions
) -> list[int]:
    """Bytes of device memory by rank of a group; rows in host memory do not count."""
    held = [0] * cluster.world
    for table in tables:
        place = places[table.name]
        for rank, count in held_bytes(table, place, optimizer, WIDTHS[options.dtype], cluster.local):
            held[rank] += count if place.memory == "device" else 0
    return held


def _averaged(tables: Sequence[TableSpec], places: Mapping[str, Place], optimizer: SparseOptimizer, cluster: Cluster) -> list[int]:
    """Bytes that are averaged over groups, in float32, by rank of a group."""
    out = [0] * cluster.world
    for table in tables:
        if places[table.name].sharding != "data_parallel":
            for rank, count in held_bytes(table, places[table.name], optimizer, 4, cluster.local):
                out[rank] += count
    return out


def _line(table: TableSpec, place: Place, optimizer: SparseOptimizer, cluster: Cluster, options: TorchRecOptions) -> TablePlan:
    copies = options.replicas * (cluster.world if place.sharding == "data_parallel" else 1)
    some = place.ranks if len(place.ranks) <= 8 else (*place.ranks[:4], "...", place.ranks[-1])
    where = "all" if len(place.ranks) == cluster.world else ", ".join(map(str, some))
    memory = "" if place.memory == "device" else f" ({place.memory})"
    return TablePlan(
        table=table.name,
        rows=table.rows,
        dim=table.dim,
        sharding=place.sharding,
        where=f"{where}{' of each group' if options.replicas > 1 else ''}{memory}",
        bytes=table.rows * row_bytes(table, optimizer, WIDTHS[options.dtype]) * copies,
    )


def _beyond(held: Sequence[int], working: int, topology: Topology) -> bool:
    return topology.memory is not None and max(held) + working > (1 - RESERVED) * topology.memory


def _changes(tables: Sequence[TableSpec], optimizer: SparseOptimizer, topology: Topology, options: TorchRecOptions) -> Iterator[tuple[str, bool]]:
    """Changes from small to large, each with whether the tables fit then: rows spread over ranks, 16-bit rows, both, more ranks."""

    def fits(changed: TorchRecOptions, world: int = topology.world) -> bool:
        try:
            cluster = group_cluster(world, min(_local(topology), world), topology.device, changed.replicas, optimizer)
            places = _places(tables, optimizer, cluster, topology, BatchFacts(rows=0, ids={}, distinct={}), changed)
        except RequestError:
            return False
        return not _beyond(_held(tables, places, optimizer, cluster, changed), 0, topology)

    by_size = sorted(tables, key=lambda table: -table.rows * table.dim)
    rules: tuple[TableRule, ...] = ()
    plain = options.model_copy(update={"plan": None, "sharding": "auto" if options.sharding == "planner" else options.sharding})
    for table in by_size:
        rules = (*rules, TableRule(pattern=table.name, sharding="row_wise"))
        words = ", ".join(f"{{pattern = '{rule.pattern}', sharding = 'row_wise'}}" for rule in rules)
        yield f"embedding.options.tables = [{words}]", fits(plain.model_copy(update={"tables": (*rules, *options.tables)}))
    spread = plain.model_copy(update={"sharding": "auto", "tables": ()})
    yield "embedding.options.dtype = 'fp16'", options.dtype == "fp32" and fits(plain.model_copy(update={"dtype": "fp16"}))
    yield "embedding.options.dtype = 'fp16' with sharding = 'auto'", options.dtype == "fp32" and fits(spread.model_copy(update={"dtype": "fp16"}))
    world = topology.world
    while world < MOST_RANKS:
        world += max(options.replicas, world // 16 // options.replicas * options.replicas)
        if fits(spread, world):
            yield f"{world} ranks with sharding = 'auto'", True
            return


def _refuse(
    tables: Sequence[TableSpec],
    optimizer: SparseOptimizer,
    held: Sequence[int],
    working: int,
    topology: Topology,
    width: int,
    changes: Iterator[tuple[str, bool]],
) -> None:
    """Raise MachineError with tables by size, need against have, and the first change that fits."""
    sizes = sorted(((table.rows * row_bytes(table, optimizer, width), table.name) for table in tables), reverse=True)
    listed = ", ".join(f"{name} {count / 1e9:.4g} GB" for count, name in sizes[:10]) + (f" and {len(sizes) - 10} smaller" if len(sizes) > 10 else "")
    rank = held.index(max(held))
    have = (1 - RESERVED) * (topology.memory or 0)
    so = f"rank {rank} needs {(max(held) + working) / 1e9:.4g} GB and has {have / 1e9:.4g} GB for tables; with state they are {listed}"
    change = next((words for words, fit in changes if fit), None)
    do = f"The smallest change that fits: {change}." if change else f"Nothing up to {MOST_RANKS} ranks fits: make tables smaller."
    raise MachineError(f"tables on {topology.world} ranks", so, do)
