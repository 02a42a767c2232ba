"""Which rank has which place: five named axes over the same ranks, laid on the network from the inside out.

The dense part lies on a grid ``[replicate, shard, expert]`` and the tables on a grid ``[sparse_shard, sparse_replicate]``; the last axis is the
innermost, so its groups are neighbours: ``rank = (r * shard + s) * expert + e = g * sparse_replicate + m``. Neighbours share a host. So what talks
most, experts and the replicas of a table shard, stays on its links; shards lie across hosts, and replicas of the dense part across zones, where they
exchange gradients once a step.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gem_core.spec import RequestError, Topology

Part = Literal["dense", "weights", "sparse"]
NAMES: dict[Part, tuple[str, ...]] = {
    "dense": ("dense_replicate", "dense_shard", "dense_expert"),
    "weights": ("dense_replicate", "dense_shard"),
    "sparse": ("sparse_shard", "sparse_replicate"),
}
"""The dimensions of the meshes. ``weights`` is for what no expert group divides: its shards run over the shard and the expert axis."""

_meshes: dict[tuple[object, str, Part, str], DeviceMesh] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Degrees of the five axes; ``replicate * shard * expert`` and ``sparse_shard * sparse_replicate`` both equal the number of ranks."""

    replicate: int = 1
    shard: int = 1
    expert: int = 1
    sparse_shard: int = 1
    sparse_replicate: int = 1

    @property
    def world(self) -> int:
        return self.replicate * self.shard * self.expert

    def sizes(self, part: Part) -> tuple[int, ...]:
        """Sizes of a mesh's dimensions, outermost first."""
        return {
            "dense": (self.replicate, self.shard, self.expert),
            "weights": (self.replicate, self.shard * self.expert),
            "sparse": (self.sparse_shard, self.sparse_replicate),
        }[part]

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in asdict(self).items())


def layout_of(
    world: int, *, replicate: int = 1, expert: int = 1, sparse_replicate: int = 1, asked: str = "the mesh", topology: Topology | None = None
) -> Layout:
    """The layout with these degrees; the shard axes take what is left.

    Args:
        asked: who asks, for the error: ``strategy 'fsdp'``.
        topology: where its tiers are known, experts and table replicas may not cross a host.

    Raises:
        RequestError: the degrees do not divide the ranks, or cross a host; the nearest that do are named.
    """
    check_degree(f"{asked} with replicas = {replicate}", replicate, world)
    check_degree(f"{asked} with an expert degree of {expert}", expert, world // replicate, of=f"{world} ranks in {replicate} replicas")
    check_degree(f"{asked} with {sparse_replicate} table replicas", sparse_replicate, world)
    if topology is not None and topology.tiers:
        local = min(topology.tiers[0].size, world)
        if expert > 1 and local % expert:
            raise RequestError(f"{asked} with an expert degree of {expert}", f"a host has {local} ranks", nearest_degrees(expert, local))
    return Layout(
        replicate=replicate,
        shard=world // replicate // expert,
        expert=expert,
        sparse_shard=world // sparse_replicate,
        sparse_replicate=sparse_replicate,
    )


def check_degree(asked: str, degree: int, ranks: int, of: str | None = None) -> None:
    """Raise RequestError with the nearest possible degrees unless ``degree`` divides ``ranks``."""
    if degree < 1 or ranks % degree:
        raise RequestError(asked, f"{of or f'{ranks} ranks'} cannot be divided by it", nearest_degrees(degree, ranks))


def nearest_degrees(degree: int, ranks: int) -> str:
    """Advice: all divisors of ``ranks`` where they are few, else the four nearest to ``degree``."""
    divisors = list(divisors_of(ranks))
    if len(divisors) > 8:
        divisors = sorted(sorted(divisors, key=lambda n: abs(math.log(n / max(degree, 1))))[:4])
    return f"Choose one of {', '.join(map(str, divisors))}."


def divisors_of(ranks: int) -> Iterator[int]:
    """The divisors of a number, ascending."""
    return (n for n in range(1, ranks + 1) if ranks % n == 0)


def rank_grid(layout: Layout, part: Part) -> Tensor:
    """The ranks as they lie on a mesh, int64, shape ``layout.sizes(part)``."""
    return torch.arange(layout.world).view(layout.sizes(part))


def device_mesh(layout: Layout, part: Part, device: str) -> DeviceMesh:
    """The mesh with its process groups. Collective on the first call for a layout; later calls give the same mesh and groups.

    Every axis has groups of its own, also where another axis has the same ranks: collectives of one group run in order, and those of the dense part
    must not wait for those of the tables.

    Args:
        device: ``cpu`` or ``cuda``, with or without an index.

    Raises:
        RequestError: there is no process group, or it has another number of ranks.
    """
    if not dist.is_initialized() or dist.get_world_size() != layout.world:
        so = f"the process group has {dist.get_world_size()} ranks" if dist.is_initialized() else "there is no process group"
        do = "Start with torchrun, or call torch.distributed.init_process_group first."
        raise RequestError(f"a mesh of {layout.world} ranks", so, do)
    kind = torch.device(device).type
    sizes = layout.sizes(part)
    key = (dist.group.WORLD, kind, part, str(sizes))
    if key not in _meshes:
        _meshes[key] = DeviceMesh(kind, rank_grid(layout, part), mesh_dim_names=NAMES[part])
    return _meshes[key]
