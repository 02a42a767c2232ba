"""Small machines, models and tables for the tests of the cost model."""

from collections.abc import Callable
from typing import Any

from gem_core.spec import BatchFacts, BlockFacts, EmbeddingPlan, ModelFacts, SparseOptimizer, StepRequest, TableSpec, Tier, Topology
from gem_parallel.costmodel.assumed import Assumed
from gem_parallel.sparse.planning import plan_sharded_2d

EXACT = Assumed(matmul=1.0, memory=1.0, links=1.0, launch=0.0, message=0.0, row_cv=0.0, reserve=0.0)
"""Every figure of the machine is reached and nothing is added."""
TABLES = (
    TableSpec(name="a", rows=4096, dim=16, features=("x", "y"), init_scale=1.0),
    TableSpec(name="b", rows=512, dim=8, features=("z",), pooling="sum", init_scale=1.0),
)


def machine(world: int, *sizes: int, memory: int | None = None, oversubscription: float = 1.0) -> Topology:
    """Tiers of these sizes, each ten times slower than the one inside it."""
    tiers = tuple(
        Tier(name=f"tier{k}", size=size, bandwidth=1e9 / 10**k, latency=1e-6 * 10**k, oversubscription=oversubscription if k else 1.0)
        for k, size in enumerate(sizes or (1 << 20,))
    )
    return Topology(world=world, device="cuda", tiers=tiers, memory=memory, memory_bandwidth=1e10, peak_flops={"fp32": 1e11})


def model(
    blocks: int = 3, experts: int = 0, *, flops: float = 1e6, parameters: int = 10_000, saved: float = 4000.0, row_cv: float = 0.0
) -> ModelFacts:
    """``rest`` and equal blocks; half of each block's weights and work is its experts'."""
    made = [BlockFacts(name="rest", parameters=parameters // 2, flops=flops / 2, saved=saved / 2)]
    for i in range(blocks):
        half: dict[str, Any] = {"expert_parameters": parameters // 2, "expert_flops": flops / 2, "expert_numbers": (60, 20)} if experts else {}
        made.append(BlockFacts(name=f"layers.{i}", parameters=parameters, flops=flops, saved=saved, experts=experts, **half))
    return ModelFacts(blocks=tuple(made), dtype="fp32", row_cv=row_cv)


def batch(rows: float = 32.0) -> BatchFacts:
    return BatchFacts(rows=rows, ids={"x": 3 * rows, "y": rows, "z": 2 * rows}, distinct={"a": 2 * rows, "b": rows})


def tables_on(topology: Topology, facts: BatchFacts) -> Callable[[int], EmbeddingPlan]:
    return lambda replicas: plan_sharded_2d(TABLES, SparseOptimizer(), topology=topology, facts=facts, replicas=replicas)


def request(topology: Topology, facts: ModelFacts, *, best: int = 0, rows: float = 32.0, table_replicas: int = 1, **strategies: Any) -> StepRequest:
    return StepRequest(
        topology=topology,
        model=facts,
        batch=batch(rows),
        tables=tables_on(topology, batch(rows)),
        table_replicas=table_replicas,
        strategies=strategies or {"fsdp": {}},
        best=best,
        assume={"matmul": 1.0, "memory": 1.0, "links": 1.0, "launch": 0.0, "message": 0.0, "reserve": 0.0},
    )
