"""Core's precision recipes: everything in float32, and bfloat16 autocast over float32 weights."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from gem_core.spec import PrecisionDecision


class Fp32:
    """Everything in float32."""

    def prepare(self, model: Any, device_type: str) -> Sequence[PrecisionDecision]:
        """One decision for each leaf module; nothing is changed."""
        return [PrecisionDecision(module=name, format="fp32", reason="the recipe computes in float32") for name, _ in _leaves(model)]

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def compute_dtype(self) -> str:
        return "fp32"


class Bf16:
    """Matmuls and kernels in bfloat16 through autocast; parameters, their optimiser state, embedding tables and the loss stay in float32."""

    def prepare(self, model: Any, device_type: str) -> Sequence[PrecisionDecision]:
        """One decision for each leaf module; nothing is changed."""
        return [_decide(name, module) for name, module in _leaves(model)]

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        return torch.autocast(device_type, dtype=torch.bfloat16)

    def compute_dtype(self) -> str:
        return "bf16"


def _leaves(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules without children, by name."""
    return [(name or "model", module) for name, module in model.named_modules() if not any(module.children())]


def _decide(name: str, module: nn.Module) -> PrecisionDecision:
    if isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm):
        return PrecisionDecision(module=name, format="fp32", reason="statistics of a norm are taken in float32")
    if any(True for _ in module.parameters(recurse=False)):
        return PrecisionDecision(module=name, format="bf16", reason="matmuls under autocast; the weights are kept in float32")
    return PrecisionDecision(module=name, format="input", reason="has no weights and computes in the format of its input")
