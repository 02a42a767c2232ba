"""Which modules of a model stay in float32, and why. Reads names, types and shapes only, so a model on the meta device will do."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.loss import _Loss

from gem_core.ops.slot import KernelSlot
from gem_core.spec import PrecisionDecision, RequestError

_TIME = "time features: bfloat16 keeps 8 bits, which loses the hour and the day"
_LAST = "last layers: small differences between logits decide the loss"

DEFAULT_ISLANDS: Mapping[str, str] = {
    "features": "first layers: raw feature values have digits that bfloat16 lacks",
    "head": _LAST,
    "heads": _LAST,
    "*.age": _TIME,
    "*.place": _TIME,
    "*.rotary": _TIME,
    "*.between": _TIME,
    "*.distance": _TIME,
    "*norm": "a norm by its name",
    "*norm[0-9]": "a norm by its name",
}
"""Names of modules, ``*`` for any text, and why they are islands. One that matches nothing does no harm; names that a user gives replace them all."""

_KINDS: tuple[tuple[tuple[type[nn.Module], ...], str], ...] = (
    ((nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.CrossMapLRN2d, _NormBase), "statistics of a norm"),
    ((nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d), "statistics of a softmax"),
    ((_Loss,), "a loss"),
)


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules that pick islands.

    Args:
        islands: patterns of module names; None for ``DEFAULT_ISLANDS``.
        small: linear layers with fewer inputs or outputs than this are islands, 0 for none.
    """

    islands: Sequence[str] | None = None
    small: int = 16

    def check(self, model: nn.Module) -> None:
        """Every pattern that a user gave matches a module.

        Raises:
            RequestError: one does not.
        """
        names = [name for name, _ in model.named_modules()]
        for pattern in self.islands or ():
            if not any(fnmatchcase(name, pattern) for name in names):
                so = "no module has such a name"
                raise RequestError(f"precision.options.islands: {pattern!r}", so, f"Modules are named like {', '.join(_examples(names[1:]))}.")

    def find(self, model: nn.Module) -> dict[str, str]:
        """The outermost islands and their reasons, by module name (the model itself is ``""``)."""
        return dict(self._visit("", model, set()))

    def _visit(self, name: str, module: nn.Module, seen: set[nn.Module]) -> Iterator[tuple[str, str]]:
        if module in seen:
            return
        seen.add(module)
        reason = self._reason(name, module)
        if reason is not None:
            seen.update(module.modules())
            yield name, reason
            return
        for inner, child in module.named_children():
            yield from self._visit(_join(name, inner), child, seen)

    def _reason(self, name: str, module: nn.Module) -> str | None:
        """Why ``module`` is an island, None if it is not. One that reads its children's weights without calling them is one if a child would be."""
        candidates = [(name, module)]
        if reads_children(module):
            candidates += [(_join(name, inner), child) for inner, child in module.named_children()]
        return next((reason for where, part in candidates if (reason := self._own_reason(where, part)) is not None), None)

    def _own_reason(self, name: str, module: nn.Module) -> str | None:
        if self.islands is None:
            named = next((reason for pattern, reason in DEFAULT_ISLANDS.items() if fnmatchcase(name, pattern)), None)
        else:
            named = next((f"named by the pattern {pattern!r}" for pattern in self.islands if fnmatchcase(name, pattern)), None)
        if named is not None and not (norm_of_kernel(module) and self.islands is None):
            return named
        if norm_of_kernel(module):
            return None
        kind = next((reason for types, reason in _KINDS if isinstance(module, types)), None)
        if kind is not None:
            return kind
        if type(module) is nn.Linear and min(module.in_features, module.out_features) < self.small:
            return f"a matmul of {module.in_features} x {module.out_features} is too small to gain: under {self.small}"
        return None


def decisions(model: nn.Module, islands: Mapping[str, str]) -> list[PrecisionDecision]:
    """One decision for each leaf module, given the islands of ``Policy.find``."""
    around = {part: name for name in islands for part in model.get_submodule(name).modules()}
    answer = []
    for name, module in leaves(model):
        island = around.get(module)
        if island is None:
            number_format, reason = _outside(module)
        else:
            number_format, reason = "fp32", islands[island] if island == name else f"inside {label(island)!r}: {islands[island]}"
        answer.append(PrecisionDecision(module=label(name), format=number_format, reason=reason))
    return answer


def island_around(name: str, islands: Mapping[str, str]) -> str | None:
    """The reason of the island that a module lies in, given those of ``Policy.find``."""
    around = next((island for island in islands if island in ("", name) or name.startswith(f"{island}.")), None)
    return None if around is None else islands[around]


def leaves(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules without children, by name (``""`` for a model that is one leaf)."""
    return [(name, module) for name, module in model.named_modules() if not any(module.children())]


def label(name: str) -> str:
    """The name that decisions use for a module."""
    return name or "model"


def _outside(module: nn.Module) -> tuple[str, str]:
    """Format and reason of a leaf module that is in no island."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "fp32", "a look-up gives weights as they are"
    if norm_of_kernel(module):
        return "bf16", "a norm by a kernel: its sum and statistics are float32 in every backend, and rounded once"
    if any(True for _ in module.parameters(recurse=False)):
        return "bf16", "matmuls under autocast; the weights are kept in float32"
    return "input", "has no weights and computes in the format of its input"


def reads_children(module: nn.Module) -> bool:
    """Whether ``module`` hands its children's weights to a kernel: the children's ``forward`` never runs, so only the whole can be an island."""
    slots = (value for value in vars(module).values() if isinstance(value, KernelSlot))
    return isinstance(module, nn.MultiheadAttention) or any(slot.op == "norm_linear" for slot in slots)


def norm_of_kernel(module: nn.Module) -> bool:
    """Whether ``module`` norms by the op ``add_norm``, whose contract keeps sum and statistics in float32: tensors around it need not be."""
    return any(isinstance(value, KernelSlot) and value.op == "add_norm" for value in vars(module).values())


def _join(name: str, inner: str) -> str:
    return f"{name}.{inner}" if name else inner


def _examples(names: Sequence[str]) -> list[str]:
    """A few names, the shortest ones: the model's large parts."""
    return sorted(names, key=lambda name: (name.count("."), names.index(name)))[:6] or ["(the model has no parts)"]
