"""A layout in words: where each axis lies on the tiers, why, and a drawing."""

import numpy as np

from gem_core.spec import Topology
from gem_parallel.costmodel.collectives import Group, group_along
from gem_parallel.mesh import NAMES, Layout, Part, rank_grid

WHY = {
    "dense_expert": "rows go there and back in every layer, and nothing hides them",
    "dense_shard": "weights are gathered twice a step, behind the compute of the block before",
    "dense_replicate": "gradients are summed once a step, the least of all traffic",
    "sparse_replicate": "a shard is gathered whole in every step, beside the optimiser",
    "sparse_shard": "vectors and gradients of single rows go to any rank of the group",
}
SHOWN = 4


def axes_of(topology: Topology, layout: Layout) -> list[tuple[str, int, Group, list[int]]]:
    """``(dimension, size, its groups' shape, ranks of the first group)``, dense then sparse, innermost first."""
    out = []
    parts: tuple[Part, ...] = ("dense", "sparse")
    for part in parts:
        grid = rank_grid(layout, part)
        for axis in reversed(range(grid.dim())):
            ranks = grid.movedim(axis, 0).reshape(grid.shape[axis], -1)[:, 0].tolist()
            out.append((NAMES[part][axis], grid.shape[axis], group_along(topology, layout, part, (axis,)), ranks))
    return out


def reasons(topology: Topology, layout: Layout) -> tuple[str, ...]:
    """Why each axis of more than one rank lies where it does."""
    lines = []
    for name, size, group, ranks in axes_of(topology, layout):
        if size > 1:
            tier = topology.tiers[group.outermost()]
            lines.append(f"{name} {size}: {_some(ranks)}, within a {tier.name} ({tier.share / 1e9:.3g} GB/s a rank each way): {WHY[name]}")
    return tuple(lines)


def drawing(topology: Topology, layout: Layout) -> tuple[str, ...]:
    """The ranks of the first hosts with their places in both meshes, one line a host, under the tiers that hold them."""
    local = min(topology.tiers[0].size, layout.world)
    lines = []
    for depth, tier in enumerate(reversed(topology.tiers[1:])):
        if layout.world > local:
            inside = min(tier.size, layout.world)
            over = f", 1:{tier.oversubscription:g} oversubscribed" if tier.oversubscription > 1 else ""
            count = -(-layout.world // tier.size)
            what = f"{count} {tier.name}s of {inside}" if count > 1 else f"1 {tier.name} of {inside}"
            lines.append(f"{'  ' * depth}{what} ranks, {tier.bandwidth / 1e9:g} GB/s a rank each way{over}")
    hosts = -(-layout.world // local)
    margin = "  " * len(lines)
    lines.append(f"{margin}{hosts} host{'s' if hosts > 1 else ''} of {local} ranks, {topology.tiers[0].bandwidth / 1e9:g} GB/s a rank each way")
    for host in [*range(min(hosts, SHOWN)), *([hosts - 1] if hosts > SHOWN else [])]:
        if host == hosts - 1 and hosts > SHOWN + 1:
            lines.append(f"{margin}  ...")
        ranks = range(host * local, min((host + 1) * local, layout.world))
        cells = [_place(layout, rank) for rank in ranks]
        lines.append(f"{margin}  host {host:<4} {' '.join(cells)}")
    lines.append(f"{margin}  r replicate, s shard, e expert / S shard of the tables, R its replica")
    return tuple(lines)


def _place(layout: Layout, rank: int) -> str:
    r, s, e = np.unravel_index(rank, layout.sizes("dense"))
    g, m = np.unravel_index(rank, layout.sizes("sparse"))
    return f"r{r}s{s}e{e}/S{g}R{m}"


def _some(ranks: list[int]) -> str:
    shown = ranks if len(ranks) <= SHOWN + 1 else [*ranks[:3], "...", ranks[-1]]
    return f"ranks {', '.join(map(str, shown))}"
