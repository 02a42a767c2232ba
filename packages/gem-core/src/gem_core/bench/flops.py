"""FLOPs of one training step: those of the model, those that the hardware does, and in which number format.

Model FLOPs are the matmuls of forward and backward on valid elements, exactly by mask: backward is the gradient of the weights and that of the
inputs, the latter only where something learned stands before them. Hardware FLOPs add what backends and strategies do on top: rows padded to the
longest, scores that an attention kernel recomputes in backward (once, the convention of arXiv 2205.14135), blocks that are recomputed.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from gem_core.batch import Batch
from gem_core.ops import baselines
from gem_core.ops.products import Product, own_flops, products
from gem_core.ops.slot import KernelSlot
from gem_core.spec import PrecisionDecision, RequestError
from gem_core.train.efficiency import Peak, peak_of, table_peak

PADDED = ("reference", "padded", "bucketed", "sdpa")
"""Backends that compute every row at the length of the longest, of its bucket for ``bucketed``, and what a mask hides."""
KEEPS_SCORES = ("reference", "padded", "bucketed")
"""Backends whose attention keeps the scores for backward; all others recompute them."""
IN_PARTS = ("padded", "bucketed")
"""Those of them that compute a call again in backward if its scores would take too much memory."""
MODEL = "model"
"""The name of the model itself, as precision decisions have it."""
_MASKS = ("causal", "window", "contextual", "targets")
_LENGTHS = ("lengths", "q_lengths", "k_lengths")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFlops:
    """FLOPs of forward and backward; steps of several batches add up.

    Args:
        model: model FLOPs.
        hardware: with padding and recomputation.
        by_format: model FLOPs by the unit that multiplies (``bf16``, ``fp8``, ...); they add up to ``model``.
    """

    model: int = 0
    hardware: int = 0
    by_format: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: "StepFlops") -> "StepFlops":
        by_format = Counter(self.by_format) + Counter(other.by_format)
        return StepFlops(model=self.model + other.model, hardware=self.hardware + other.hardware, by_format=dict(by_format))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFlops:
    """FLOPs of one product's owner.

    Args:
        name: of the module, or ``MODULE.ATTRIBUTE`` of a slot.
        forward: forward model FLOPs.
        model: forward and backward.
        hardware: with padding and recomputation.
        by_format: ``model`` by unit.
    """

    name: str
    forward: int
    model: int
    hardware: int
    by_format: Mapping[str, int]


def run_flops(run: Any, batch: Batch) -> StepFlops:
    """``step_flops`` of a composed run (``gem_core.train.compose.Run``): its model, precision, bound kernels and recomputed blocks."""
    told = [strategy.describe().get("policies", {}) for _, _, strategy in run.strategies]
    again = [block for policies in told for block, policy in policies.items() if policy == "recompute"]
    return step_flops(run.model, batch, decisions=run.decisions, dtype=run.precision.compute_dtype(), recomputed=again)


def step_flops(
    model: nn.Module, batch: Batch, *, decisions: Sequence[PrecisionDecision] = (), dtype: str = "fp32", recomputed: Collection[str] = ()
) -> StepFlops:
    """FLOPs of one forward and backward pass.

    Args:
        model: the dense part; the backends bound to its slots say what is padded and recomputed.
        batch: on the CPU.
        decisions: of the precision recipe. A format that is emulated counts as what it emulates.
        dtype: what computes where nothing is decided: ``Precision.compute_dtype()``.
        recomputed: names of blocks whose forward runs again in backward.

    Raises:
        RequestError: a decision's format names no known unit, or the model's layers count more than the model.
    """
    found = layer_flops(model, batch, decisions=decisions, dtype=dtype, recomputed=recomputed)
    by_format: Counter[str] = Counter()
    for layer in found:
        by_format.update(layer.by_format)
    return StepFlops(model=sum(x.model for x in found), hardware=sum(x.hardware for x in found), by_format=dict(by_format))


def layer_flops(
    model: nn.Module, batch: Batch, *, decisions: Sequence[PrecisionDecision] = (), dtype: str = "fp32", recomputed: Collection[str] = ()
) -> list[LayerFlops]:
    """What ``step_flops`` adds up, product by product; arguments and errors as there."""
    counting: Any = model
    with products() as found:
        whole = int(counting.flops(batch))
        told = sum(product.forward for product in found)
        if told < whole:  # a model that does not count all of it by layer
            own_flops(model, whole - told)
    if told > whole:
        so = f"its layers count {told:,} and the whole {whole:,}"
        raise RequestError(f"FLOPs of the model {type(model).__name__}", so, "Count each product once, within the model's flops.")
    names, formats = owner_names(model), {d.module: d.format for d in decisions}
    return [_of(product, names.get(id(product.owner), MODEL), formats, dtype, recomputed) for product in found]


def owner_names(model: nn.Module) -> dict[int, str]:
    """Names of modules and slots by ``id``: the module's, and ``MODULE.ATTRIBUTE`` for a slot. The model itself is called ``MODEL``."""
    names = {}
    for name, module in model.named_modules():
        names[id(module)] = name or MODEL
        names |= {id(slot): f"{name or MODEL}.{key}" for key, slot in vars(module).items() if isinstance(slot, KernelSlot)}
    return names


def _of(product: Product, name: str, formats: Mapping[str, str], dtype: str, recomputed: Collection[str]) -> LayerFlops:
    passes = 2 if product.input_gradient else 1  # of backward: the weights, and the inputs
    executed = _executed(product)
    again = executed if any(name.startswith(f"{block}.") for block in recomputed) else 0
    units = _units(_format(product, name, formats, dtype), dtype)
    by_format: Counter[str] = Counter()
    for unit in units[: 1 + passes]:
        by_format[unit] += product.forward
    return LayerFlops(
        name=name,
        forward=product.forward,
        model=(1 + passes) * product.forward,
        hardware=(1 + passes) * executed + _scores_again(product, executed) + again,
        by_format=dict(by_format),
    )


def _executed(product: Product) -> int:
    """Forward FLOPs that the bound backend does."""
    if not isinstance(product.owner, KernelSlot) or product.count is None or product.owner.backend not in PADDED:
        return product.forward
    parts = in_buckets(product.shape) if product.owner.backend == "bucketed" else [product.shape]
    return sum(int(product.count(**padded(part))) for part in parts)


def in_buckets(shape: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The arguments of an op's count for each bucket of rows of alike length."""
    lengths = [shape[key] for key in _LENGTHS if isinstance(shape.get(key), np.ndarray)]
    of_row = baselines.buckets(np.add.reduce(lengths)) if lengths else np.zeros(0)
    by_row = [key for key, value in shape.items() if isinstance(value, np.ndarray)]
    return [{**shape, **{key: shape[key][of_row == bucket] for key in by_row}} for bucket in np.unique(of_row)] or [dict(shape)]


def padded(shape: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an op's count with every row as long as the longest and nothing hidden by a mask; blocks are filled up."""
    full = {key: value for key, value in shape.items() if key not in _MASKS}
    if "contextual" in shape:
        full["causal"] = False  # the count of hstu_attention is causal unless told otherwise
    for key in _LENGTHS:
        if isinstance(shape.get(key), np.ndarray) and shape[key].size:
            longest = int(shape[key].max())
            width = max(min(shape.get("block", 1), longest), 1)
            full[key] = np.full_like(shape[key], -(-longest // width) * width)
    return full


def _scores_again(product: Product, executed: int) -> int:
    """FLOPs of what the attention kernel recomputes in backward: the scores, one of its two products, or the call."""
    if not isinstance(product.owner, KernelSlot) or "heads" not in product.shape:
        return 0
    dim = int(product.shape["dim"])
    v_dim = int(product.shape.get("v_dim") or dim)
    if product.owner.backend in IN_PARTS and executed // (2 * (dim + v_dim)) > baselines.SCORES:
        return executed
    return 0 if product.owner.backend in KEEPS_SCORES else executed * dim // (dim + v_dim)


def _format(product: Product, name: str, formats: Mapping[str, str], dtype: str) -> str:
    """The decided format: of the slot, of its module, else what all layers within share if that is fp32 (an island), else ``dtype``."""
    owner = name.rpartition(".")[0] if isinstance(product.owner, KernelSlot) else name
    decided = formats.get(name) or formats.get(owner)
    if decided is not None and decided != "input":
        return decided
    within = {form for module, form in formats.items() if module.startswith(f"{owner}.") and form != "input"}
    return "fp32" if within == {"fp32"} else dtype


def _units(form: str, dtype: str) -> tuple[str, str, str]:
    """The units of the forward product, of the weights' gradient and of the inputs', by a format's label."""
    names, _, how = form.partition(", ")
    first, _, second = names.partition("/")
    unit, back = _unit(first), _unit(second or first)
    return unit, dtype if how.startswith("weight gradient high") else back, back


def _unit(name: str) -> str:
    for unit in ("fp64", "fp32", "bf16", "fp16", "fp8", "fp6", "fp4"):
        if unit in name:
            return unit
    raise RequestError(f"number format {name!r}", "it names no known unit of a device", "Let a decision's format hold fp32, bf16, fp8, ...")


def peak_seconds(by_format: Mapping[str, int], device: torch.device) -> float:
    """Seconds that the FLOPs take at the device's peaks: the sum of ``F / peak`` over formats, one after the other."""
    return sum(flops / unit_peak(unit, device).flops_per_second for unit, flops in by_format.items())


@cache
def unit_peak(unit: str, device: torch.device) -> Peak:
    """The peak of a unit; measured once in a process where the table has none.

    A format without a known peak on this device counts at that of 16-bit matmuls on a GPU, in which it is emulated there, and of fp32 on a CPU.
    """
    on_cuda = device.type == "cuda"
    known = table_peak(torch.cuda.get_device_name(device), unit, tf32=torch.backends.cuda.matmul.allow_tf32) if on_cuda else None
    plain = unit if unit in ("fp64", "fp32", "bf16", "fp16") else "bf16" if on_cuda else "fp32"
    return known or peak_of(device, plain)
