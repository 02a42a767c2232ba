"""Sharding of the dense part with torch's ``fully_shard``, over one or two dimensions of ranks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from gem_core.spec import ParallelContext, RequestError, Topology
from gem_parallel.comm.backends import Here, set_environment
from gem_parallel.comm.collectives import Traffic
from gem_parallel.comm.ledger import LEDGER
from gem_parallel.comm.lowered import Lowered, LowPart, low_parts
from gem_parallel.comm.payload import PAYLOADS, Payload
from gem_parallel.comm.transport import AgreeOnLargest, Carrier, GatherWeights, ScatterGradients, carrier_of
from gem_parallel.comm.waits import GradientWaits, WeightWaits
from gem_parallel.dense.experts import Placement, placement_of
from gem_parallel.mesh import device_mesh, layout_of

ROOT = "the rest"


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Modules whose weights are gathered together: a block, the experts of a block that this rank holds, or the root."""

    name: str
    modules: list[nn.Module]
    experts: bool = False

    @property
    def fsdp(self) -> Any:
        """The module that has ``fully_shard``'s methods for the whole unit."""
        return self.modules[0]


class FullyShard:
    """Strategy ``fsdp``: parameters, gradients and optimiser state sharded over ranks, block by block.

    Weights are gathered before a block computes and its gradients are scattered after its backward, so at most the blocks at work are whole. With
    ``replicas`` the ranks form a grid: a shard group of neighbours holds the weights once, and gradients are also averaged over the groups (2-D
    FSDP, or HSDP). Gradients are averages over all ranks, as in ``ddp``. Where strategy ``experts`` has shared experts out, a rank's experts are
    sharded over those ranks of its shard group that hold them too, and all other weights over the whole shard group.

    Args:
        replicas: copies of the weights; the number of ranks is a multiple of it. 1 shards over all ranks.
        reshard: drop a block's weights after its forward and gather them again for backward. Without, they stay: more memory, half the gathers.
        keep: patterns of names of blocks that keep their weights all the same.
        prefetch: blocks gathered ahead of the one that computes in forward, in the model's order.
        payload: format of the weights between ranks (``gem_parallel.comm.payload``).
        reduce_dtype: format in which gradients are summed between ranks.
        reduce: ``last`` sums the gradients of a step's micro-batches over the replicas once, ``each`` after each of them.
        comm: backend that carries the weights (``gem_parallel.comm.backends``).
        reserved_sms: SMs that persistent kernels leave free.
        multicast: whether NVLink multicast may be used.
    """

    recorder = LEDGER

    def __init__(
        self,
        *,
        replicas: int = 1,
        reshard: bool = True,
        keep: Sequence[str] = (),
        prefetch: int = 1,
        payload: str = "fp32",
        reduce_dtype: str = "fp32",
        reduce: str = "last",
        comm: str = "default",
        reserved_sms: int | None = None,
        multicast: bool = False,
    ) -> None:
        self._replicas, self._reshard, self._keep, self._prefetch = replicas, reshard, tuple(keep), prefetch
        self._payload, self._reduce_dtype, self._comm = payload, reduce_dtype, comm
        self._last = reduce == "last"
        self._delayed: list[tuple[Unit, ScatterGradients]] = []
        self._reserved, self._multicast = reserved_sms, multicast
        self.traffic = Traffic()
        self._facts: dict[str, Any] = {"strategy": "fsdp", "replicas": replicas, "reshard": reshard, "world": 1, "blocks": []}
        self._facts |= {"payload": payload, "reduce_dtype": reduce_dtype, "reduce": reduce, "comm": comm, "prefetch": prefetch, "kept": []}
        self._facts["low_weights"] = []
        self._lows: list[LowPart] = []

    def apply(self, module: nn.Module, context: ParallelContext) -> nn.Module:
        """``module`` itself, its parameters sharded in place; in a single process as it is.

        Raises:
            RequestError: the ranks cannot be divided, a pattern names no block, or there is no process group.
            MachineError: the communication backend does not work here.
        """
        self._facts["world"] = context.world
        placement = placement_of(module)
        layout = layout_of(context.world, replicate=self._replicas, expert=placement.degree, asked="strategy 'fsdp'")
        units = list(units_of(module, placement))
        self._check_patterns([unit.name for unit in units if unit.name != ROOT])
        set_environment(context.device, multicast=self._multicast, reserved_sms=self._reserved)
        if context.world == 1:
            return module
        if not dist.is_initialized():
            so = f"the run has {context.world} ranks and no process group"
            raise RequestError("strategy 'fsdp'", so, "Start with torchrun, or call torch.distributed.init_process_group first.")
        meshes = {False: device_mesh(layout, "weights", context.device)}
        if placement.degree > 1:
            meshes[True] = device_mesh(layout, "dense", context.device)["dense_replicate", "dense_shard"]
        carriers = {experts: self._carrier(mesh, context) for experts, mesh in meshes.items()}
        for unit in units:
            self._shard(unit, meshes[unit.experts], carriers[unit.experts], placement)
        if torch.device(context.device).type == "cuda":  # on the CPU collectives themselves block
            watch(units, torch.device(context.device))
        set_prefetch(units, self._prefetch)
        forget_scored(units)
        return module

    def _check_patterns(self, names: Sequence[str]) -> None:
        for pattern in self._keep:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise RequestError(f"strategy 'fsdp' with keep = {pattern!r}", f"no block has such a name; there are {', '.join(names)}", "Name one.")

    def _carrier(self, mesh: DeviceMesh, context: ParallelContext) -> Carrier:
        group = mesh.get_group("dense_shard")
        return carrier_of(self._comm, group, here(context.device, group, context.topology))

    def _shard(self, unit: Unit, mesh: DeviceMesh, carrier: Carrier, placement: Placement) -> None:
        replicas = mesh.size(0)
        kept = any(fnmatchcase(unit.name, pattern) for pattern in self._keep)
        words: dict[str, Any] = {
            "mesh": mesh if replicas > 1 else mesh["dense_shard"],
            "reshard_after_forward": self._reshard and not kept and unit.name != ROOT,  # the root is needed at both ends of the step
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if self._reduce_dtype == "bf16" else None, cast_forward_inputs=False),
            "ignored_params": placement.absent,
        }
        scatter = ScatterGradients(unit.name, self.traffic, replicas, padded_numbers(unit, mesh.size(1), placement))
        lows, size = low_parts(unit.modules, mesh.size(1), mesh.get_local_rank("dense_shard"), placement.absent)
        fully_shard(unit.modules if len(unit.modules) > 1 else unit.modules[0], **words)
        unit.fsdp.set_custom_all_gather(GatherWeights(unit.name, self.traffic, carrier, self._payload_of(unit, lows, size, mesh)))
        unit.fsdp.set_custom_reduce_scatter(scatter)
        if replicas > 1:
            unit.fsdp.set_all_reduce_hook(scatter.replicas_reduced)
        if self._last and replicas > 1 and mesh.size(1) > 1:  # a shard of its own is not scattered, so nobody sees what was added up
            self._delayed.append((unit, scatter))
        if unit.name != ROOT:
            self._facts["blocks"].append(unit.name)
        if kept:
            self._facts["kept"].append(unit.name)

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """``DelaysReduction``: gradients are scattered in each micro-batch, and summed over the replicas in the last.

        Raises:
            PluginError: a block's parameters had gradients in some micro-batches and not in others.
        """
        for unit, scatter in self._delayed:
            scatter.delayed = True
            unit.fsdp.set_requires_all_reduce(last, recurse=False)
        try:
            yield
        finally:
            for unit, scatter in self._delayed:
                scatter.delayed = False
                unit.fsdp.set_requires_all_reduce(True, recurse=False)
        if last:
            for _, scatter in self._delayed:
                scatter.check_reduced()

    def _payload_of(self, unit: Unit, lows: Sequence[LowPart], size: int, mesh: DeviceMesh) -> Payload | None:
        """How a unit's weights travel: those that their modules read in low precision in that format, the others as the option says."""
        others = PAYLOADS[self._payload]
        if not lows:
            return others
        self._lows += lows
        self._facts["low_weights"].append({"block": unit.name, "weights": len(lows), "values": sum(low.parameter.numel() for low in lows)})
        return Lowered(lows, size, others, self._lows, AgreeOnLargest(unit.name, self.traffic, mesh.get_group("dense_shard")))

    def describe(self) -> Mapping[str, Any]:
        return self._facts


def here(device: str, group: dist.ProcessGroup, topology: Topology) -> Here:
    """What communication backends may depend on, for one group."""
    kind, ranks = torch.device(device).type, dist.get_process_group_ranks(group)
    local = topology.tiers[0].size if topology.tiers else dist.get_world_size()
    hosts = {rank // local for rank in ranks}
    peers = kind == "cuda" and all(
        torch.cuda.can_device_access_peer(torch.cuda.current_device(), rank % local) for rank in ranks if rank != dist.get_rank() and len(hosts) == 1
    )
    return Here(device=kind, ranks=len(ranks), local=len(ranks) if len(hosts) == 1 else local, peer_access=peers)


def padded_numbers(unit: Unit, shards: int, placement: Placement) -> int:
    """Numbers in the trained parameters of a unit that are not sharded yet, their rows padded to equal parts."""
    absent = placement.absent
    own = {p for module in unit.modules for p in module.parameters() if p.requires_grad and not isinstance(p, DTensor) and p not in absent}
    return sum(-(-p.shape[0] // shards) * shards * p.shape[1:].numel() for p in own)


def units_of(module: nn.Module, placement: Placement) -> Iterator[Unit]:
    """The units in the order in which they must be sharded: experts before the block that they are in, the root last."""
    left = {f"{held.name}.experts": held.experts for held in placement.ensembles}
    for name, block in blocks(module):
        for inner in [inner for inner in left if inner.startswith(f"{name}.")]:
            yield Unit(name=inner, modules=left.pop(inner), experts=True)
        yield Unit(name=name, modules=[block])
    for inner, experts in left.items():
        yield Unit(name=inner, modules=experts, experts=True)
    yield Unit(name=ROOT, modules=[module])


def blocks(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that are gathered one at a time: the entries of the lists of modules directly under the root that have parameters."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            for index, block in enumerate(child):
                if any(True for _ in block.parameters()):
                    yield f"{name}.{index}", block


def forget_scored(units: Sequence[Unit]) -> None:
    """After a forward pass without gradients no unit stays whole: no backward will drop its weights, and the next pass may be on other weights."""

    def reshard(*_: Any) -> None:
        if not torch.is_grad_enabled():
            for unit in units:
                unit.fsdp.reshard()

    units[-1].modules[0].register_forward_hook(reshard)


def watch(units: Sequence[Unit], device: torch.device) -> None:
    """Record how long computing waits for each unit's weights, and for gradients at the end."""
    for unit in units:
        WeightWaits(unit.name, unit.modules[0], unit.modules[-1], device)
        if unit.name == ROOT:
            GradientWaits(unit.modules[0], device)


def set_prefetch(units: Sequence[Unit], ahead: int) -> None:
    """Gather the next ``ahead`` units while one computes; a block begins before the experts in it.

    Forward only. Backward torch gathers one unit ahead, in the reverse of the order in which forward left them, which is this order. An order of our
    own would be followed again for every output of a block, and gather weights that are no longer needed.
    """
    order: list[Unit] = []
    experts: list[Unit] = []
    for unit in units:
        if unit.experts:
            experts.append(unit)
        elif unit.name != ROOT:
            order += [unit, *experts]
            experts = []
    order += experts  # of ensembles in no block
    for i, unit in enumerate(order if ahead else ()):
        unit.fsdp.set_modules_to_forward_prefetch([following.fsdp for following in order[i + 1 : i + 1 + ahead]])
