"""Data parallelism of the dense part with torch's DistributedDataParallel."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from gem_core.spec import ParallelContext, RequestError
from gem_parallel.comm.backends import set_environment
from gem_parallel.comm.ledger import LEDGER
from gem_parallel.comm.waits import Gap
from gem_parallel.dense.experts import placement_of
from gem_parallel.mesh import device_mesh, layout_of

_FORWARD_SYNC = "forward_sync_buffers" if "forward_sync_buffers" in signature(DistributedDataParallel.__init__).parameters else "broadcast_buffers"
"""torch 2.13 renamed the argument and warns about the old name."""


class DataParallel:
    """Strategy ``ddp``: every rank holds the dense part; backward averages the gradients over ranks.

    - Parameters and buffers are broadcast from rank 0 once. Buffers are not broadcast again: that would be a collective in every forward pass, and
      ranks do not evaluate equally many batches.
    - Unused parameters are looked for in every step. A rank whose batch has no rows, or no events of one kind, may leave a part of the model out;
      without the search the others would wait for its gradients for ever, and a static graph would be wrong from the first such step on.
    - DDP talks over a process group of its own. Sharded tables exchange gradients in the same backward pass, and ranks that leave out different parts
      start their collectives in different orders.
    - Experts that strategy ``experts`` has shared out are left to ``fully_shard`` with as many replicas as ranks hold them and one shard, which
      averages their gradients over those ranks.
    """

    recorder = LEDGER

    def __init__(self) -> None:
        self._world = 1
        self._wrapped: DistributedDataParallel | None = None

    def apply(self, module: nn.Module, context: ParallelContext) -> nn.Module:
        """``module`` wrapped for several ranks, and itself in a single process. The wrapper's ``module`` is the same object, with all its attributes.

        Raises:
            RequestError: there are several ranks but no process group.
        """
        self._world = context.world
        if context.world == 1:
            return module
        if not dist.is_initialized():
            so = f"the run has {context.world} ranks and no process group"
            raise RequestError("strategy 'ddp'", so, "Start with torchrun, or call torch.distributed.init_process_group first.")
        set_environment(context.device)
        group = dist.new_group()
        self._replicate_experts(module, context)
        for buffer in module.buffers():  # DDP leaves them alone where it does not broadcast them in forward
            dist.broadcast(buffer, 0, group=group)
        words = {"process_group": group, "find_unused_parameters": True, "gradient_as_bucket_view": True, _FORWARD_SYNC: False}
        watch_gradients(module, torch.device(context.device))
        self._wrapped = DistributedDataParallel(module, **words)
        return self._wrapped

    def _replicate_experts(self, module: nn.Module, context: ParallelContext) -> None:
        placement = placement_of(module)
        if placement.degree == 1:
            return
        layout = layout_of(context.world, replicate=context.world // placement.degree, expert=placement.degree, asked="strategy 'ddp'")
        mesh = device_mesh(layout, "dense", context.device)["dense_replicate", "dense_shard"]
        for held in placement.ensembles:
            for expert in held.experts:
                fully_shard(expert, mesh=mesh, reshard_after_forward=False)
        apart = [name for name, _ in module.named_parameters() if any(name.startswith(f"{held.name}.experts.") for held in placement.ensembles)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, apart)  # type: ignore[no-untyped-call]

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """``DelaysReduction``: gradients of micro-batches add up on each rank and are averaged with the last. Those of experts that strategy
        ``experts`` has shared out are averaged in each."""
        with nullcontext() if last or self._wrapped is None else self._wrapped.no_sync():
            yield

    def describe(self) -> Mapping[str, Any]:
        return {"strategy": "ddp", "world": self._world}


def watch_gradients(module: nn.Module, device: torch.device) -> None:
    """Record how long the end of backward waits for the gradients' all-reduce.

    DDP waits in a callback of autograd that it queues during backward. Callbacks run in the order in which they are queued, so one queued when
    backward begins runs before DDP's, and one that it queues in turn runs after.
    """
    gap, begun = Gap("dense: wait for gradients", device), [False]
    engine = torch.autograd.Variable._execution_engine

    def end() -> None:
        gap.end()
        begun[0] = False

    def begin() -> None:
        gap.begin()
        engine.queue_callback(end)

    def backward_begins(_: Tensor) -> None:
        if not begun[0]:
            begun[0] = True
            engine.queue_callback(begin)

    def watch(_module: nn.Module, _inputs: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(backward_begins)  # type: ignore[no-untyped-call]

    module.register_forward_hook(watch)
