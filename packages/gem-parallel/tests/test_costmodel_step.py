"""A simulated step: times by hand in small cases, parts that add up, overlap, imbalance, memory."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from costs import EXACT, batch, machine, model, tables_on
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.spec import BatchFacts, BlockFacts, EmbeddingPlan, ModelFacts, RequestError
from gem_parallel.costmodel.assumed import BALANCE, SOURCES, Assumed
from gem_parallel.costmodel.clock import WAITING, Clocks
from gem_parallel.costmodel.dense import ADAM, GRADIENT, MASTER, TOUCHED, Dense, check_experts, configured, dense_in, memory_of
from gem_parallel.costmodel.sparse import moves
from gem_parallel.costmodel.step import Outcome, Step, rank_costs
from gem_parallel.mesh import Layout, divisors_of, layout_of

NO_TABLES = EmbeddingPlan(world=1, tables=(), held=(0,), working=0, sent={})
NOTHING = BatchFacts(rows=32.0, ids={}, distinct={})


def step_of(
    world: int, facts: ModelFacts, *, assumed: Assumed = EXACT, tables: bool = True, fsdp: Any = None, sizes: Any = (), **degrees: int
) -> Outcome:
    topology = machine(world, *sizes)
    layout = layout_of(world, **degrees)
    dense = dense_in(layout, facts, {} if fsdp is None else fsdp)
    looked_up = batch() if tables else NOTHING
    planned = tables_on(topology, looked_up)(layout.sparse_replicate) if tables else NO_TABLES
    return Step(topology, dense, facts, looked_up, planned, assumed).outcome()


def test_one_rank_computes_and_updates() -> None:
    facts = model(blocks=2)
    done = step_of(1, facts, tables=False)
    flops, saved = 32 * 2.5e6, 32 * 10_000
    matmuls, memory = 3 * flops / 1e11, 5 * saved / 1e10
    optimiser = TOUCHED * 25_000 / 1e10
    assert done.compute == pytest.approx(matmuls + memory)
    assert done.seconds == pytest.approx(matmuls + memory + optimiser)
    assert done.sent == {}


def test_reached_fractions_slow_what_they_are_of() -> None:
    facts = model(blocks=2)
    whole, half = step_of(1, facts, tables=False), step_of(1, facts, tables=False, assumed=replace(EXACT, matmul=0.5))
    assert half.seconds - whole.seconds == pytest.approx(3 * 32 * 2.5e6 / 1e11)
    slow = step_of(1, facts, tables=False, assumed=replace(EXACT, memory=0.5))
    assert slow.seconds - whole.seconds == pytest.approx(5 * 32 * 10_000 / 1e10 + TOUCHED * 25_000 / 1e10)


def test_gathers_hide_behind_compute_or_bind() -> None:
    """Two ranks. With much work only the first gather of each direction and the last scatter are exposed, with little work nearly all is."""
    busy, idle = step_of(2, model(flops=1e10), tables=False), step_of(2, model(flops=1.0, saved=1.0), tables=False)
    assert busy.carried == idle.carried
    gather = busy.carried["weights: gather"]
    outside, block = 1e-6 + 4 * 2_500 / 1e9, 1e-6 + 4 * 5_000 / 1e9
    assert gather == pytest.approx(outside + 6 * block)
    assert busy.parts["weights: gather"] == pytest.approx(outside + block)
    assert busy.parts["gradients: scatter"] == pytest.approx(outside)
    names = ("weights: gather", "gradients: scatter")
    exposed = sum(idle.parts[name] for name in names)
    carried = sum(idle.carried[name] for name in names)
    assert carried - idle.parts["copies"] - 1e-7 < exposed < carried  # nothing but copies hides them


def test_copies_of_sharded_weights_by_hand() -> None:
    """Into a buffer before each gather, half of it being the rank's own, and out of it after; into one before each scatter. The rest of the model
    is gathered once."""
    again, kept = step_of(2, model(3), tables=False), step_of(2, model(3), tables=False, fsdp={"reshard": False})
    assert again.parts["copies"] == pytest.approx(2 * 4 * (2.5 * 5_000 + 3 * 4 * 10_000) / 1e10)
    assert kept.parts["copies"] == pytest.approx(2 * 4 * 2.5 * 35_000 / 1e10)
    assert "copies" not in step_of(1, model(3), tables=False).parts


def test_a_slower_scatter_slows_scatters_alone() -> None:
    plain, slow = step_of(2, model(3), tables=False), step_of(2, model(3), tables=False, assumed=replace(EXACT, scatter=3.0))
    assert slow.carried["gradients: scatter"] == pytest.approx(3 * plain.carried["gradients: scatter"])
    assert slow.carried["weights: gather"] == plain.carried["weights: gather"]


def test_weights_that_stay_are_gathered_once() -> None:
    again, kept = step_of(2, model(3), tables=False), step_of(2, model(3), tables=False, fsdp={"reshard": False})
    assert again.sent["weights: gather"] == 4 * (5_000 + 2 * 30_000) / 2
    assert kept.sent["weights: gather"] == 4 * (5_000 + 30_000) / 2
    assert again.sent["gradients: scatter"] == kept.sent["gradients: scatter"] == 4 * 35_000 / 2
    some = step_of(2, model(3), tables=False, fsdp={"keep": ["layers.[01]"]})
    assert some.sent["weights: gather"] == 4 * (5_000 + 30_000 + 10_000) / 2
    narrow = step_of(2, model(3), tables=False, fsdp={"payload": "bf16", "reduce_dtype": "bf16"})
    assert narrow.sent["weights: gather"] == again.sent["weights: gather"] / 2
    assert narrow.sent["gradients: scatter"] == again.sent["gradients: scatter"] / 2


def test_bytes_of_experts_by_hand() -> None:
    """Eight ranks as 2 replicas x 2 shards x 2 expert ranks; half of each block's 10,000 weights are experts'."""
    done = step_of(8, model(2, experts=4), tables=False, replicate=2, expert=2)
    ordinary, experts = 4 * 5_000 / 4, 4 * 5_000 / 2 / 2
    assert done.sent["weights: gather"] == 3 * 4 * 5_000 / 4 + 4 * (3 * ordinary + experts)
    assert done.sent["gradients: scatter"] == 3 * 4 * 5_000 / 4 + 2 * (3 * ordinary + experts)
    assert done.sent["gradients: replicas"] == 4 * 5_000 / 4 + 2 * (ordinary + experts)
    assert done.sent["experts: gather rows"] == 2 * 32 * 4 * (60 + 20)
    assert done.sent["experts: give back"] == 2 * 32 * 4 * (20 + 60)


def test_bytes_of_copies_by_hand() -> None:
    """``ddp``: everything is averaged over all ranks, experts' weights over those that hold them."""
    topology, facts = machine(8), model(2, experts=4)
    for degree in (1, 2):
        dense = configured(topology, {"ddp": {}, "experts": {"degree": degree}}, facts, 1)
        assert dense.layout == Layout(replicate=8 // degree, expert=degree, sparse_shard=8)
        done = Step(topology, dense, facts, NOTHING, NO_TABLES, EXACT).outcome()
        held = 10_000 / degree
        copies = 8 // degree
        want = 2 * 7 / 8 * 4 * 15_000 + 2 * (copies - 1) / copies * 4 * held
        assert done.sent["gradients: replicas"] == pytest.approx(want)
        assert "weights: gather" not in done.sent


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    picks=st.tuples(*[st.integers(0, 20)] * 3),
    world=st.sampled_from([1, 4, 8, 12]),
    row_cv=st.floats(0.0, 2.0),
    pipelined=st.booleans(),
    reshard=st.booleans(),
)
def test_parts_add_up_to_the_step(picks: tuple[int, int, int], world: int, row_cv: float, pipelined: bool, reshard: bool) -> None:
    def pick(n: int, index: int) -> int:
        divisors = list(divisors_of(n))
        return divisors[picks[index] % len(divisors)]

    replicate = pick(world, 0)
    degrees = {"replicate": replicate, "expert": pick(world // replicate, 1), "sparse_replicate": pick(world, 2)}
    assumed = replace(Assumed(), row_cv=row_cv, pipelined=float(pipelined))
    done = step_of(world, model(3, experts=12), assumed=assumed, sizes=(4, 1 << 10), fsdp={"reshard": reshard}, **degrees)
    assert sum(done.parts.values()) == pytest.approx(done.seconds)
    assert min(done.parts.values()) >= 0
    assert done.compute <= done.seconds
    topology, layout = machine(world, 4, 1 << 10), layout_of(world, **degrees)
    planned = tables_on(topology, batch())(layout.sparse_replicate)
    assert sum(move.sent for move in moves(planned, layout)) == pytest.approx(sum(max(values) for values in planned.sent.values()))
    assert sum(count for name, count in done.sent.items() if name.startswith("tables")) == pytest.approx(
        sum(max(values) for values in planned.sent.values())
    )


def test_ids_travel_ahead_or_are_waited_for() -> None:
    ahead = step_of(4, model(3, flops=1e9))
    waits = step_of(4, model(3, flops=1e9), assumed=replace(EXACT, pipelined=0.0))
    assert waits.carried == pytest.approx(ahead.carried)
    assert ahead.parts["tables: row numbers"] == pytest.approx(
        ahead.carried["tables: row numbers"] / 2, rel=0.2
    )  # the other half comes with gradients
    assert waits.parts["tables: row numbers"] == pytest.approx(waits.carried["tables: row numbers"])


# ---- imbalance ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row_cv", "rows", "ranks"), [(1.45, 1024, 256), (1.45, 1024, 4096), (0.58, 1024, 2048), (1.0, 256, 8192)])
def test_the_heaviest_rank_is_as_heavy_as_extreme_values_say(row_cv: float, rows: int, ranks: int) -> None:
    costs = rank_costs(ranks, rows, row_cv, 1.0)
    assert costs.mean() == pytest.approx(1.0)
    assert costs.std() == pytest.approx(row_cv / math.sqrt(rows), rel=0.1)
    assert costs.max() - 1 == pytest.approx(row_cv / math.sqrt(rows) * math.sqrt(2 * math.log(ranks)), rel=0.2)


def test_the_heaviest_rank_is_waited_for() -> None:
    even, uneven = (
        step_of(8, model(flops=1e9), tables=False),
        step_of(8, model(flops=1e9, row_cv=1.0), tables=False, assumed=replace(EXACT, row_cv=-1.0)),
    )
    heaviest = rank_costs(8, 32, 1.0, 1.0).max()
    assert even.parts[WAITING] == pytest.approx(0.0, abs=1e-12)
    assert uneven.compute == pytest.approx(even.compute)
    assert uneven.seconds == pytest.approx(even.seconds + (heaviest - 1) * even.compute, rel=0.02)


def test_experts_average_the_rows_they_join() -> None:
    facts = ModelFacts(
        blocks=(BlockFacts(name="rest", parameters=8, flops=0, saved=0), *model(2, experts=8, flops=1e9).blocks[1:]), dtype="fp32", row_cv=1.0
    )
    assumed = replace(EXACT, row_cv=-1.0)
    alone, joined = step_of(8, facts, tables=False, assumed=assumed), step_of(8, facts, tables=False, assumed=assumed, expert=8)
    assert joined.parts[WAITING] < 0.7 * alone.parts[WAITING]


def test_balancing_leaves_what_interleaving_leaves() -> None:
    """Batches of 1,024 rows from sub-batches of 128: over 8 batches sorted by cost and dealt to and fro, heavy with light."""
    generator = np.random.default_rng(0)
    sigma = math.sqrt(math.log(1 + 1.45**2))
    subs = np.exp(generator.normal(0.0, sigma, (256, 64, 128))).sum(axis=2)
    plain = subs.reshape(256, 8, 8).sum(axis=2)
    rows = np.sort(subs, axis=1).reshape(256, 8, 8).copy()
    rows[:, 1::2] = rows[:, 1::2, ::-1]
    dealt = rows.sum(axis=1)

    def beyond(costs: Any) -> float:
        return float(np.mean(costs.max(axis=0) / costs.mean(axis=0) - 1))

    assert beyond(dealt) / beyond(plain) == pytest.approx(BALANCE["interleaved"], abs=0.08)


# ---- clocks -------------------------------------------------------------------------------------------------------------------------


def test_a_slow_rank_holds_up_its_group_alone() -> None:
    """Four ranks in two replicas: the first is slow, so the second waits for it and the other replica does not."""
    clocks = Clocks(layout_of(4, replicate=2))
    clocks.compute("work", np.array([3.0, 1.0, 1.0, 1.0]))
    clocks.wait(clocks.start("gather", "dense", (1,), 0.5, tier=0))
    assert clocks.now.tolist() == [3.5, 3.5, 1.5, 1.5]
    assert clocks.parts == {"work": 1.5, WAITING: 0.5, "gather": 0.5}
    assert clocks.meet() == 3.5
    assert sum(clocks.parts.values()) == pytest.approx(3.5)


def test_collectives_of_a_link_run_in_order_and_others_beside_them() -> None:
    clocks = Clocks(layout_of(2))
    first = clocks.start("a", "dense", (1,), 2.0, tier=1)
    second = clocks.start("b", "sparse", (0,), 1.0, tier=1)
    beside = clocks.start("c", "dense", (1,), 0.5, tier=0)
    later = clocks.start("d", "dense", (1,), 0.25, tier=0, after=first)
    assert [run.done.tolist() for run in (first, second, beside, later)] == [[2.0, 2.0], [3.0, 3.0], [0.5, 0.5], [2.25, 2.25]]
    clocks.compute("work", 2.5)
    clocks.wait_all([first, second, beside, later])
    assert clocks.now.tolist() == [3.0, 3.0]
    assert clocks.parts["b"] == 0.5
    assert clocks.parts["a"] == clocks.parts["c"] == clocks.parts["d"] == 0.0


def test_replicas_are_summed_after_the_scatter_and_beside_the_next_gather() -> None:
    """Two hosts of two ranks that hold a copy each: gathers stay inside a host, sums of replicas cross it."""
    facts = model(3, flops=1.0, saved=1.0)
    inside, across = step_of(4, facts, tables=False, sizes=(2, 4), replicate=2), step_of(4, facts, tables=False, sizes=(4,), replicate=2)
    assert inside.parts["weights: gather"] < across.parts["weights: gather"]
    assert inside.seconds > inside.carried["gradients: replicas"]


# ---- memory and what is refused -----------------------------------------------------------------------------------------------------


def test_memory_by_hand() -> None:
    facts = model(2, experts=4)
    dense = dense_in(layout_of(8, replicate=2, expert=2), facts, {})
    kept = 3 * 5_000 / 4 + 2 * 5_000 / 2 / 2
    memory = memory_of(dense, facts, 32.0)
    assert memory["weights"] == MASTER * kept
    assert memory["gradients"] == GRADIENT * kept
    assert memory["optimiser"] == ADAM * kept
    whole = 5_000 + 2_500
    assert memory["gathered"] == MASTER * (5_000 + 2 * whole) + GRADIENT * whole
    assert memory["activations"] == 32 * 10_000
    assert memory["joined batches"] == 32 * 2 * 4 * 80
    stay = memory_of(dense_in(layout_of(8, replicate=2, expert=2), facts, {"keep": ["layers.0"]}), facts, 32.0)
    assert stay == memory  # two blocks: one stays, and the other is at work
    whole_model = memory_of(dense_in(layout_of(8), model(4), {"reshard": False}), model(4), 32.0)
    assert whole_model["gathered"] == MASTER * 45_000 + GRADIENT * 10_000
    copies = memory_of(dense_in(layout_of(8), facts, None), facts, 32.0)
    assert copies == {"weights": 4 * 25_000, "gradients": 4 * 25_000, "optimiser": 8 * 25_000, "activations": 32 * 10_000}


@settings(max_examples=40, derandomize=True, deadline=None)
@given(world=st.sampled_from([2, 4, 8]), picks=st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_all_ranks_together_keep_every_replica_once(world: int, picks: tuple[int, int]) -> None:
    replicate = list(divisors_of(world))[picks[0] % len(list(divisors_of(world)))]
    expert = list(divisors_of(world // replicate))[picks[1] % len(list(divisors_of(world // replicate)))]
    dense = dense_in(layout_of(world, replicate=replicate, expert=expert), model(1, experts=8), {})
    for block in model(1, experts=8).blocks:
        assert dense.kept(block) * world == pytest.approx(block.parameters * replicate)


def test_degrees_of_experts_that_cannot_be() -> None:
    with pytest.raises(RequestError, match=r"blocks have 6 experts. Choose one of 1, 2, 3, 6"):
        check_experts(model(1, experts=6), 4)
    with pytest.raises(RequestError, match="no block"):
        check_experts(model(1), 2)
    check_experts(model(1), 1)
    with pytest.raises(RequestError, match=r"strategy 'fsdp' with replicas = 3.*Choose one of 1, 2, 4, 8"):
        configured(machine(8), {"fsdp": {"replicas": 3}}, model(), 1)
    with pytest.raises(RequestError, match="a host has 2 ranks"):
        configured(machine(8, 2, 8), {"fsdp": {}, "experts": {"degree": 4}}, model(1, experts=8), 1)


def test_figures_nobody_knows_are_refused() -> None:
    topology = machine(2)
    dense: Dense = dense_in(layout_of(2), model(), {})
    for unknown, said in ({"peak_flops": {"bf16": 1.0}}, "peak FLOP/s in fp32"), ({"memory_bandwidth": None}, "memory bandwidth"):
        with pytest.raises(RequestError, match=said):
            Step(replace(topology, **unknown), dense, model(), NOTHING, NO_TABLES, EXACT)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given_", "said"),
    [({"matmull": 1.0}, "Known are matmul"), ({"matmul": 0.0}, "outside"), ({"links": 1.5}, "outside"), ({"row_cv": -2.0}, "outside")],
)
def test_wrong_assumptions_are_refused(given_: dict[str, float], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        Assumed.of(given_)


def test_every_assumption_is_told_with_its_source() -> None:
    told = Assumed.of({"matmul": 0.4}).told({"matmul"})
    assert told[0] == "matmul = 0.4: given"
    assert [line.split(" = ")[0] for line in told] == list(SOURCES)
    assert all(SOURCES[line.split(" = ")[0]] in line for line in told[1:])
