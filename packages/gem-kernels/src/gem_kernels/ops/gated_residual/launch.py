"""The ``triton`` backend of ``gated_residual``. The first call imports triton."""

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gem_core.ops.gated_residual import flops
from gem_kernels.ops import host
from gem_kernels.ops.direct import differentiable, direct

BLOCK = 1024
"""Elements of a tile: 16 bytes a thread of four warps for 16-bit values."""


def gated_residual(x: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
    """``gate * x + residual``; shapes and meaning are those of ``gem_core.ops.gated_residual``.

    Raises:
        KernelUnavailable: dtype or device that this backend does not take.
        MachineError: triton is missing, or the tensors lie on the CPU and the interpreter is off.
    """
    out: Tensor = _op(x, gate, residual)
    return out


@cache
def _kernels() -> Any:
    return import_module("gem_kernels.ops.gated_residual.triton")


def _run(kernel: Any, like: Tensor, **tensors: Any) -> None:
    if like.numel():
        host.launch(kernel, like, -(-like.numel() // BLOCK), count=like.numel(), BLOCK=BLOCK, num_warps=4, **tensors)


@torch.library.custom_op("gem_kernels::gated_residual", mutates_args=())
def _forward(x: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
    host.check_call("gated_residual", x, (gate, residual))
    out = x.new_empty(x.shape)
    _run(_kernels().forward_kernel, out, x=x.contiguous(), gate=gate.contiguous(), residual=residual.contiguous(), out=out)
    return out


@torch.library.custom_op("gem_kernels::gated_residual_grad", mutates_args=())
def _grad(dy: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the gate."""
    dx, dgate = x.new_empty(x.shape), x.new_empty(x.shape)
    _run(_kernels().backward_kernel, dx, x=x.contiguous(), gate=gate.contiguous(), dy=dy.contiguous(), dx=dx, dgate=dgate)
    return dx, dgate


@_forward.register_fake
def _(x: Tensor, *rest: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@_grad.register_fake
def _(dy: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
    return (*direct(_grad, dy, *ctx.saved_tensors), dy)


_op = differentiable(_forward, _backward, _save)


@register_flop_formula([torch.ops.gem_kernels.gated_residual, torch.ops.gem_kernels.gated_residual_grad], get_raw=True)
def _flops(*args: Any, **kwargs: Any) -> int:
    return flops()
