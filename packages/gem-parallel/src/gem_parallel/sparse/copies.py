"""Copies of all tables in groups of ranks, averaged after every update: two-dimensional parallelism with fused updates.

A fused update never shows its gradients, so groups exchange weights and optimiser state instead. For SGD the average of the groups' weights is what
one group would hold. For row-wise AdaGrad it is an approximation: a group sees a part of the batch, whose gradients have a larger second moment, and
the step is ``lr * g / (sqrt(state / replicas) + eps)`` (arXiv 2508.03854). With gradients divided by ``sqrt(replicas)`` and the learning rate
multiplied by it, fbgemm's own rule does that, and its state is already the divided one: comparable between layouts, as checkpoints want it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gem_core.spec import RequestError, SparseOptimizer
from gem_parallel.comm.collectives import Traffic
from gem_parallel.sparse.placement import Cluster
from gem_parallel.sparse.shards import Slice


@dataclass(frozen=True, kw_only=True, slots=True)
class Copies:
    """The ranks as ``replicas`` groups that each hold all tables: rank ``g * replicas + m`` is rank ``g`` of group ``m``.

    ``cluster`` describes one group; ``mesh`` has the dimensions replicate and shard, and is None where there is one group.
    """

    cluster: Cluster
    replicas: int
    mesh: DeviceMesh | None

    @property
    def saves(self) -> bool:
        """Whether this rank hands its rows over to checkpoints: ranks of the first group do."""
        return self.mesh is None or self.mesh.get_local_rank("replicate") == 0

    def world_rank(self, rank: int) -> int:
        """The rank among all of rank ``rank`` of this rank's group."""
        return rank if self.mesh is None else rank * self.replicas + self.mesh.get_local_rank("replicate")


def group_cluster(world: int, local: int, device: str, replicas: int, optimizer: SparseOptimizer) -> Cluster:
    """The ranks of one group.

    Raises:
        RequestError: ``replicas`` does not divide the ranks, or the optimiser has no rule for copies.
    """
    asked = f"engine 'torchrec' with replicas = {replicas}"
    if world % replicas:
        fits = [n for n in range(1, world + 1) if world % n == 0]
        raise RequestError(asked, f"{world} ranks cannot be divided by it", f"Choose one of {', '.join(map(str, fits))}.")
    if replicas > 1 and optimizer.name == "adam":
        so = "averaged copies are known for sgd and rowwise_adagrad only"
        raise RequestError(asked, so, "Choose replicas = 1, another optimiser, or engine 'sharded_2d', which is exact.")
    return Cluster(world=world // replicas, local=min(max(1, local // replicas), world // replicas), device=device)


def copies_of(cluster: Cluster, replicas: int) -> Copies:
    """The process groups. Collective when there are replicas."""
    if replicas == 1:
        return Copies(cluster=cluster, replicas=1, mesh=None)
    ranks = torch.arange(cluster.world * replicas).view(cluster.world, replicas).T
    return Copies(cluster=cluster, replicas=replicas, mesh=DeviceMesh(cluster.device, ranks, mesh_dim_names=("replicate", "shard")))


def gradient_scale(replicas: int, optimizer: SparseOptimizer) -> float:
    """What gradients are divided by and the learning rate is multiplied by."""
    return math.sqrt(replicas) if optimizer.name == "rowwise_adagrad" else 1.0


@torch.no_grad()
def average(slices: Sequence[Slice], copies: Copies, traffic: Traffic) -> None:
    """Set weights and optimiser state to their mean over the groups, in float32. Collective over the ranks that hold the same rows."""
    if copies.mesh is None:
        return
    group = copies.mesh.get_group("replicate")
    for tensor in (tensor for piece in slices for tensor in piece.tensors.values()):
        total: Tensor = tensor.float() if tensor.dtype != torch.float32 else tensor.clone()
        dist.all_reduce(total, group=group)
        traffic.sent["tables: average copies"] += 2 * (copies.replicas - 1) * total.numel() * total.element_size() // copies.replicas
        tensor.copy_(total / copies.replicas)
