"""torchrec's own planner, given a topology that is true for the machine; its defaults are those of an older one."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from gem_core.spec import BatchFacts, MachineError, RequestError, SparseOptimizer, TableSpec, Topology
from gem_parallel.sparse.native import load_torchrec, quiet_logging
from gem_parallel.sparse.options import TorchRecOptions
from gem_parallel.sparse.placement import Cluster, Place, check_layout, wishes
from gem_parallel.sparse.sharded import KERNELS, Storage, collection

OFFERED = ("table_wise", "row_wise", "table_row_wise")
"""What the planner may choose. Its column shards have widths of their own, and its replicated tables leave the update to another optimiser."""
RESERVED = 0.15
"""Part of a device's memory that tables leave to the dense part and activations, as torchrec's planner has it by default."""
LARGEST = 10_000
"""Tables times ranks. 80 tables on 64 ranks took 17 s on a CPU, 10 on 512 took 20 s."""


def torchrec_places(
    tables: Sequence[TableSpec], optimizer: SparseOptimizer, cluster: Cluster, topology: Topology, facts: BatchFacts, options: TorchRecOptions
) -> dict[str, Place]:
    """What torchrec's planner chooses.

    Raises:
        RequestError: it cannot plan for this machine or these rules, or would take minutes; ``auto`` is named instead.
        MachineError: it finds no plan that fits, or torchrec is missing.
    """
    _check(tables, cluster, topology)
    load_torchrec("cpu")
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
    from torchrec.distributed.planner.types import PlannerError

    wanted = wishes(tables, "planner", options.memory, options.tables)
    constraints = {
        f"t{i}": ParameterConstraints(
            sharding_types=_allowed(table, wanted[table.name][0], optimizer, cluster),
            compute_kernels=[KERNELS[wanted[table.name][1]]],
            pooling_factors=[facts.ids[key] / facts.rows for key in table.features],
        )
        for i, table in enumerate(tables)
    }
    storage = Storage(dtype=options.dtype, forward_comm=options.forward_comm, backward_comm=options.backward_comm)
    with quiet_logging():
        planner = EmbeddingShardingPlanner(
            topology=_topology(cluster, topology),
            batch_size=max(1, round(facts.rows)),
            constraints=constraints,
            storage_reservation=FixedPercentageStorageReservation(RESERVED),
            debug=False,
        )
        module, sharders = _module(tables, optimizer, storage)
        try:
            found = planner.plan(module, sharders).plan
        except PlannerError as error:
            so = f"torchrec's planner finds nothing that fits ({str(error).strip().splitlines()[0]})"
            raise MachineError(f"tables on {topology.world} ranks", so, "With sharding = 'auto' need and have are told.") from error
    chosen = {name: parameter for part in found.values() for name, parameter in part.items()}
    return {table.name: _place(chosen[f"t{i}"], wanted[table.name][1], cluster) for i, table in enumerate(tables)}


def _check(tables: Sequence[TableSpec], cluster: Cluster, topology: Topology) -> None:
    if topology.device != "cuda":
        so = "torchrec's planner knows no bags spread by rows there, and no figures of the machine"
        raise RequestError(f"sharding 'planner' on {topology.device}", so, "Use sharding = 'auto', or plan for a GPU: gem plan --machine h200.")
    if topology.memory is None or topology.memory_bandwidth is None or not topology.tiers:
        so = f"memory or bandwidths of the machine are unknown ({topology.source})"
        raise RequestError("sharding 'planner'", so, "Name the machine: gem plan --machine h200.")
    if len(tables) * cluster.world > LARGEST:
        so = f"torchrec's planner would take minutes for {len(tables)} tables on {cluster.world} ranks"
        raise RequestError("sharding 'planner'", so, "Use sharding = 'auto'.")


def _allowed(table: TableSpec, sharding: str, optimizer: SparseOptimizer, cluster: Cluster) -> list[str]:
    if sharding != "planner":
        if sharding not in OFFERED:
            so = f"torchrec's planner is offered {', '.join(OFFERED)} only"
            raise RequestError(f"sharding {sharding!r} for table {table.name!r} beside sharding 'planner'", so, "Use sharding = 'auto'.")
        check_layout(table, sharding, optimizer, cluster)
        return [sharding]
    return [sharding for sharding in OFFERED if _works(table, sharding, optimizer, cluster)]


def _works(table: TableSpec, sharding: str, optimizer: SparseOptimizer, cluster: Cluster) -> bool:
    try:
        check_layout(table, sharding, optimizer, cluster)
    except RequestError:
        return False
    return True


def _topology(cluster: Cluster, topology: Topology) -> Any:
    from torchrec.distributed.planner import Topology as TorchRecTopology

    inside, across = topology.tiers[0], topology.tiers[min(1, len(topology.tiers) - 1)]
    milli = 1e-3  # torchrec counts bytes a millisecond
    return TorchRecTopology(
        world_size=cluster.world,
        compute_device="cuda",
        hbm_cap=topology.memory,
        local_world_size=cluster.local,
        hbm_mem_bw=(topology.memory_bandwidth or 0.0) * milli,
        intra_host_bw=inside.bandwidth * milli,
        inter_host_bw=across.bandwidth * milli,
    )


def _module(tables: Sequence[TableSpec], optimizer: SparseOptimizer, storage: Storage) -> tuple[nn.Module, list[Any]]:
    """The collections that the engine would shard, on the meta device, and their sharders."""
    module, sharders = nn.Module(), []
    names = {f"t{i}": table for i, table in enumerate(tables)}
    kinds: dict[int, dict[str, TableSpec]] = {}
    for name, table in names.items():
        kinds.setdefault(table.dim if table.pooling == "none" else 0, {})[name] = table
    for width, group in kinds.items():
        sharder, part = collection(group, optimizer, bags=width == 0, storage=storage)
        module.add_module(f"width{width}", part)
        sharders.append(sharder)
    return module, sharders


def _place(parameter: Any, memory: str, cluster: Cluster) -> Place:
    sharding = str(parameter.sharding_type)
    ranks: Mapping[str, tuple[int, ...]] = {"row_wise": tuple(range(cluster.world))}
    return Place(sharding=sharding, ranks=ranks.get(sharding, tuple(parameter.ranks)), memory=memory)
