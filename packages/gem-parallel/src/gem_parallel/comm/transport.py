"""How the weights and gradients of ``fully_shard`` travel: the hooks that it calls in place of its own collectives."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gem_core.spec import PluginError
from gem_parallel.comm.backends import LOW_CTAS, Here, require
from gem_parallel.comm.collectives import Traffic, gather_into, scatter_into
from gem_parallel.comm.ledger import LEDGER
from gem_parallel.comm.payload import Payload

Carrier = Callable[[Tensor, Tensor], None]
"""``carrier(output, own)``: the all-gather of a backend, on the current stream."""


class GroupGather:
    """torch's all-gather over a process group: NCCL or gloo."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, output: Tensor, own: Tensor) -> None:
        gather_into(output, own, group=self.group)


class CopyEngineGather:
    """An all-gather by copies between GPUs: each rank puts its part into symmetric memory and reads the others' parts. No SM moves data.

    Two barriers, of one thread block each, order the copies: parts are complete before they are read, and read before they are overwritten.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, output: Tensor, own: Tensor) -> None:
        from torch.distributed._symmetric_memory import get_symm_mem_workspace

        shared: Any = get_symm_mem_workspace(self.group.group_name, own.nbytes)
        parts = output.chunk(shared.world_size)
        shared.get_buffer(shared.rank, own.shape, own.dtype).copy_(own)
        shared.barrier()
        for step in range(1, shared.world_size):
            peer = (shared.rank + step) % shared.world_size
            parts[peer].copy_(shared.get_buffer(peer, own.shape, own.dtype))
        if parts[shared.rank].data_ptr() != own.data_ptr():
            parts[shared.rank].copy_(own)
        shared.barrier()


def carrier_of(backend: str, group: dist.ProcessGroup, here: Here) -> Carrier:
    """The all-gather of a backend over the ranks of ``group``. Collective over all ranks.

    Raises:
        MachineError: the backend does not work here.
    """
    require(backend, here)
    if backend == "low_cta":
        return GroupGather(few_blocks(group, LOW_CTAS))
    return CopyEngineGather(group) if backend == "copy_engine" else GroupGather(group)


def few_blocks(group: dist.ProcessGroup, ctas: int) -> dist.ProcessGroup:
    """A communicator over the same ranks that runs in at most ``ctas`` thread blocks. Collective over all ranks."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas, options.config.max_ctas, options.config.cga_cluster_size = 1, ctas, 0
    own = dist.get_process_group_ranks(group)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    made: dist.ProcessGroup | None = None
    for ranks in sorted({tuple(ranks) for ranks in every}):
        found = dist.new_group(list(ranks), backend="nccl", pg_options=options, group_desc=f"{group.group_desc}, {ctas} blocks")
        if ranks == tuple(own):
            made = found
    assert made is not None
    return made


class _Recorded:
    """What both hooks have in common.

    Args:
        name: of the block whose weights travel.
        traffic: where bytes are counted.
    """

    def __init__(self, name: str, traffic: Traffic) -> None:
        self._name, self._traffic = name, traffic

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a collective, from torch's allocator."""
        return torch.empty(*size, dtype=dtype, device=device)


class GatherWeights(_Recorded):
    """The all-gather of a block's weights.

    Args:
        carrier: the backend's all-gather.
        payload: the format on the wire; None sends weights as they are.
    """

    def __init__(self, name: str, traffic: Traffic, carrier: Carrier, payload: Payload | None) -> None:
        super().__init__(name, traffic)
        self._carrier, self._payload = carrier, payload

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> None:
        ranks = group.size()
        own = input_tensor if self._payload is None else self._payload.pack(input_tensor)
        target = output_tensor if self._payload is None else own.new_empty(ranks * own.numel())
        sent = (ranks - 1) * own.nbytes
        self._traffic.sent["dense: weights"] += sent
        name = f"dense: weights of {self._name}"
        with LEDGER.blocking(name, "all_gather", sent, group.group_desc, ranks, own.device, stream="weights"):
            self._carrier(target, own)
        if self._payload is not None:
            self._payload.unpack(target, output_tensor, ranks)


class AgreeOnLargest(_Recorded):
    """The largest magnitudes of blocks of weights that several ranks have rows of, before they are rounded: the maximum over the ranks."""

    def __init__(self, name: str, traffic: Traffic, group: dist.ProcessGroup) -> None:
        super().__init__(name, traffic)
        self._group = group

    def __call__(self, largest: Tensor) -> Tensor:
        if not largest.numel():
            return largest
        ranks = self._group.size()
        sent = all_reduce_bytes(largest.nbytes, ranks)
        self._traffic.sent["dense: scales of weights"] += sent
        name = f"dense: scales of weights of {self._name}"
        with LEDGER.blocking(name, "all_reduce", sent, self._group.group_desc, ranks, largest.device, stream="weights"):
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        return largest


class ScatterGradients(_Recorded):
    """The reduce-scatter of a block's gradients, and the count of their all-reduce over replicas, which ``fully_shard`` issues itself.

    While that all-reduce is put off, ``fully_shard`` adds up what is scattered in one flat tensor. That is right only if the same parameters have
    gradients in each micro-batch, so all must have one then, and a block that was scattered must be reduced in the end.

    Args:
        replicas: ranks of the all-reduce.
        whole: numbers in the gradients of all the block's parameters, padded to equal parts.
    """

    def __init__(self, name: str, traffic: Traffic, replicas: int, whole: int) -> None:
        super().__init__(name, traffic)
        self._replicas, self._whole = replicas, whole
        self.delayed, self._pending = False, False

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False) -> dist.Work | None:
        ranks = group.size()
        if self.delayed:
            if input_tensor.numel() != self._whole:
                self._refuse()
            self._pending = True
        sent = (ranks - 1) * output_tensor.nbytes
        self._traffic.sent["dense: gradients"] += sent
        name = f"dense: gradients of {self._name}"
        with LEDGER.blocking(name, "reduce_scatter", sent, group.group_desc, ranks, input_tensor.device, stream="gradients"):
            work = scatter_into(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        return work  # type: ignore[no-any-return]

    def replicas_reduced(self, gradients: Tensor) -> None:
        """Called after the all-reduce of a shard's gradients over the replicas."""
        self._pending = False
        sent = all_reduce_bytes(gradients.nbytes, self._replicas)
        self._traffic.sent["dense: gradients between replicas"] += sent
        name = f"dense: gradients of {self._name} between replicas"
        with LEDGER.blocking(name, "all_reduce", sent, "dense_replicate", self._replicas, gradients.device, stream="gradients"):
            pass

    def check_reduced(self) -> None:
        """Raise PluginError if gradients of earlier micro-batches have not been reduced, as the last one gave the block none."""
        if self._pending:
            self._refuse()

    def _refuse(self) -> None:
        so = f"{self._name} left parameters without a gradient in a micro-batch, so that micro-batches cannot be added up"
        raise PluginError("one all-reduce for all micro-batches", so, "Reduce in each: --set parallel.options.fsdp.reduce=each.")


def all_reduce_bytes(size: int, ranks: int) -> int:
    """Bytes that each rank sends in a ring all-reduce of ``size`` bytes: a reduce-scatter and an all-gather, in parts of equal size."""
    return 2 * (ranks - 1) * math.ceil(size / ranks)
