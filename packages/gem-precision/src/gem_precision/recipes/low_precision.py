"""Recipes that compute large linear layers and attention in FP8 or a microscaling format, and the rest as ``bf16_islands`` does."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

from torch import nn

from gem_core.ops.slot import KernelSlot
from gem_core.spec import PrecisionDecision, RequestError
from gem_precision.linear import lower, rule_of
from gem_precision.plugin import LOW_OPS, emulated
from gem_precision.policy import label, leaves, reads_children
from gem_precision.presets import PRESETS
from gem_precision.recipes.bf16_islands import Bf16Islands


class LowPrecision:
    """One of ``PRESETS``, emulated: the exact numbers of the format on any device, without its speed.

    Args:
        preset: the recipe's name.
        high: patterns of module names that stay as ``bf16_islands`` has them, on top of its islands.
        islands: as in ``bf16_islands``; None for its default names.
        small: linear layers with fewer inputs or outputs than this, and attention with narrower heads, stay in bfloat16; None for the preset's.
        attention: whether the products of attention are low; None for the preset's.
        weight_grad: ``low`` or ``high`` weight gradients; None for the preset's.
        stochastic: round gradients stochastically.
        hadamard: turn the operands by a random Hadamard transform first.
        cpu: what the rest computes in on a CPU.
    """

    def __init__(
        self,
        preset: str,
        *,
        high: Sequence[str] = (),
        islands: Sequence[str] | None = None,
        small: int | None = None,
        attention: bool | None = None,
        weight_grad: Literal["low", "high"] | None = None,
        stochastic: bool = False,
        hadamard: bool = False,
        cpu: Literal["fp32", "bf16"] = "fp32",
    ) -> None:
        chosen = PRESETS[preset]
        self._preset, self._high = preset, tuple(high)
        self._small = chosen.small if small is None else small
        self._attention = chosen.attention if attention is None else attention
        rule = chosen.rule()
        low = rule.weight_grad if weight_grad is None else weight_grad == "low"
        self._rule = replace(rule, weight_grad=low, stochastic=stochastic, hadamard=1 if hadamard else None)
        naive: tuple[str, ...] = ()
        self._rest = Bf16Islands(islands=naive if preset == "fp8_naive" and islands is None else islands, small=0, cpu=cpu)

    def prepare(self, model: Any, device_type: str) -> Sequence[PrecisionDecision]:
        """Turn the layers to low precision in place, and return one decision for each leaf module.

        Raises:
            RequestError: a pattern matches no module, or the model has been prepared before.
        """
        if any(rule_of(module) is not None for module in model.modules()):
            raise RequestError(f"precision recipe {self._preset!r}", "a recipe has prepared this model before", "Build the model anew.")
        names = [name for name, _ in model.named_modules()]
        for pattern in self._high:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise RequestError(f"precision.options.high: {pattern!r}", "no module has such a name", "`gem train` prints each module's format.")
        high = self._rest.islands(model)
        decided = {d.module: d for d in self._rest.prepare(model, device_type)}
        for name, module in leaves(model):
            decision = decided[label(name)]
            decided[decision.module] = self._lowered(model, name, module, decision, high)
        decided |= {d.module: d for d in self._slots(model, high)}
        return list(decided.values())

    def _slots(self, model: nn.Module, high: Mapping[str, str]) -> Iterator[PrecisionDecision]:
        """Ask for low-precision kernels; one decision for each slot that multiplies matrices, in the name of the module where that is a matmul."""
        seen: set[KernelSlot] = set()
        for name, module in model.named_modules():
            for key, slot in vars(module).items():
                if not isinstance(slot, KernelSlot) or slot.op not in LOW_OPS or slot in seen:
                    continue
                seen.add(slot)
                where = label(name) if slot.op == "norm_linear" else f"{label(name)}.{key}"
                kept = self._reason_of_slot(name, module, slot, high)
                if kept is None:
                    slot.asked = emulated(self._preset)
                    form, reason = self._rule.inputs.name, f"{self._preset}, by the kernel backend {slot.asked!r}"
                else:
                    form, reason = "fp32" if kept in high.values() else self.compute_dtype(), kept
                yield PrecisionDecision(module=where, format=form, reason=reason)

    def _reason_of_slot(self, name: str, module: nn.Module, slot: KernelSlot, high: Mapping[str, str]) -> str | None:
        if slot.op != "norm_linear" and not self._attention:
            return f"{self._preset} leaves attention as it is" if not PRESETS[self._preset].attention else "precision.options.attention is off"
        matrices = [min(p.shape) for p in module.parameters() if p.dim() == 2]
        width, what = (min(matrices), "a matrix") if slot.op == "norm_linear" and matrices else (slot.head_dim, "heads")
        return self._kept(name, high) or (f"{what} {width} wide: under {self._small}" if width is not None and width < self._small else None)

    def _lowered(self, model: nn.Module, name: str, module: nn.Module, decision: PrecisionDecision, high: Mapping[str, str]) -> PrecisionDecision:
        if type(module) is not nn.Linear:
            return decision
        kept = self._reason_to_stay(model, name, module, high)
        if kept is not None:
            return replace(decision, reason=kept)
        lower(module, self._rule)
        return PrecisionDecision(module=decision.module, format=self._rule.label, reason=f"{self._preset}, emulated; weights are kept in float32")

    def _reason_to_stay(self, model: nn.Module, name: str, module: nn.Linear, high: Mapping[str, str]) -> str | None:
        parent = model.get_submodule(name.rpartition(".")[0])
        if parent is not module and reads_children(parent):
            return "its weights are handed to a kernel"
        kept = self._kept(name, high)
        if kept is None and min(module.in_features, module.out_features) < self._small:
            return f"a matmul of {module.in_features} x {module.out_features} is too small to gain: under {self._small}"
        return kept

    def _kept(self, name: str, high: Mapping[str, str]) -> str | None:
        """Why a name stays high: an island around it, or a pattern of the user."""
        inside = next((island for island in high if name == island or name.startswith(f"{island}.") or island == ""), None)
        if inside is not None:
            return high[inside]
        pattern = next((p for p in self._high if fnmatchcase(name, p)), None)
        return None if pattern is None else f"named by the pattern {pattern!r} of precision.options.high"

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        """That of ``bf16_islands``."""
        return self._rest.forward_context(device_type)

    def compute_dtype(self) -> str:
        """What kernels outside the low-precision layers are asked for."""
        return self._rest.compute_dtype()


fp8_rowwise, fp8_block, mxfp8, mxfp4_mlp, fp8_naive = (partial(LowPrecision, name) for name in PRESETS)
