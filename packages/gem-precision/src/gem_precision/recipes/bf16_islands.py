"""Recipe ``bf16_islands``: bfloat16 autocast with modules that stay in float32."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from gem_core.spec import PrecisionDecision, RequestError
from gem_precision.islands import is_island, make_island
from gem_precision.policy import Policy, decisions, label, leaves

_ON_CPU = "the run is on a CPU, where bfloat16 matmuls are mostly slower than float32; precision.options.cpu = 'bf16' asks for them"


class Bf16Islands:
    """Matmuls and kernels in bfloat16 through autocast; islands in float32. Parameters, their gradients and optimiser state are float32 throughout.

    Args:
        islands: patterns of module names that stay in float32; None for ``policy.DEFAULT_ISLANDS``. Norms, softmaxes and losses always do.
        small: linear layers with fewer inputs or outputs than this stay in float32, 0 for none.
        cpu: what a run on a CPU computes in.
        tf32: on a GPU multiply matrices of islands in TF32, with ten bits of each factor and float32 sums. Torch has one switch for it, which
            holds for all float32 matmuls of the process until the run is closed.
    """

    def __init__(self, *, islands: Sequence[str] | None = None, small: int = 16, cpu: Literal["fp32", "bf16"] = "fp32", tf32: bool = False) -> None:
        self._policy = Policy(islands, small)
        self._on_cpu = cpu
        self._tf32 = tf32
        self._dtype: str | None = None

    def islands(self, model: nn.Module) -> dict[str, str]:
        """The outermost islands of a model and their reasons, by module name; changes nothing."""
        return self._policy.find(model)

    def prepare(self, model: Any, device_type: str) -> Sequence[PrecisionDecision]:
        """Turn the islands' forwards to float32 in place, and return one decision for each leaf module.

        Raises:
            RequestError: a pattern matches no module, or the model has been prepared before.
        """
        self._policy.check(model)
        self._dtype = self._on_cpu if device_type == "cpu" else "bf16"
        if device_type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = self._tf32
        if self._dtype == "fp32":
            return [PrecisionDecision(module=label(name), format="fp32", reason=_ON_CPU) for name, _ in leaves(model)]
        if any(is_island(module) for module in model.modules()):
            raise RequestError("precision recipe 'bf16_islands'", "a recipe has prepared this model before", "Build the model anew.")
        found = self._policy.find(model)
        for name in found:
            make_island(model.get_submodule(name))
        return decisions(model, found)

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        """Autocast to bfloat16, or nothing where the run computes in float32."""
        return nullcontext() if self.compute_dtype() == "fp32" else torch.autocast(device_type, dtype=torch.bfloat16)

    def compute_dtype(self) -> str:
        """``bf16``, or ``fp32`` where the run computes in float32.

        Raises:
            RequestError: ``prepare`` has not been called, which says where the run computes.
        """
        if self._dtype is None:
            raise RequestError("precision recipe 'bf16_islands'", "it has prepared no model", "Call prepare first.")
        return self._dtype
