"""The search finds what trying every layout finds; answers say what they rest on; thousands of ranks take seconds."""

import json
import time
from dataclasses import asdict, replace
from typing import Any

import pytest
from costs import machine, model, request

from gem_core.spec import LayoutPlan, MachineError, RequestError, StepRequest
from gem_parallel.costmodel.assumed import Assumed
from gem_parallel.costmodel.dense import dense_in
from gem_parallel.costmodel.drawing import drawing, reasons
from gem_parallel.costmodel.planning import evaluate, layouts, plan_step
from gem_parallel.mesh import Layout, layout_of


def every_layout(asked: StepRequest, local: int, experts: int) -> list[LayoutPlan]:
    """Five loops over all degrees, without a thought."""
    world, found = asked.topology.world, []
    for replicate in range(1, world + 1):
        for shard in range(1, world + 1):
            for expert in range(1, world + 1):
                for sparse_shard in range(1, world + 1):
                    for sparse_replicate in range(1, world + 1):
                        if replicate * shard * expert != world or sparse_shard * sparse_replicate != world:
                            continue
                        if expert > 1 and (local % expert or not experts or experts % expert):
                            continue
                        layout = Layout(replicate=replicate, shard=shard, expert=expert, sparse_shard=sparse_shard, sparse_replicate=sparse_replicate)
                        dense = dense_in(layout, asked.model, {} if shard * expert > 1 else None)
                        plan = evaluate(asked, Assumed.of(asked.assume), dense, asked.tables(sparse_replicate))
                        if plan.fits is not False:
                            found.append(plan)
    return found


@pytest.mark.parametrize(
    ("world", "local", "experts", "flops", "memory"),
    [(8, 4, 4, 1e6, None), (8, 4, 0, 1e3, None), (8, 2, 4, 1e8, 800_000), (12, 4, 6, 1e7, None), (4, 4, 4, 1e9, 900_000), (1, 1, 0, 1e6, None)],
)
def test_the_search_is_exact(world: int, local: int, experts: int, flops: float, memory: int | None) -> None:
    topology = machine(world, *((local, 1 << 10) if local < world else (local,)), memory=memory)
    asked = request(topology, model(3, experts, flops=flops, row_cv=0.5), best=1 << 10)
    plan, tried = plan_step(asked), every_layout(asked, local, experts)
    assert plan.considered == len(list(layouts(asked))) >= len(plan.layouts)
    assert sorted(str(layout.axes) for layout in plan.layouts) == sorted(str(layout.axes) for layout in tried)
    assert plan.layouts[0].seconds == min(layout.seconds for layout in tried)
    assert [layout.seconds for layout in plan.layouts] == sorted(layout.seconds for layout in tried)
    assert plan.considered - len(plan.layouts) == sum(plan.refused.values())


def test_memory_rules_layouts_out() -> None:
    roomy, tight = (request(machine(8, 4, 1 << 10, memory=memory), model(3, flops=1e3), best=100) for memory in (10**9, 900_000))
    fast, small = plan_step(roomy), plan_step(tight)
    assert "more memory than a device has" in small.refused
    assert small.layouts[0].seconds >= fast.layouts[0].seconds
    assert all(sum(layout.memory.values()) <= 900_000 for layout in small.layouts)
    with pytest.raises(MachineError, match="none of 16 fits: 16 "):
        plan_step(request(machine(8, 4, 1 << 10, memory=10_000), model(3, flops=1e3), best=1))


def in_words(layout: LayoutPlan) -> tuple[dict[str, Any], int]:
    """Strategies with options, and table replicas, from ``--set`` values."""
    strategies: dict[str, Any] = {}
    tables = 1
    for setting in layout.settings:
        path, _, value = setting.partition("=")
        if path == "parallel.strategies":
            strategies = {name: {} for name in json.loads(value)}
        elif path == "embedding.options.replicas":
            tables = int(value)
        else:
            _, _, name, option = path.split(".")
            strategies[name][option] = int(value)
    return strategies, tables


def test_settings_ask_for_the_layout_that_was_found() -> None:
    topology, facts = machine(16, 4, 1 << 10), model(2, experts=4, row_cv=0.3)
    for layout in plan_step(request(topology, facts, best=1 << 10)).layouts:
        strategies, tables = in_words(layout)
        (again,) = plan_step(request(topology, facts, table_replicas=tables, **strategies)).layouts
        assert again.axes == layout.axes
        assert again.seconds == pytest.approx(layout.seconds)
        assert again.settings == layout.settings


def test_figures_agree_with_each_other() -> None:
    asked = request(machine(8, 4, 1 << 10), model(3, experts=4, flops=1e8, row_cv=0.5))
    (layout,) = plan_step(asked).layouts
    flops = 3 * 32 * sum(block.flops for block in asked.model.blocks)
    assert layout.mfu == pytest.approx(flops / layout.seconds / 1e11)
    assert layout.mfu == layout.local_mfu * layout.scaling
    assert layout.samples_per_second == pytest.approx(8 * 32 / layout.seconds)
    assert sum(layout.parts.values()) == pytest.approx(layout.seconds)
    assert layout.fits is None
    assert layout.binding == "compute"
    (slow,) = plan_step(replace(asked, topology=machine(8, 4, 1 << 10, oversubscription=1e4))).layouts
    assert slow.binding.startswith(("weights", "tables"))
    (given,) = plan_step(replace(asked, assume={**(asked.assume or {}), "row_cv": 0.0})).layouts
    assert given.seconds < layout.seconds
    told = plan_step(asked).assumptions
    assert "row_cv = 0.5: measured on the rows of a small training batch" in told
    assert "matmul = 1: given" in told


@pytest.mark.parametrize("world", [8, 4096, 8192])
def test_case_F16_thousands_of_ranks_are_simulated_in_seconds(world: int) -> None:
    asked = request(machine(world, 8, 3072, 1 << 20), model(12, experts=8, row_cv=1.4), fsdp={"replicas": world // 8}, experts={"degree": 4})
    begun = time.monotonic()
    (layout,) = plan_step(asked).layouts
    assert time.monotonic() - begun < 10
    assert layout.axes == asdict(layout_of(world, replicate=world // 8, expert=4))


def test_more_ranks_scale_worse() -> None:
    """Weak scaling: the same rows a rank."""
    scaling = []
    for world in (8, 64, 512, 4096):
        asked = request(machine(world, 8, 3072, 1 << 20), model(6, flops=1e9, row_cv=1.4), fsdp={"replicas": world // 8})
        scaling.append(plan_step(asked).layouts[0].scaling)
    assert scaling == sorted(scaling, reverse=True)
    assert scaling[-1] < scaling[0]


# ---- drawings -----------------------------------------------------------------------------------------------------------------------


def test_the_drawing_shows_every_place_of_the_first_hosts() -> None:
    lines = drawing(machine(16, 4, 8, 1 << 10), layout_of(16, replicate=2, expert=2, sparse_replicate=4))
    assert lines[0] == "1 tier2 of 16 ranks, 0.01 GB/s a rank each way"
    assert lines[1] == "  2 tier1s of 8 ranks, 0.1 GB/s a rank each way"
    assert lines[2] == "    4 hosts of 4 ranks, 1 GB/s a rank each way"
    assert lines[3].split() == ["host", "0", "r0s0e0/S0R0", "r0s0e1/S0R1", "r0s1e0/S0R2", "r0s1e1/S0R3"]
    assert lines[6].split() == ["host", "3", "r1s2e0/S3R0", "r1s2e1/S3R1", "r1s3e0/S3R2", "r1s3e1/S3R3"]
    assert len(lines) == 8


def test_a_drawing_of_many_hosts_is_short() -> None:
    lines = drawing(machine(4096, 8, 1 << 12), layout_of(4096))
    assert len(lines) == 9
    assert "host 511" in lines[-2]
    assert lines[-3].strip() == "..."


def test_reasons_name_ranks_tier_and_speed() -> None:
    told = reasons(machine(32, 4, 16, 1 << 10, oversubscription=2.0), layout_of(32, replicate=2, expert=4, sparse_replicate=4))
    assert [line.split(":")[0] for line in told] == ["dense_expert 4", "dense_shard 4", "dense_replicate 2", "sparse_replicate 4", "sparse_shard 8"]
    assert "ranks 0, 4, 8, 12, within a tier1 (0.05 GB/s a rank each way)" in told[1]
    assert "ranks 0, 16, within a tier2" in told[2]
    assert "ranks 0, 4, 8, ..., 28" in told[4]
    assert reasons(machine(1), layout_of(1)) == ()


def test_an_engine_without_such_replicas_is_told() -> None:
    def tables(replicas: int) -> Any:
        if replicas > 1:
            raise RequestError("engine", "it knows no replicas", "Choose another.")
        return request(machine(4), model()).tables(1)

    plan = plan_step(replace(request(machine(4), model(), best=2), tables=tables))
    assert plan.refused == {"it knows no replicas": 6}
    assert {layout.axes["sparse_replicate"] for layout in plan.layouts} == {1}
