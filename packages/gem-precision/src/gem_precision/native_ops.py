"""Ops whose products run on FP8 tensor cores: a norm before a matmul in ``fp8_block``, the norm and the cast of what it gives in one kernel."""

import torch
from torch import Tensor

from gem_core.spec import RequestError


@torch.compiler.disable  # type: ignore[untyped-decorator]
def norm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: str = "rms",
    where: str = "before",
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    return_sum: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``gem_core.ops.norm_linear`` with the norm before the matmul, in ``fp8_block``.

    Args:
        x: ``[..., in]`` bfloat16; ``in`` a multiple of 128, at most 4,096.
        weight: ``[out, in]``, ``out`` a multiple of 128; cast in each call.
        residual: as x; a pass of its own adds it.

    Returns:
        ``[..., out]`` bfloat16; with ``return_sum`` also the sum of x and the residual.

    Raises:
        RequestError: a norm after the matmul, or widths that do not fit.
    """
    from gem_precision.kernels.cast import cast_weight
    from gem_precision.kernels.layers import norm_linear as fused
    from gem_precision.kernels.norm import WIDEST

    asked = f"norm_linear in fp8_block of {list(x.shape)}"
    if where != "before":
        raise RequestError(asked, "its kernel has the norm before the matmul", "Leave the backend out.")
    if x.shape[-1] > WIDEST:
        raise RequestError(asked, f"rows have {x.shape[-1]} columns", f"Give at most {WIDEST}.")
    ones = torch.ones(x.shape[-1], device=x.device) if gamma is None else gamma
    shift = torch.zeros_like(ones) if beta is None and norm == "layer" else beta
    x = x if residual is None else x + residual
    flat = fused(x.reshape(-1, x.shape[-1]), weight, cast_weight(weight.detach()), ones, shift, bias, eps=eps)
    out = flat.reshape(*x.shape[:-1], weight.shape[0])
    return (out, x) if return_sum else out
