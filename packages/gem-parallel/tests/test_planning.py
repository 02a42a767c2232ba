"""Plans: every table once, bytes that ranks really keep and send, and advice that is true when tables do not fit."""

import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_batches import TABLES, global_rows, pack

from gem_core.spec import BatchFacts, EmbeddingPlan, MachineError, RequestError, SparseOptimizer, TableSpec, Tier, Topology
from gem_parallel.sparse.options import TorchRecOptions
from gem_parallel.sparse.placement import Cluster
from gem_parallel.sparse.planfile import read_plan
from gem_parallel.sparse.planner import RESERVED
from gem_parallel.sparse.planning import plan_sharded_2d, plan_torchrec
from gem_parallel.sparse.sharded2d import Sharded2DEmbeddings

Ranks = Callable[[int], list[dict[str, Any]]]
ADAGRAD = SparseOptimizer()
LAYOUT = {"table_wise": {"sharding": "table_wise"}, "row_wise": {"sharding": "row_wise", "dtype": "fp16"}}


def spec(name: str, rows: int, dim: int = 8, pooling: str = "sum") -> TableSpec:
    return TableSpec(name=name, rows=rows, dim=dim, features=(name,), pooling=pooling, init_scale=1.0)


def machine(world: int, memory: int | None = None, device: str = "cpu", local: int = 8) -> Topology:
    tiers = (Tier(name="host", size=local, bandwidth=450e9), Tier(name="cluster", size=1 << 20, bandwidth=50e9))
    return Topology(world=world, device=device, tiers=tiers, memory=memory, memory_bandwidth=4.8e12)


def facts(tables: tuple[TableSpec, ...], rows: float = 16.0, ids: float = 3.0) -> BatchFacts:
    return BatchFacts(rows=rows, ids={f: rows * ids for t in tables for f in t.features}, distinct={t.name: min(t.rows, rows * ids) for t in tables})


def of_batch() -> BatchFacts:
    batch = pack(global_rows(0))
    distinct = {t.name: float(torch.cat([batch.ids(key) for key in t.features]).unique().numel()) for t in TABLES}
    return BatchFacts(rows=batch.rows, ids={key: batch.ids(key).numel() for key in batch.keys}, distinct=distinct)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("layout", ["table_wise", "row_wise", "mixed", "columns"])
def test_bytes_kept_and_sent_are_those_of_a_run(sharded_ranks: Ranks, layout: str, world: int) -> None:
    """torchrec's own all-to-alls, counted on every rank in a step in which all ranks look up the same rows."""
    import ranks_sharded

    optimizer, options = {**ranks_sharded.MEASURED, **ranks_sharded.LAYOUTS}[layout]
    planned = plan_torchrec(TABLES, SparseOptimizer(name=optimizer), topology=machine(world), facts=of_batch(), **options)
    ran = [rank["measured"][layout] for rank in sharded_ranks(world)]
    assert list(planned.held) == [rank["held"] for rank in ran]
    for name in ("ids", "vectors", "gradients"):
        want = sum(rank.get(name, 0) for rank in ran)
        assert sum(planned.sent.get(name, ())) == pytest.approx(want), name
        if layout in ("table_wise", "columns"):  # rows spread by id meet their own batch unevenly
            assert list(planned.sent[name]) == pytest.approx([rank.get(name, 0) for rank in ran]), name
    copied = [rank.get("replicated tables: rows", 0) + rank.get("replicated tables: gradients", 0) for rank in ran]
    assert list(planned.sent.get("gradients of copied tables", [0.0] * world)) == pytest.approx(copied)


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_of_averaged_copies_are_those_of_a_run(sharded_ranks: Ranks, world: int) -> None:
    planned = plan_torchrec(TABLES, SparseOptimizer(name="sgd"), topology=machine(world), facts=of_batch(), sharding="row_wise", replicas=2)
    assert len(planned.held) == world
    for planned_bytes, rank in zip(planned.sent["average of copies"], sharded_ranks(world), strict=True):
        assert 5 * planned_bytes == pytest.approx(rank["layouts"]["copies"]["sent"]["tables: average copies"], abs=5 * len(TABLES))


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(8, 5000), st.sampled_from([8, 16, 24]), st.sampled_from(["sum", "none"])), min_size=1, max_size=8),
    world=st.sampled_from([1, 2, 4, 8]),
    replicas=st.sampled_from([1, 2]),
    sharding=st.sampled_from(["auto", "table_wise", "row_wise", "data_parallel", "column_wise"]),
    optimizer=st.sampled_from(["sgd", "rowwise_adagrad"]),
)
def test_case_F08_every_table_stands_in_the_plan_once(sizes: list[Any], world: int, replicas: int, sharding: str, optimizer: str) -> None:
    tables = tuple(spec(f"t{i}", *size) for i, size in enumerate(sizes))
    given_words = {"topology": machine(world), "facts": facts(tables)}
    if world % replicas or (sharding == "column_wise" and optimizer == "rowwise_adagrad" and world > 1):
        with pytest.raises(RequestError):
            plan_torchrec(tables, SparseOptimizer(name=optimizer), **given_words, sharding=sharding, replicas=replicas)
        return
    for planned in (
        plan_torchrec(tables, SparseOptimizer(name=optimizer), **given_words, sharding=sharding, replicas=replicas),
        plan_sharded_2d(tables, SparseOptimizer(name=optimizer), **given_words, replicas=replicas),
    ):
        assert [entry.table for entry in planned.tables] == [table.name for table in tables]
        assert len(planned.held) == planned.world == world
        assert all(len(values) == world and min(values) >= 0 for values in planned.sent.values())
        padding = sum(world * t.dim * 4 + world * 4 for t in tables)
        assert sum(entry.bytes for entry in planned.tables) - padding <= sum(planned.held) <= sum(entry.bytes for entry in planned.tables) + padding


def test_sharded_2d_keeps_what_is_planned() -> None:
    planned = plan_sharded_2d(TABLES, ADAGRAD, topology=machine(1), facts=of_batch())
    engine = Sharded2DEmbeddings(TABLES, ADAGRAD, device="cpu", seed=1)
    assert planned.held == (sum(t.numel() * 4 for piece in engine._slices for t in piece.tensors.values()),)
    assert planned.sent == {}


@pytest.mark.parametrize(("world", "replicas"), [(2, 1), (2, 2), (4, 2), (8, 2)])
def test_bytes_of_sharded_2d_follow_the_page(world: int, replicas: int) -> None:
    """One table of 64 rows of width 8, 4 distinct rows a rank."""
    planned = plan_sharded_2d(
        (spec("t", 64),), ADAGRAD, topology=machine(world), facts=BatchFacts(rows=4, ids={"t": 9}, distinct={"t": 4.0}), replicas=replicas
    )
    groups = world // replicas
    away, passed = (groups - 1) / groups, (replicas - 1) / replicas
    want = {
        "shards for replicas": 4 * 8 * (replicas - 1) * 64 / world,
        "row numbers": 8 * 4 * (2 * away + passed),
        "vectors": 4 * 8 * 4 * away,
        "gradients": 4 * 8 * 4 * (away + passed),
    }
    assert {name: values[0] for name, values in planned.sent.items()} == pytest.approx({name: n for name, n in want.items() if n})
    assert planned.held[0] == 64 // world * (8 * 4 + 4)
    assert planned.working == (64 // groups * 32 if replicas > 1 else 0)


@pytest.mark.parametrize("engine", ["torchrec", "sharded_2d"])
def test_case_F16_thousands_of_ranks_without_a_process_group_or_a_network(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", None)
    tables = tuple(spec(f"t{i}", 10_000 * 2 ** (i % 12), 64, ("sum", "none")[i % 2]) for i in range(60))
    begun = time.monotonic()
    plan = {"torchrec": plan_torchrec, "sharded_2d": plan_sharded_2d}[engine]
    planned = plan(tables, ADAGRAD, topology=machine(4096, 141 * 10**9, "cuda"), facts=facts(tables))
    assert time.monotonic() - begun < 10
    assert not torch.distributed.is_initialized()
    assert (len(planned.held), len(planned.tables)) == (4096, 60)
    if planned.file is not None:
        assert len(planned.file) < 20_000


# ---- what does not fit --------------------------------------------------------------------------------------------------------------


def refusal(tables: tuple[TableSpec, ...], topology: Topology, plan: Callable[..., EmbeddingPlan] = plan_torchrec, **options: Any) -> MachineError:
    with pytest.raises(MachineError) as caught:
        plan(tables, ADAGRAD, topology=topology, facts=facts(tables), **options)
    return caught.value


def test_what_does_not_fit_lists_tables_by_size_with_need_and_have() -> None:
    tables = (spec("small", 10_000), spec("large", 4_000_000), spec("middle", 500_000))
    error = refusal(tables, machine(2, 110_000_000), sharding="table_wise")
    assert "rank 0 needs 0.144 GB and has 0.0935 GB for tables" in error.so
    assert error.so.index("large 0.144 GB") < error.so.index("middle 0.018 GB") < error.so.index("small")
    assert error.do.endswith("embedding.options.tables = [{pattern = 'large', sharding = 'row_wise'}].")


@pytest.mark.parametrize(
    ("rows", "options", "advice"),
    [
        (4_000_000, {"sharding": "row_wise"}, {"dtype": "fp16"}),
        (12_000_000, {"sharding": "row_wise"}, 5),
    ],
)
def test_the_smallest_change_is_named_and_fits(rows: int, options: dict[str, Any], advice: Any) -> None:
    tables, memory = (spec("t", rows),), 84_000_000 if rows == 4_000_000 else 120_000_000
    error = refusal(tables, machine(2, memory), **options)
    if isinstance(advice, dict):
        assert "dtype = 'fp16'" in error.do
        plan_torchrec(tables, ADAGRAD, topology=machine(2, memory), facts=facts(tables), **options, **advice)
        return
    assert f"{advice} ranks" in error.do
    plan_torchrec(tables, ADAGRAD, topology=machine(advice, memory), facts=facts(tables), sharding="auto")
    refusal(tables, machine(advice - 1, memory), sharding="auto")


@pytest.mark.parametrize(("memory", "replicas", "words"), [(40_000_000, 1, "5 ranks"), (100_000_000, 2, "replicas = 1"), (60_000_000, 2, "8 ranks")])
def test_sharded_2d_that_does_not_fit_names_ranks(memory: int, replicas: int, words: str) -> None:
    tables = (spec("t", 4_000_000),)
    error = refusal(tables, machine(2, memory), plan_sharded_2d, replicas=replicas)
    assert words in error.do


def test_the_limit_itself_fits() -> None:
    need = 1000 * 36
    exact = int(need / (1 - RESERVED)) + 1
    plan_torchrec((spec("t", 1000),), ADAGRAD, topology=machine(1, exact), facts=facts((spec("t", 1000),)))
    refusal((spec("t", 1000),), machine(1, exact - 10))


def test_nothing_ever_fits() -> None:
    assert "make tables smaller" in refusal((spec("t", 1_000_000),), machine(2, 10), plan_sharded_2d, replicas=1).do


# ---- plan files and torchrec's planner ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharding", ["auto", "planner"])
def test_a_plan_is_pinned_and_taken(tmp_path: Any, sharding: str) -> None:
    tables = (spec("large", 400_000, 64, "none"), spec("city", 90), spec("tags", 2000, 16, "mean"), spec("tiny", 3, 8, "none"))
    topology = machine(8, 141 * 10**9, "cuda", local=4)
    planned = plan_torchrec(tables, ADAGRAD, topology=topology, facts=facts(tables), sharding=sharding)
    path = tmp_path / "plan.toml"
    path.write_text(planned.file or "")
    pinned = plan_torchrec(tables, ADAGRAD, topology=topology, facts=facts(tables), plan=str(path))
    assert (pinned.tables, pinned.held, pinned.sent) == (planned.tables, planned.held, planned.sent)
    places = read_plan(str(path), tables, Cluster(world=8, local=4, device="cuda"))
    assert places["tiny"].sharding == "table_wise"
    with pytest.raises(RequestError, match="8 ranks, here are 4"):
        plan_torchrec(tables, ADAGRAD, topology=machine(4), facts=facts(tables), plan=str(path))


def test_the_planner_keeps_rules_and_fits_memory() -> None:
    tables = (spec("large", 1_000_000, 64), spec("city", 900))
    topology = machine(4, 100_000_000, "cuda", local=4)  # a table of 260 MB does not fit on one rank
    rules = ({"pattern": "city", "sharding": "row_wise"},)
    planned = plan_torchrec(tables, ADAGRAD, topology=topology, facts=facts(tables), sharding="planner", tables=rules)
    assert {entry.table: entry.sharding for entry in planned.tables}["city"] == "row_wise"
    assert {entry.table: entry.sharding for entry in planned.tables}["large"] in ("row_wise", "table_row_wise")
    assert max(planned.held) <= (1 - RESERVED) * 100_000_000
    with pytest.raises(MachineError, match="planner finds nothing that fits"):
        plan_torchrec(tables, ADAGRAD, topology=machine(2, 100_000_000, "cuda", local=2), facts=facts(tables), sharding="planner")


@pytest.mark.parametrize(
    ("topology", "options", "words"),
    [
        (machine(4), {}, "'planner' on cpu.*auto"),
        (Topology(world=4, device="cuda"), {}, "unknown.*--machine h200"),
        (machine(4096, 141 * 10**9, "cuda"), {}, "take minutes.*auto"),
        (machine(4, 141 * 10**9, "cuda"), {"tables": ({"pattern": "b", "sharding": "data_parallel"},)}, "'data_parallel' for table 'b' beside"),
    ],
)
def test_case_F05_where_the_planner_cannot_plan(topology: Topology, options: dict[str, Any], words: str) -> None:
    tables = (spec("a", 10_000), spec("b", 10_000), spec("c", 10_000))
    with pytest.raises(RequestError, match=words):
        plan_torchrec(tables, ADAGRAD, topology=topology, facts=facts(tables), sharding="planner", **options)


def test_plans_refuse_what_engines_refuse() -> None:
    tables = (spec("t", 100, 6),)
    with pytest.raises(RequestError, match="multiple of 4"):
        plan_torchrec(tables, ADAGRAD, topology=machine(2), facts=facts(tables))
    with pytest.raises(RequestError, match="3 ranks cannot be divided"):
        plan_sharded_2d((spec("t", 100),), ADAGRAD, topology=machine(3), facts=facts((spec("t", 100),)), replicas=2)
    assert TorchRecOptions().plan is None
