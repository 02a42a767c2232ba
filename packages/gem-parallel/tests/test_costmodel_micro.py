"""The cost model of steps of several micro-batches, and of ranks whose collectives hide behind nothing."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from costs import EXACT, batch, machine, model, request, tables_on

from gem_core.spec import BatchFacts, EmbeddingPlan
from gem_parallel.costmodel.assumed import Assumed
from gem_parallel.costmodel.clock import WAITING, Clocks
from gem_parallel.costmodel.dense import dense_in
from gem_parallel.costmodel.planning import plan_step
from gem_parallel.costmodel.step import Outcome, Step
from gem_parallel.mesh import layout_of

NO_TABLES = EmbeddingPlan(world=1, tables=(), held=(0,), working=0, sent={})
NOTHING = BatchFacts(rows=32.0, ids={}, distinct={})
MICRO = 4


def step_of(
    world: int,
    micro: int,
    *,
    fsdp: Any,
    device: str = "cuda",
    experts: int = 0,
    tables: bool = False,
    assumed: Assumed = EXACT,
    **degrees: int,
) -> Outcome:
    topology, facts, layout = replace(machine(world), device=device), model(3, experts=experts), layout_of(world, **degrees)
    planned = tables_on(topology, batch())(layout.sparse_replicate) if tables else NO_TABLES
    return Step(topology, dense_in(layout, facts, fsdp), facts, batch() if tables else NOTHING, planned, assumed, micro).outcome()


@pytest.mark.parametrize(
    ("fsdp", "degrees", "times"),
    [
        ({}, {"replicate": 2}, 1),
        ({"reduce": "each"}, {"replicate": 2}, MICRO),
        ({}, {"replicate": 4}, MICRO),  # groups of one shard
        (None, {"replicate": 4}, 1),  # ddp
    ],
)
def test_replicas_are_summed_once_a_step_or_in_each_micro_batch(fsdp: Any, degrees: dict[str, int], times: int) -> None:
    one, several = (step_of(4, micro, fsdp=fsdp, **degrees) for micro in (1, MICRO))
    assert several.sent["gradients: replicas"] == pytest.approx(times * one.sent["gradients: replicas"])
    assert several.carried["gradients: replicas"] == pytest.approx(times * one.carried["gradients: replicas"])
    for name in ("weights: gather", "gradients: scatter"):
        assert several.sent.get(name, 0) == pytest.approx(MICRO * one.sent.get(name, 0))
    assert several.compute == pytest.approx(MICRO * one.compute)
    assert several.parts["optimiser"] == pytest.approx(one.parts["optimiser"])


def test_experts_of_one_shard_are_summed_in_each_micro_batch_and_the_rest_once() -> None:
    """Four ranks: two replicas of two expert ranks. Half of a block's 10,000 parameters are its experts', of which a rank holds half."""
    experts = 3 * 2_500
    ordinary = (5_000 + 3 * 5_000) / 2
    one, several = (step_of(4, micro, fsdp={}, experts=2, replicate=2, expert=2) for micro in (1, MICRO))
    assert one.sent["gradients: replicas"] == pytest.approx(4 * (ordinary + experts))
    assert several.sent["gradients: replicas"] == pytest.approx(4 * (ordinary + MICRO * experts))


def test_experts_beside_ddp_are_summed_in_each_micro_batch() -> None:
    everyone, pair = 2 * 3 / 4 * 4 * (5_000 + 3 * 5_000), 4 * 3 * 2_500
    one, several = (step_of(4, micro, fsdp=None, experts=2, replicate=2, expert=2) for micro in (1, MICRO))
    assert one.sent["gradients: replicas"] == pytest.approx(everyone + pair)
    assert several.sent["gradients: replicas"] == pytest.approx(everyone + MICRO * pair)


def test_tables_are_looked_up_and_gathered_for_each_micro_batch() -> None:
    one, several = (step_of(4, micro, fsdp={}, tables=True, sparse_replicate=2) for micro in (1, MICRO))
    for name in ("tables: vectors", "tables: shards for replicas"):
        assert several.sent[name] == pytest.approx(MICRO * one.sent[name])
    assert several.parts["look-ups"] == pytest.approx(MICRO * one.parts["look-ups"])


def test_a_plan_counts_the_rows_of_all_micro_batches() -> None:
    asked = request(machine(4), model(3), fsdp={"replicas": 2})
    (one,), (several,) = (plan_step(replace(asked, micro_batches=micro)).layouts for micro in (1, MICRO))
    assert several.samples_per_second * several.seconds == pytest.approx(MICRO * one.samples_per_second * one.seconds)
    assert several.local_mfu == pytest.approx(one.local_mfu)
    assert several.mfu > one.mfu, "reductions and the optimiser are shared by more rows"


def test_nothing_hides_on_a_cpu() -> None:
    """Each collective is exposed from its beginning to its end; on a GPU most of the same ones are hidden."""
    there, here = (step_of(4, 2, fsdp={}, device=device, tables=True, replicate=2) for device in ("cuda", "cpu"))
    assert here.carried == there.carried
    for name, seconds in here.carried.items():
        assert here.parts[name] == pytest.approx(seconds), name
    assert here.seconds == pytest.approx(sum(seconds for name, seconds in here.parts.items()))
    assert here.seconds > there.seconds


def test_what_fully_shard_does_on_the_host_is_added_to_each_of_its_collectives() -> None:
    """Three blocks are gathered twice and scattered once, the rest is gathered once and scattered once; nothing of it is ``ddp``'s."""
    slow = replace(EXACT, host=1e-3)
    assert step_of(2, 1, fsdp={}, assumed=slow).parts["host"] == pytest.approx(11e-3)
    assert step_of(2, 1, fsdp={"reshard": False}, assumed=slow).parts["host"] == pytest.approx(8e-3)
    assert "host" not in step_of(2, 1, fsdp=None, assumed=slow, replicate=2).parts
    assert "host" not in step_of(2, 1, fsdp={}).parts


def test_a_quicker_all_reduce_is_quicker_than_a_scatter_and_a_gather() -> None:
    """Some libraries have an all-reduce of their own; how long a reduce-scatter takes says nothing of it."""
    plain = step_of(2, 1, fsdp=None, replicate=2).carried["gradients: replicas"]
    own = step_of(2, 1, fsdp=None, assumed=replace(EXACT, reduce=1.25), replicate=2).carried["gradients: replicas"]
    assert own == pytest.approx(plain * 1.25 / 2)
    assert step_of(2, 1, fsdp=None, assumed=replace(EXACT, scatter=3.0), replicate=2).carried["gradients: replicas"] == plain


def test_ddp_averages_full_buckets_and_what_is_left_at_the_end() -> None:
    """Blocks of 20 MB and a rest of 10 MB: two blocks fill a bucket of 25 MiB, the third and the rest another. Each gradient is copied once."""
    facts, numbers = model(3, parameters=5_000_000), 17_500_000
    done = Step(machine(2), dense_in(layout_of(2, replicate=2), facts, None), facts, NOTHING, NO_TABLES, EXACT).outcome()
    assert done.carried["gradients: replicas"] == pytest.approx(2 * (2 * 1e-6) + 2 * 4 * numbers / 2 / 1e9)
    assert done.sent["gradients: replicas"] == pytest.approx(4 * numbers)
    assert done.parts["copies"] == pytest.approx(2 * 4 * numbers / 1e10)
    alone = Step(machine(1), dense_in(layout_of(1), facts, None), facts, NOTHING, NO_TABLES, EXACT).outcome()
    assert "copies" not in alone.parts
    assert not alone.sent


def test_a_clock_that_blocks_waits_where_a_collective_is_issued() -> None:
    clocks = Clocks(layout_of(2), blocking=True)
    clocks.compute("work", np.array([2.0, 1.0]))
    running = clocks.start("gather", "dense", (1,), 0.5, tier=0)
    assert clocks.now.tolist() == [2.5, 2.5]
    clocks.wait(running)
    assert clocks.parts == {"work": 1.5, WAITING: 0.5, "gather": 0.5}, "a second wait for it costs nothing"
