"""Linear layers whose three matrix products read low-precision operands, emulated exactly on any device.

Operands are rounded to the format along the axis that each product contracts, and multiplied in a format that holds every rounded value: an element
with a power-of-two scale has at most four significant bits, which bfloat16 and float32 keep. The result differs from that of hardware with the format
in the order of float32 sums alone. Emulation serves quality; it is slower than bfloat16.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gem_core.spec import LOW_WEIGHTS
from gem_precision.formats import Format, Quantized, quantize
from gem_precision.hadamard import turned
from gem_precision.weights import HeldWeight

Watch = Callable[[str, Tensor, Quantized], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearRule:
    """How a linear layer's products are computed.

    Args:
        inputs: format of the activations, in the forward product and in the weight gradient.
        weights: format of the weights, in the forward product and in the input gradient.
        grads: format of the output gradient, in both backward products.
        weight_grad: whether the weight gradient is low; otherwise it is computed from the operands as they are.
        stochastic: round gradients stochastically, without bias.
        hadamard: seed of a random Hadamard transform of both operands along the contraction axis, None for none. Axes that are no multiple of its
            width are left as they are.
    """

    inputs: Format
    weights: Format
    grads: Format
    weight_grad: bool = True
    stochastic: bool = False
    hadamard: int | None = None

    @property
    def label(self) -> str:
        """Such as ``mxfp8_e4m3``, or ``mxfp8_e4m3/mxfp8_e5m2`` where gradients differ, with ``, weight gradient high``."""
        names = self.inputs.name if self.grads == self.inputs else f"{self.inputs.name}/{self.grads.name}"
        return names if self.weight_grad else f"{names}, weight gradient high"


class LowForward:
    """The forward of a layer under a rule. An attribute of the module: class, parameters and state dict stay as they are.

    Args:
        module: the layer.
        rule: its rule.
        multiply: the backend that computes it, as ``gem_precision.backends`` says; None for the emulation.
        watch: in training, told each operand before and after rounding: ``(role, original, quantized)`` with role ``inputs``, ``weights`` or
            ``grads``.
    """

    def __init__(self, module: nn.Module, rule: LinearRule, multiply: Callable[..., Tensor] | None = None) -> None:
        self.module, self.rule = cast(nn.Linear, module), rule  # of whatever class, it has a weight and a bias
        self.multiply = multiply or emulated_linear
        self.held = HeldWeight(rule.weights, rule.hadamard, tuple(self.module.weight.shape))
        self.watch: Watch | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x: Tensor) -> Tensor:
        flat, watch = x.reshape(-1, x.shape[-1]), self.watch if self.module.training else None
        self.held.begin()
        with torch.autocast(x.device.type, enabled=False):
            out = self.multiply(flat, self.module.weight, self.rule, self.held, watch, self.module.bias)
        return out.reshape(*x.shape[:-1], out.shape[-1]).to(_asked_dtype(x))


def emulated_linear(x: Tensor, weight: Tensor, rule: LinearRule, held: HeldWeight, watch: Watch | None = None, bias: Tensor | None = None) -> Tensor:
    """``x weight^T + bias`` under a rule, by exact emulation: ``[..., rows, in]``, ``[..., out, in]``, ``[out]`` to ``[..., rows, out]`` float32."""
    out: Tensor = _Linear.apply(x, weight, rule, held, watch)  # type: ignore[no-untyped-call]
    return out if bias is None else out + bias


def low_linear(x: Tensor, weight: Tensor, rule: LinearRule, held: HeldWeight | None = None) -> Tensor:
    """``x weight^T`` under a rule, where no layer of its own computes it: ``[..., in]`` and ``[out, in]`` to ``[..., out]`` float32.

    Args:
        held: what holds the weight between calls, where it is a parameter and no copy of one; None holds nothing.
    """
    if held is None or not isinstance(weight, nn.Parameter):
        held = HeldWeight(rule.weights, rule.hadamard)
    held.begin()
    flat = emulated_linear(x.reshape(-1, x.shape[-1]), weight, rule, held)
    return flat.reshape(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    """``x w^T`` of ``[..., n, in]`` and ``[..., out, in]``, float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rule: LinearRule, held: HeldWeight, watch: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rule, ctx.held, ctx.watch = rule, held, watch
        left = _low("inputs", x, rule.inputs, rule, watch)
        if watch is not None and not held.travelled:
            watch("weights", turned(weight, rule.hadamard), held.rounded(weight, transposed=False))
        return _product(left, held.operand(weight, transposed=False))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        rule: LinearRule = ctx.rule
        dx = dw = None
        if ctx.needs_input_grad[0]:
            right = ctx.held.operand(weight, transposed=True)
            dx = _product(_low("grads", grad, rule.grads, rule, ctx.watch), right).to(x.dtype)
        if ctx.needs_input_grad[1] and not rule.weight_grad:
            dw = (grad.float().mT @ x.float()).to(weight.dtype)
        elif ctx.needs_input_grad[1]:
            dw = _product(_low("grads", grad.mT, rule.grads, rule, None), _low("inputs", x.mT, rule.inputs, rule, None)).to(weight.dtype)
        return dx, dw, None, None, None


def _low(role: str, x: Tensor, form: Format, rule: LinearRule, watch: Watch | None) -> Tensor:
    """An operand as the product reads it, blocks and transform along its last axis."""
    x = turned(x, rule.hadamard)
    quantized = quantize(x, form, rounding="stochastic" if role == "grads" and rule.stochastic else "nearest")
    if watch is not None:
        watch(role, x, quantized)
    return quantized.dequantize()


def _product(left: Tensor, right: Tensor) -> Tensor:
    """``left right^T``, summed in float32. Where torch may use tf32, its ten bits hold any element, but not an element times a float scale."""
    return left @ right.mT


def _asked_dtype(x: Tensor) -> torch.dtype:
    """What autocast would give a linear layer here, or the input's own dtype."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def rule_of(module: nn.Module) -> LinearRule | None:
    """The rule that ``lower`` gave a module, None for none."""
    forward = vars(module).get("forward")
    return forward.rule if isinstance(forward, LowForward) else None


def lower(module: nn.Module, rule: LinearRule, multiply: Callable[..., Tensor] | None = None) -> None:
    """Change a layer in place so that it computes under ``rule``, by a backend or the emulation. Touches no tensor.

    Its weight may travel between ranks in its format where that is what the backend reads: another than the emulation casts what it finds, which
    leaves rounded numbers as they are, but has no place for the numbers of the input gradient if those are others.
    """
    vars(module)["forward"] = forward = LowForward(module, rule, multiply)
    if isinstance(module, nn.Linear) and (forward.multiply is emulated_linear or forward.held.one_for_both):
        vars(module)[LOW_WEIGHTS] = {"weight": forward.held}
