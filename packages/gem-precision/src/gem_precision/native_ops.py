"""Ops on FP8 tensor cores: a norm before a matmul in ``fp8_block`` or ``fp8_square``. One kernel adds a residual, norms and casts."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gem_core.spec import RequestError
from gem_precision.backends import Device, LinearShape
from gem_precision.native import why_not as linear_why_not

if TYPE_CHECKING:
    from gem_precision.kernels.norm import Norm

WIDEST = 4096
"""Columns of a row that the kernel of the norm's gradient holds."""


def why_not(device: Device, shape: LinearShape) -> list[str]:
    """Why a norm and the matmul behind it cannot run as ``fp8_block_native`` or ``fp8_square_native``; none if they can."""
    return [*linear_why_not(device, shape), *([f"{shape.inputs} inputs are more than {WIDEST}"] if shape.inputs > WIDEST else [])]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def norm_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    """``gem_core.ops.norm_linear`` with the norm before the matmul, in ``fp8_block``.

    Args:
        x: ``[..., in]`` bfloat16; ``in`` a multiple of 128, at most 4,096.
        weight: ``[out, in]``, ``out`` a multiple of 128; cast in each call.
        bias: ``[out]``.
        options: the others of the op.

    Returns:
        ``[..., out]`` bfloat16; with ``return_sum`` also the sum of x and the residual, in x's dtype, which the norm reads with or without it.

    Raises:
        RequestError: a norm after the matmul, or widths that do not fit.
    """
    return _norm_linear(x, weight, bias, square=False, **options)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def square_norm_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    """As ``norm_linear``, in ``fp8_square``."""
    return _norm_linear(x, weight, bias, square=True, **options)


def _norm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    square: bool,
    norm: "Norm" = "rms",
    where: str = "before",
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    return_sum: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    from gem_precision.kernels.cast import cast_weight
    from gem_precision.kernels.layers import norm_linear as fused

    asked = f"norm_linear in fp8_{'square' if square else 'block'} of {list(x.shape)}"
    if where != "before":
        raise RequestError(asked, "its kernel has the norm before the matmul", "Leave the backend out.")
    if x.shape[-1] > WIDEST:
        raise RequestError(asked, f"rows have {x.shape[-1]} columns", f"Give at most {WIDEST}.")
    if beta is not None and gamma is None:
        gamma = torch.ones_like(beta)
    flat, branch = x.reshape(-1, x.shape[-1]), None if residual is None else residual.reshape(-1, x.shape[-1])
    cast = cast_weight(weight.detach())
    out, total = fused(flat, weight, cast, gamma, beta, bias, norm=norm, branch=branch, square=square, eps=eps)
    out = out.reshape(*x.shape[:-1], weight.shape[0])
    return (out, total.reshape(x.shape)) if return_sum else out
