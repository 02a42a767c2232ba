"""What the cost model says is sent and kept is what four gloo ranks send and keep. The ranks' work is in ranks_costmodel.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from costs import EXACT, machine
from rank_batches import TABLES, global_rows, pack
from ranks_costmodel import DELAYED, GRIDS, MICRO, Chain
from torch import nn

from gem_core.spec import BatchFacts, BlockFacts, EmbeddingPlan, ModelFacts, SparseOptimizer
from gem_parallel.costmodel.dense import Dense, dense_in
from gem_parallel.costmodel.step import Step
from gem_parallel.mesh import layout_of
from gem_parallel.sparse.planning import plan_sharded_2d

WORLD = 4
NO_TABLES = EmbeddingPlan(world=WORLD, tables=(), held=(0,) * WORLD, working=0, sent={})


@pytest.fixture(scope="module")
def ranks(on_ranks: Callable[..., list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(Path(__file__).with_name("ranks_costmodel.py"), tmp_path_factory.mktemp("costmodel"), WORLD)


def numbers(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def facts() -> ModelFacts:
    chain = Chain()
    blocks = [("rest", chain.head), *((f"layers.{i}", layer) for i, layer in enumerate(chain.layers))]
    return ModelFacts(
        blocks=tuple(BlockFacts(name=name, parameters=numbers(part), flops=1.0, saved=0.0) for name, part in blocks), dtype="fp32", row_cv=0.0
    )


def planned(replicas: int, reshard: bool) -> tuple[Dense, dict[str, float]]:
    dense = dense_in(layout_of(WORLD, replicate=replicas), facts(), {"reshard": reshard})
    nothing = BatchFacts(rows=3.0, ids={}, distinct={})
    return dense, Step(machine(WORLD), dense, facts(), nothing, NO_TABLES, EXACT).outcome().sent


@pytest.mark.parametrize(("replicas", "reshard"), [grid for grid in GRIDS if grid[0] < WORLD])
def test_bytes_of_sharded_weights_are_those_that_were_counted(ranks: list[dict[str, Any]], replicas: int, reshard: bool) -> None:
    dense, sent = planned(replicas, reshard)
    for rank in ranks:
        ran = rank["dense"][replicas, reshard]
        assert ran["sent"]["dense: weights"] == sent["weights: gather"]
        assert ran["sent"]["dense: gradients"] == sent["gradients: scatter"]
        assert ran["sent"].get("dense: gradients between replicas", 0) == sent.get("gradients: replicas", 0)
        assert ran["held"] == sum(dense.kept(block) for block in facts().blocks)


def test_the_comparison_sees_weights_that_are_gathered_once_more(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["dense"][1, True]["sent"]["dense: weights"] != planned(1, False)[1]["weights: gather"]


@pytest.mark.parametrize(("replicas", "reduce"), DELAYED)
def test_bytes_of_a_step_of_micro_batches_are_those_that_were_counted(ranks: list[dict[str, Any]], replicas: int, reduce: str) -> None:
    """A group of one shard reduces in each micro-batch whatever was asked for."""
    dense = dense_in(layout_of(WORLD, replicate=replicas), facts(), {"reduce": reduce})
    nothing = BatchFacts(rows=3.0, ids={}, distinct={})
    sent = Step(machine(WORLD), dense, facts(), nothing, NO_TABLES, EXACT, MICRO).outcome().sent
    for rank in ranks:
        ran = rank["delayed"][replicas, reduce]
        assert ran["dense: gradients between replicas"] == sent["gradients: replicas"]
        assert ran.get("dense: weights", 0) == sent.get("weights: gather", 0)
        assert ran.get("dense: gradients", 0) == sent.get("gradients: scatter", 0)


def test_the_comparison_sees_a_reduction_in_each_micro_batch(ranks: list[dict[str, Any]]) -> None:
    counted = {reduce: ranks[0]["delayed"][2, reduce]["dense: gradients between replicas"] for reduce in ("last", "each")}
    assert counted["each"] == MICRO * counted["last"]


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_bytes_of_tables_are_those_that_were_counted(ranks: list[dict[str, Any]], replicas: int) -> None:
    """All ranks look up the same rows. Shards are exact on each of them, vectors and gradients in the sum over ranks."""
    batch = pack(global_rows(0))
    distinct = {t.name: float(torch.cat([batch.ids(key) for key in t.features]).unique().numel()) for t in TABLES}
    looked_up = BatchFacts(rows=batch.rows, ids={key: batch.ids(key).numel() for key in batch.keys}, distinct=distinct)
    plan = plan_sharded_2d(TABLES, SparseOptimizer(name="sgd"), topology=machine(WORLD), facts=looked_up, replicas=replicas)
    dense = dense_in(layout_of(WORLD, sparse_replicate=replicas), facts(), {})
    sent = Step(machine(WORLD), dense, facts(), looked_up, plan, EXACT).outcome().sent
    ran: dict[str, float] = {}
    for rank in ranks:
        for name, count in rank["tables"][replicas].items():
            ran[name] = ran.get(name, 0.0) + count / WORLD
    assert ran.get("tables: gather shards", 0) == sent.get("tables: shards for replicas", 0)
    assert ran.get("tables: answer", 0) == pytest.approx(sent.get("tables: vectors", 0))
    away, passed = (WORLD // replicas - 1) / (WORLD // replicas), (replicas - 1) / replicas
    gradients = sent.get("tables: gradients", 0.0)
    assert ran.get("tables: gradients", 0) == pytest.approx(gradients * away / (away + passed))
    assert ran.get("tables: gradients to owner", 0) <= gradients * passed / (away + passed)  # ranks of a shard group looked up the same rows


def test_groups_are_neighbours_innermost_and_apart(ranks: list[dict[str, Any]]) -> None:
    """Two replicas of two expert ranks: shards have one rank each."""
    assert ranks[3]["groups"] == {
        "dense dense_replicate": [1, 3],
        "dense dense_shard": [3],
        "dense dense_expert": [2, 3],
        "weights dense_replicate": [1, 3],
        "weights dense_shard": [2, 3],
        "sparse sparse_shard": [1, 3],
        "sparse sparse_replicate": [2, 3],
    }
