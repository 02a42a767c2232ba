"""Expert parallelism: ranks share out the experts of each interaction ensemble, and every expert sees the joined rows of the group.

There is no router. A rank sends its tokens to the other ranks of its expert group, computes its own experts on the rows of all of them, and gets back
what the experts made of its rows. Against sharding the same weights over all ranks, the groups that gather weights are ``degree`` times smaller and
each gathers ``degree`` times less; the price is an all-gather and a reduce-scatter of activations, over the links of one host.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from gem_core.spec import ParallelContext, RequestError
from gem_parallel.comm.collectives import Collectives, Traffic
from gem_parallel.comm.ledger import LEDGER
from gem_parallel.dense.exchange import Exchange, Rows
from gem_parallel.mesh import Layout, check_degree, device_mesh, layout_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """One ensemble: the experts that this rank computes, and the others, whose weights are elsewhere."""

    name: str
    experts: list[nn.Module]
    absent: list[nn.Module]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """What ``experts`` did to a module, for the strategy that spreads the weights."""

    degree: int = 1
    ensembles: list[Held] = field(default_factory=list)

    @property
    def absent(self) -> set[nn.Parameter]:
        """The parameters that other ranks hold."""
        return {parameter for held in self.ensembles for expert in held.absent for parameter in expert.parameters()}


def placement_of(module: nn.Module) -> Placement:
    """The placement that ``experts`` left on a module."""
    return getattr(module, "expert_placement", Placement())


class ExpertParallel:
    """Strategy ``experts``: neighbouring ranks share out the experts of every ensemble; ``fsdp`` or ``ddp`` then spreads what each of them holds.

    A module offers an ensemble by the method ``share_out(held, exchange)`` and a list ``experts``. Gradients of a rank's experts are divided by
    ``degree`` on their way, so that their mean over the ranks that hold them is the mean over all ranks, as for every other weight.

    An expert of another rank keeps its parameters' names and shapes here, as a DTensor on a mesh without this rank: optimisers, averages and
    checkpoints see the same parameters on every rank, and nothing of them is stored.

    Args:
        degree: ranks that share out an ensemble; the number of ranks and that of the experts are multiples of it.
    """

    recorder = LEDGER

    def __init__(self, *, degree: int) -> None:
        self._degree = degree
        self.traffic = Traffic()
        self._facts: dict[str, Any] = {"strategy": "experts", "degree": degree, "ensembles": []}

    def apply(self, module: nn.Module, context: ParallelContext) -> nn.Module:
        """``module`` itself, still on the meta device, with the experts of other ranks emptied.

        Raises:
            RequestError: ranks or experts cannot be divided, a group would cross hosts, or the model has no ensemble.
        """
        asked = f"strategy 'experts' with degree = {self._degree}"
        layout = layout_of(context.world, expert=self._degree, asked="strategy 'experts'", topology=context.topology)
        found = list(ensembles(module))
        if not found:
            raise RequestError(asked, "the model has no ensemble of experts", "Use a model with interaction experts, such as gem, or leave it out.")
        for name, ensemble in found:
            check_degree(f"{asked} on {name}", self._degree, len(ensemble.experts), of=f"its {len(ensemble.experts)} experts")
        if self._degree > 1:
            self._share_out(module, found, layout, context)
        return module

    def _share_out(self, module: nn.Module, found: Sequence[tuple[str, Any]], layout: Layout, context: ParallelContext) -> None:
        mesh = device_mesh(layout, "dense", context.device)["dense_expert"]
        group = Collectives(mesh.get_group(), self.traffic)
        rows, placement = Rows(group), Placement(degree=self._degree)
        module.register_forward_pre_hook(lambda *_: rows.forget())
        for name, ensemble in found:
            count = len(ensemble.experts) // self._degree
            held = range(group.rank * count, (group.rank + 1) * count)
            elsewhere = {index: expert for index, expert in enumerate(ensemble.experts) if index not in held}
            for index, expert in elsewhere.items():
                empty_out(expert, context.rank - group.rank + index // count, torch.device(context.device).type)
            absent = list(elsewhere.values())
            ensemble.share_out(held, Exchange(group, rows, absent))
            placement.ensembles.append(Held(name=name, experts=[ensemble.experts[i] for i in held], absent=absent))
            self._facts["ensembles"].append({"name": name, "experts": [held.start, held.stop - 1]})
        module.expert_placement = placement  # type: ignore[assignment]

    def describe(self) -> Mapping[str, Any]:
        return self._facts


def ensembles(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules that can share out their experts, by name."""
    return ((name, child) for name, child in module.named_modules() if hasattr(child, "share_out"))


def empty_out(expert: nn.Module, owner: int, kind: str) -> None:
    """Put the parameters of an expert on ``owner`` alone; what remains here has their shapes and no elements."""
    mesh = DeviceMesh(kind, [owner], _init_backend=False)
    for module in expert.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            nothing = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            there = DTensor.from_local(nothing, mesh, [Replicate()], run_check=False, shape=parameter.shape, stride=parameter.stride())
            setattr(module, name, nn.Parameter(there, requires_grad=parameter.requires_grad))
