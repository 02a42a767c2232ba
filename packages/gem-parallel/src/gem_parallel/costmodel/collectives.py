"""Time and bytes of collectives on tiers of links, by latency and bandwidth.

A group's shape says how many of its members share each tier: ``(8, 16, 2)`` is 8 in each host, in 16 hosts of each zone, in 2 zones. A device sends
through its own links, so a group that has 8 members in a host has 8 links out of it.

Two algorithms are known and the quicker one counts, as in NCCL: a pipelined ring (one ring for each link out of a host), whose latency grows with the
number of ranks, and recursive doubling tier by tier, whose latency grows with its logarithm and whose tiers follow one another.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from gem_core.spec import RequestError, Tier, Topology
from gem_parallel.costmodel.assumed import Assumed
from gem_parallel.mesh import Layout, Part


@dataclass(frozen=True, slots=True)
class Group:
    """``size`` ranks; ``shape[k]`` of them, or of the blocks inside, share a block of tier ``k``."""

    size: int
    shape: tuple[int, ...]

    def inside(self, tier: int) -> int:
        """Members in one block of the tier below: the links that they have into this one."""
        return math.prod(self.shape[:tier])

    def outermost(self) -> int:
        """The outermost tier that the group's messages cross."""
        return max((k for k, count in enumerate(self.shape) if count > 1), default=0)


def group_along(topology: Topology, layout: Layout, part: Part, axes: tuple[int, ...]) -> Group:
    """The groups along adjacent dimensions of a mesh; the widest spread of them all where tiers cut them unevenly."""
    sizes = layout.sizes(part)
    size, stride = math.prod(sizes[axis] for axis in axes), math.prod(sizes[axes[-1] + 1 :])
    return Group(size, _shape(layout.world, size, stride, tuple(tier.size for tier in topology.tiers)))


@lru_cache(maxsize=4096)
def _shape(world: int, size: int, stride: int, tiers: tuple[int, ...]) -> tuple[int, ...]:
    ranks = np.arange(world).reshape(-1, size, stride)
    blocks = [size]
    for tier in tiers[:-1]:
        homes = ranks // tier
        blocks.append(int((np.diff(homes, axis=1) != 0).sum(axis=1).max(initial=0)) + 1)
    blocks.append(1)
    return tuple(math.ceil(inner / outer) for inner, outer in pairwise(blocks))


class Links:
    """The tiers of a machine at the speed that is reached.

    Raises:
        RequestError: the machine's links are unknown, or its tiers hold fewer ranks than there are.
    """

    def __init__(self, topology: Topology, assumed: Assumed) -> None:
        if not topology.tiers:
            so = f"the links of the machine are unknown ({topology.source})"
            raise RequestError("a cost model", so, "Name a machine: --machine h200, or a file that describes yours.")
        if topology.tiers[-1].size < topology.world:
            so = f"its outermost tier, {topology.tiers[-1].name!r}, holds {topology.tiers[-1].size} ({topology.source})"
            raise RequestError(f"a cost model of {topology.world} ranks", so, "Describe the tier that holds them all: docs/efficiency.md.")
        self._tiers, self._assumed = topology.tiers, assumed

    def _speed(self, tier: Tier) -> float:
        return tier.share * self._assumed.links

    def all_gather(self, group: Group, part: float) -> float:
        """Seconds until every rank has every rank's ``part`` bytes."""
        return self._assumed.launch + self._moved(group, part) if group.size > 1 else 0.0

    def reduce_scatter(self, group: Group, part: float) -> float:
        """Seconds until every rank has the sum of its ``part`` bytes: an all-gather backwards, ``scatter`` times as long."""
        return self._assumed.launch + self._assumed.scatter * self._moved(group, part) if group.size > 1 else 0.0

    def all_reduce(self, group: Group, whole: float) -> float:
        """Seconds until every rank has the sum of ``whole`` bytes: ``reduce`` times what an all-gather of its parts takes."""
        return self._assumed.launch + self._assumed.reduce * self._moved(group, whole / group.size) if group.size > 1 else 0.0

    def all_to_all(self, group: Group, sent: float) -> float:
        """Seconds until every rank has what the others sent it; ``sent`` bytes leave the busiest rank, evenly to all others."""
        if group.size == 1:
            return 0.0
        slowest = 0.0
        for k, tier in enumerate(self._tiers):
            crossing = (group.inside(k + 1) - group.inside(k)) / max(1, group.inside(len(self._tiers)) - 1)
            slowest = max(slowest, sent * crossing / self._speed(tier))
        return self._assumed.launch + self._tiers[group.outermost()].latency + (group.size - 1) * self._assumed.message + slowest

    def _moved(self, group: Group, part: float) -> float:
        return min(self._ring(group, part), self._doubling(group, part))

    def _ring(self, group: Group, part: float) -> float:
        hops = group.size - 1
        latency = max(self._tiers[k].latency for k, count in enumerate(group.shape) if count > 1)
        carried = max(hops * part / group.inside(k) / self._speed(self._tiers[k]) for k, count in enumerate(group.shape) if count > 1)
        return hops * latency + carried

    def _doubling(self, group: Group, part: float) -> float:
        seconds = 0.0
        for k, count in enumerate(group.shape):
            beyond = math.prod(group.shape[k + 1 :])
            seconds += math.ceil(math.log2(count)) * self._tiers[k].latency + (count - 1) * beyond * part / self._speed(self._tiers[k])
        return seconds


def gathered_bytes(group: Group, part: float) -> float:
    """Bytes that a rank sends in an all-gather of ``part`` bytes a rank, and in a reduce-scatter of as many."""
    return (group.size - 1) * part
