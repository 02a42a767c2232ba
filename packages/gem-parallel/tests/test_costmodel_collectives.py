"""Formulas of collectives against counting: rings and doublings are played out message by message."""

import math
from collections import Counter
from itertools import pairwise

import pytest
from costs import EXACT, machine
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.spec import RequestError, Topology
from gem_parallel.costmodel.assumed import Assumed
from gem_parallel.costmodel.collectives import Group, Links, gathered_bytes, group_along
from gem_parallel.mesh import Layout, divisors_of, layout_of, rank_grid

PART = 24.0


def tier_of(a: int, b: int, sizes: tuple[int, ...]) -> int:
    """The innermost tier that holds both ranks."""
    return next(k for k, size in enumerate(sizes) if a // size == b // size)


def play_ring(ranks: list[int], sizes: tuple[int, ...], links: int) -> tuple[int, Counter[tuple[int, int]], list[set[tuple[int, int]]]]:
    """An all-gather in ``links`` rings, each carrying that fraction of a part and leaving a host by another of its members.

    Returns the number of steps, bytes sent by (rank, tier), and the parts that each rank has at the end.
    """
    sent: Counter[tuple[int, int]] = Counter()
    have = [{(rank, ring) for ring in range(links)} for rank in range(len(ranks))]
    steps = 0
    for ring in range(links):
        hosts: dict[int, list[int]] = {}
        for index, rank in enumerate(ranks):
            hosts.setdefault(rank // sizes[0], []).append(index)
        order = [index for members in hosts.values() for index in members[ring % len(members) :] + members[: ring % len(members)]]
        holding = [(index, ring) for index in order]
        steps = 0
        for _ in range(len(order) - 1):
            steps += 1
            moved = list(holding)
            for place, index in enumerate(order):
                to = order[(place + 1) % len(order)]
                sent[index, tier_of(ranks[index], ranks[to], sizes)] += PART / links
                moved[(place + 1) % len(order)] = holding[place]
                have[to].add(holding[place])
            holding = moved
    return steps, sent, have


@pytest.mark.parametrize(("hosts", "local"), [(1, 2), (1, 4), (2, 4), (4, 2), (3, 4), (2, 1), (5, 1)])
def test_a_ring_played_out_sends_what_the_formula_says(hosts: int, local: int) -> None:
    world, sizes = hosts * local, (local, 1 << 10)
    steps, sent, have = play_ring(list(range(world)), sizes, links=local)
    assert all(len(parts) == world * local for parts in have)  # everybody has everything
    assert steps == world - 1
    for rank in range(world):
        assert sum(count for (who, _), count in sent.items() if who == rank) == pytest.approx(gathered_bytes(Group(world, ()), PART))
    topology = machine(world, *sizes)
    group = group_along(topology, Layout(shard=world, sparse_shard=world), "dense", (1,))
    slow = max(tier for _, tier in sent)  # ten times slower than the tier inside it
    carried = sum(count for (_, tier), count in sent.items() if tier == slow) / world / topology.tiers[slow].bandwidth
    assert Links(topology, EXACT)._ring(group, PART) == pytest.approx(steps * topology.tiers[slow].latency + carried)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_doubling_played_out(ranks: int) -> None:
    """Each rank swaps all it has with the rank at twice the distance."""
    have, sent, steps = [{rank} for rank in range(ranks)], [0.0] * ranks, 0
    while len(have[0]) < ranks:
        distance = 1 << steps
        sent = [count + len(have[rank]) * PART for rank, count in enumerate(sent)]
        have = [have[rank] | have[rank ^ distance] for rank in range(ranks)]
        steps += 1
    topology = machine(ranks)
    group = group_along(topology, Layout(shard=ranks, sparse_shard=ranks), "dense", (1,))
    assert sent == [gathered_bytes(group, PART)] * ranks
    tier = topology.tiers[0]
    assert Links(topology, EXACT)._doubling(group, PART) == pytest.approx(steps * tier.latency + sent[0] / tier.bandwidth)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(world=st.sampled_from([8, 12, 24, 32, 48]), local=st.sampled_from([2, 3, 4, 8]), picks=st.tuples(*[st.integers(0, 30)] * 3))
def test_shapes_of_groups_are_counted_rank_by_rank(world: int, local: int, picks: tuple[int, int, int]) -> None:
    def pick(n: int, index: int) -> int:
        divisors = list(divisors_of(n))
        return divisors[picks[index] % len(divisors)]

    replicate = pick(world, 0)
    layout = layout_of(world, replicate=replicate, expert=pick(world // replicate, 1), sparse_replicate=pick(world, 2))
    topology = machine(world, local, 4 * local, 1 << 12)
    for axes in ((0,), (1,), (2,), (1, 2), (0, 1, 2)):
        grid = rank_grid(layout, "dense")
        rest = [d for d in range(3) if d not in axes]
        groups = grid.permute(*rest, *axes).reshape(-1, math.prod(grid.shape[d] for d in axes)).tolist()
        blocks = [max(len({rank // size for rank in group}) for group in groups) for size in (1, local, 4 * local, 1 << 12)]
        want = tuple(-(-inner // outer) for inner, outer in pairwise(blocks))
        assert group_along(topology, layout, "dense", axes) == Group(len(groups[0]), want)


@pytest.mark.parametrize(("hosts", "local"), [(1, 4), (2, 4), (4, 2), (8, 1)])
def test_all_to_all_crosses_each_tier_as_counted(hosts: int, local: int) -> None:
    world, sizes, sent = hosts * local, (local, 1 << 10), 700.0
    topology = machine(world, *sizes)
    group = group_along(topology, Layout(shard=world, sparse_shard=world), "sparse", (0,))
    by_tier: Counter[int] = Counter()
    for other in range(1, world):
        by_tier[tier_of(0, other, sizes)] += sent / (world - 1)
    slowest = max(count / topology.tiers[tier].bandwidth for tier, count in by_tier.items())
    latency = max(topology.tiers[tier].latency for tier in by_tier)
    assert Links(topology, EXACT).all_to_all(group, sent) == pytest.approx(latency + slowest)


def test_oversubscription_and_reached_bandwidth_divide_the_speed() -> None:
    group = Group(4, (2, 2))
    plain, shared = Links(machine(4, 2, 4), EXACT), Links(machine(4, 2, 4, oversubscription=4.0), EXACT)
    half = Links(machine(4, 2, 4), Assumed(links=0.5, launch=0.0, message=0.0))
    big = 1e9
    assert shared.all_to_all(group, big) == pytest.approx(4 * plain.all_to_all(group, big), rel=1e-3)
    assert half.all_gather(group, big) == pytest.approx(2 * plain.all_gather(group, big), rel=1e-3)


def test_reductions_are_gathers_backwards_and_one_rank_is_free() -> None:
    links, group = Links(machine(8, 4, 8), Assumed(launch=1e-3)), Group(8, (4, 2))
    assert links.reduce_scatter(group, PART) == links.all_gather(group, PART)
    assert links.all_reduce(group, 8 * PART) == pytest.approx(2 * links.all_gather(group, PART) - 1e-3)
    alone = Group(1, (1, 1))
    assert links.all_gather(alone, PART) == links.all_reduce(alone, PART) == links.all_to_all(alone, PART) == 0.0


@settings(max_examples=40, derandomize=True, deadline=None)
@given(size=st.sampled_from([2, 4, 8, 16, 64]), part=st.floats(1.0, 1e9), factor=st.floats(1.1, 8.0))
def test_more_bytes_and_more_ranks_take_longer(size: int, part: float, factor: float) -> None:
    topology = machine(256, 8, 1 << 12)
    links = Links(topology, Assumed())
    few = group_along(topology, Layout(shard=size, replicate=256 // size, sparse_shard=256), "dense", (1,))
    more = group_along(topology, Layout(shard=2 * size, replicate=128 // size, sparse_shard=256), "dense", (1,))
    assert links.all_gather(few, part) < links.all_gather(few, part * factor)
    assert links.all_gather(few, part) < links.all_gather(more, part)


def test_unknown_links_are_refused() -> None:
    with pytest.raises(RequestError, match=r"links of the machine are unknown.*--machine"):
        Links(Topology(world=2, device="cpu"), EXACT)
    with pytest.raises(RequestError, match=r"9 ranks: its outermost tier, 'tier1', holds 8"):
        Links(machine(9, 4, 8), EXACT)
