"""The mesh: every rank once on every grid, groups of neighbours innermost, and degrees that cannot be are refused with the nearest that can."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.spec import RequestError, Tier, Topology
from gem_parallel.mesh import NAMES, Layout, Part, check_degree, device_mesh, divisors_of, layout_of, nearest_degrees, rank_grid

PARTS: tuple[Part, ...] = ("dense", "weights", "sparse")


def hosts_of(local: int, world: int = 16) -> Topology:
    return Topology(world=world, device="cuda", tiers=(Tier(name="host", size=local, bandwidth=1.0), Tier(name="zone", size=1 << 20, bandwidth=1.0)))


@settings(max_examples=50, derandomize=True, deadline=None)
@given(replicate=st.integers(1, 6), shard=st.integers(1, 6), expert=st.integers(1, 6), pick=st.integers(0, 40))
def test_every_rank_has_one_place_on_every_grid(replicate: int, shard: int, expert: int, pick: int) -> None:
    world = replicate * shard * expert
    divisors = list(divisors_of(world))
    tables = divisors[pick % len(divisors)]
    layout = layout_of(world, replicate=replicate, expert=expert, sparse_replicate=tables)
    assert (layout.shard, layout.sparse_shard * tables, layout.world) == (shard, world, world)
    for part in PARTS:
        grid = rank_grid(layout, part)
        assert tuple(grid.shape) == layout.sizes(part)
        assert len(NAMES[part]) == grid.dim()
        assert grid.flatten().tolist() == list(range(world))
    dense, sparse = rank_grid(layout, "dense"), rank_grid(layout, "sparse")
    r, s, e = replicate - 1, shard // 2, expert // 2
    assert dense[r, s, e] == (r * shard + s) * expert + e
    assert sparse[layout.sparse_shard - 1, 0] == (layout.sparse_shard - 1) * tables


def test_inner_axes_are_neighbours_and_meshes_differ() -> None:
    """Two replicas of two hosts of four ranks, experts in pairs, tables copied inside each host."""
    layout = layout_of(16, replicate=2, expert=2, sparse_replicate=4)
    assert rank_grid(layout, "dense")[0, 0].tolist() == [0, 1]
    assert rank_grid(layout, "dense")[0, :, 0].tolist() == [0, 2, 4, 6]
    assert rank_grid(layout, "dense")[:, 0, 0].tolist() == [0, 8]
    assert rank_grid(layout, "weights")[1].tolist() == list(range(8, 16))
    assert rank_grid(layout, "sparse")[0].tolist() == [0, 1, 2, 3]
    assert rank_grid(layout, "sparse")[:, 1].tolist() == [1, 5, 9, 13]
    assert str(layout) == "replicate 2 x shard 4 x expert 2 x sparse_shard 4 x sparse_replicate 4"


@settings(max_examples=60, derandomize=True, deadline=None)
@given(world=st.integers(1, 200), degree=st.integers(1, 220))
def test_impossible_degrees_are_refused_with_the_nearest(world: int, degree: int) -> None:
    if world % degree == 0:
        check_degree("it", degree, world)
        return
    with pytest.raises(RequestError) as caught:
        check_degree("it", degree, world)
    offered = [int(word) for word in caught.value.do.removeprefix("Choose one of ").rstrip(".").split(", ")]
    assert offered
    assert all(world % n == 0 for n in offered)
    divisors = list(divisors_of(world))
    below, above = [n for n in divisors if n < degree], [n for n in divisors if n > degree]
    assert (below and below[-1] in offered) or (above and above[0] in offered)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"replicate": 3}, "Choose one of 1, 2, 4, 8, 16."),
        ({"replicate": 4, "expert": 8}, "16 ranks in 4 replicas cannot be divided by it. Choose one of 1, 2, 4."),
        ({"sparse_replicate": 5}, "5 table replicas"),
        ({"replicate": 0}, "Choose one of 1, 2, 4, 8, 16."),
        ({"expert": 8, "topology": hosts_of(4)}, "a host has 4 ranks. Choose one of 1, 2, 4."),
    ],
)
def test_what_cannot_be_laid_out(words: dict[str, int], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        layout_of(16, **words)  # type: ignore[arg-type]
    assert said in str(caught.value)


def test_experts_of_one_host_are_fine() -> None:
    assert layout_of(16, expert=4, topology=hosts_of(4)).shard == 4
    assert layout_of(16, expert=8, topology=Topology(world=16, device="cpu")).shard == 2


def test_of_many_divisors_the_nearest_are_named() -> None:
    assert nearest_degrees(100, 4096) == "Choose one of 32, 64, 128, 256."


def test_a_mesh_needs_its_ranks() -> None:
    assert not torch.distributed.is_initialized()
    with pytest.raises(RequestError, match="no process group"):
        device_mesh(Layout(shard=2, sparse_shard=2), "dense", "cpu")
