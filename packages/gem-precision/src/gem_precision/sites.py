"""The places of a model where a recipe can lower a matrix product: linear layers, also those with a matrix for each token, and kernels."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from gem_core.ops.slot import KernelSlot
from gem_core.spec import TOKEN_LINEAR
from gem_precision.plugin import LOW_OPS
from gem_precision.policy import label, reads_children


@dataclass(frozen=True, slots=True)
class Site:
    """A place.

    Args:
        name: as decisions call it: the module's name, or ``MODULE.ATTRIBUTE`` of a slot for attention.
        owner: the name of the module.
        module: the linear layer (``nn.Linear``, or ``gem_core.spec.TOKEN_LINEAR``), or the module that has the slot.
        slot: None for a linear layer.
        handed: a linear layer whose weights its parent gives to a kernel: its own forward never runs.
    """

    name: str
    owner: str
    module: nn.Module
    slot: KernelSlot | None = None
    handed: bool = False

    @property
    def attention(self) -> bool:
        """Whether the products are those of attention."""
        return self.slot is not None and self.slot.op != "norm_linear"

    @property
    def normed(self) -> bool:
        """Whether a norm stands before the matrix, and one kernel computes both."""
        return self.slot is not None and self.slot.op == "norm_linear" and "before" in self.slot.features

    @property
    def matrix(self) -> tuple[int, int] | None:
        """Outputs and inputs of the one matrix that the site multiplies with; None where there are none or several."""
        found = [(p.shape[0], p.shape[1]) for p in self.module.parameters() if p.dim() == 2]
        return found[0] if len(found) == 1 else None

    @property
    def width(self) -> int | None:
        """The narrower side of the matrix, or the width of a head; None where neither is known."""
        if self.slot is not None and self.attention:
            return self.slot.head_dim
        if has_tokens(self.module):
            return min(self.module.get_parameter("weight").shape[1:])
        return min((min(p.shape) for p in self.module.parameters() if p.dim() == 2), default=None)


def has_tokens(module: nn.Module) -> bool:
    """Whether a module is a linear map of its own for each token."""
    return bool(getattr(type(module), TOKEN_LINEAR, False))


def sites(model: nn.Module) -> Iterator[Site]:
    """Every site, each once, in module order; a norm fused with its matmul is called as its module."""
    seen: set[KernelSlot] = set()
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            parent = model.get_submodule(name.rpartition(".")[0])
            yield Site(label(name), name, module, handed=parent is not module and reads_children(parent))
        elif has_tokens(module):
            yield Site(label(name), name, module)
        for key, slot in vars(module).items():
            if isinstance(slot, KernelSlot) and slot.op in LOW_OPS and slot not in seen:
                seen.add(slot)
                yield Site(label(name) if slot.op == "norm_linear" else f"{label(name)}.{key}", name, module, slot)
