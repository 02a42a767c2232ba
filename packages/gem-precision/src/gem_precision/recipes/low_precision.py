"""Recipes that compute large linear layers in FP8 or a microscaling format, and the rest as ``bf16_islands`` does."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

from torch import nn

from gem_core.spec import PrecisionDecision, RequestError
from gem_precision.formats import find_format
from gem_precision.linear import LinearRule, lower, rule_of
from gem_precision.policy import leaves, reads_children
from gem_precision.recipes.bf16_islands import Bf16Islands


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """What a recipe's name stands for: formats by name, and the smallest layer that is worth it."""

    inputs: str
    weights: str
    grads: str
    weight_grad: bool = True
    small: int = 128

    def rule(self) -> LinearRule:
        inputs, weights, grads = (find_format(name) for name in (self.inputs, self.weights, self.grads))
        return LinearRule(inputs=inputs, weights=weights, grads=grads, weight_grad=self.weight_grad)


PRESETS: Mapping[str, Preset] = {
    "fp8_rowwise": Preset(inputs="fp8_e4m3_row", weights="fp8_e4m3_row", grads="fp8_e5m2_row"),
    "fp8_block": Preset(inputs="fp8_e4m3_1x128", weights="fp8_e4m3_128x128", grads="fp8_e4m3_1x128"),
    "mxfp8": Preset(inputs="mxfp8_e4m3", weights="mxfp8_e4m3", grads="mxfp8_e4m3"),
    "mxfp4_mlp": Preset(inputs="mxfp4_e2m1", weights="mxfp4_e2m1", grads="mxfp8_e4m3", weight_grad=False),
    "fp8_naive": Preset(inputs="fp8_e4m3_tensor", weights="fp8_e4m3_tensor", grads="fp8_e4m3_tensor", small=0),
}
"""``fp8_naive`` is what not to do, for comparison: one scale a tensor, no layer spared for its size, no module kept high by name."""


class LowPrecision:
    """One of ``PRESETS``, emulated: the exact numbers of the format on any device, without its speed.

    Args:
        preset: the recipe's name.
        high: patterns of module names that stay as ``bf16_islands`` has them, on top of its islands.
        islands: as in ``bf16_islands``; None for its default names.
        small: linear layers with fewer inputs or outputs than this stay in bfloat16; None for the preset's.
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
        weight_grad: Literal["low", "high"] | None = None,
        stochastic: bool = False,
        hadamard: bool = False,
        cpu: Literal["fp32", "bf16"] = "fp32",
    ) -> None:
        chosen = PRESETS[preset]
        self._preset, self._high = preset, tuple(high)
        self._small = chosen.small if small is None else small
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
        decided = self._rest.prepare(model, device_type)
        return [self._lowered(model, name, module, decision, high) for (name, module), decision in zip(leaves(model), decided, strict=True)]

    def _lowered(self, model: nn.Module, name: str, module: nn.Module, decision: PrecisionDecision, high: Mapping[str, str]) -> PrecisionDecision:
        if type(module) is not nn.Linear:
            return decision
        kept = self._reason_to_stay(model, name, module, high)
        if kept is not None:
            return replace(decision, reason=kept)
        lower(module, self._rule)
        return PrecisionDecision(module=decision.module, format=self._rule.label, reason=f"{self._preset}, emulated; weights are kept in float32")

    def _reason_to_stay(self, model: nn.Module, name: str, module: nn.Linear, high: Mapping[str, str]) -> str | None:
        inside = next((island for island in high if name == island or name.startswith(f"{island}.") or island == ""), None)
        if inside is not None:
            return high[inside]
        parent = model.get_submodule(name.rpartition(".")[0])
        if parent is not module and reads_children(parent):
            return "its weights are handed to a kernel"
        pattern = next((p for p in self._high if fnmatchcase(name, p)), None)
        if pattern is not None:
            return f"named by the pattern {pattern!r} of precision.options.high"
        if min(module.in_features, module.out_features) < self._small:
            return f"a matmul of {module.in_features} x {module.out_features} is too small to gain: under {self._small}"
        return None

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        """That of ``bf16_islands``."""
        return self._rest.forward_context(device_type)

    def compute_dtype(self) -> str:
        """What kernels outside the low-precision layers are asked for."""
        return self._rest.compute_dtype()


fp8_rowwise, fp8_block, mxfp8, mxfp4_mlp, fp8_naive = (partial(LowPrecision, name) for name in PRESETS)
