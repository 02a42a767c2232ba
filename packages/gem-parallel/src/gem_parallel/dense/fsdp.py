"""Sharding of the dense part with torch's ``fully_shard``, over one or two dimensions of ranks."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gem_core.spec import ParallelContext, RequestError


class FullyShard:
    """Strategy ``fsdp``: parameters, gradients and optimiser state sharded over ranks, block by block.

    Weights are gathered before a block computes and its gradients are scattered after its backward, so at most the blocks at work are whole. With
    ``replicas`` the ranks form a grid: a shard group of neighbours holds the weights once, and gradients are also averaged over the groups (2-D
    FSDP, or HSDP). Gradients are averages over all ranks, as in ``ddp``.

    Args:
        replicas: copies of the weights; the number of ranks is a multiple of it. 1 shards over all ranks.
        reshard: drop a block's weights after its forward and gather them again for backward. Without, they stay: more memory, half the gathers.
    """

    def __init__(self, *, replicas: int = 1, reshard: bool = True) -> None:
        self._replicas, self._reshard = replicas, reshard
        self._facts: dict[str, Any] = {"strategy": "fsdp", "replicas": replicas, "reshard": reshard, "world": 1, "blocks": []}

    def apply(self, module: nn.Module, context: ParallelContext) -> nn.Module:
        """``module`` itself, its parameters sharded in place; in a single process as it is.

        Raises:
            RequestError: the ranks cannot be divided, or there is no process group.
        """
        self._facts["world"] = context.world
        if context.world % self._replicas:
            fits = ", ".join(str(n) for n in range(1, context.world + 1) if context.world % n == 0)
            so = f"{context.world} ranks cannot be divided by it"
            raise RequestError(f"strategy 'fsdp' with replicas = {self._replicas}", so, f"Choose one of {fits}.")
        if context.world == 1:
            return module
        if not dist.is_initialized():
            so = f"the run has {context.world} ranks and no process group"
            raise RequestError("strategy 'fsdp'", so, "Start with torchrun, or call torch.distributed.init_process_group first.")
        shards = context.world // self._replicas
        grid = init_device_mesh(torch.device(context.device).type, (self._replicas, shards), mesh_dim_names=("dense_replicate", "dense_shard"))
        mesh = grid if self._replicas > 1 else grid["dense_shard"]
        for name, block in blocks(module):
            fully_shard(block, mesh=mesh, reshard_after_forward=self._reshard)
            self._facts["blocks"].append(name)
        fully_shard(module, mesh=mesh, reshard_after_forward=False)  # what is in no block is needed at both ends of the step
        return module

    def describe(self) -> Mapping[str, Any]:
        return self._facts


def blocks(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that are gathered one at a time: the entries of the lists of modules directly under the root that have parameters."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            for index, block in enumerate(child):
                if any(True for _ in block.parameters()):
                    yield f"{name}.{index}", block
