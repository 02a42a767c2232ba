"""The ``varlen`` backend of ``jagged_attention``: FlashAttention 2 as torch brings it, ``torch.nn.attention.varlen``; 16-bit dtypes on CUDA."""

from functools import cache
from inspect import signature
from typing import Any

from torch import Tensor

from gem_kernels.ops.packed import attend


def jagged_attention(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention within rows; shapes and meaning are those of ``gem_core.ops.jagged_attention``, without a bias.

    Raises:
        KernelUnavailable: there is a bias, or a head is too wide.
    """
    return attend(q, k, v, q_offsets, k_offsets, function=_function, backend="varlen", **options)


@cache
def _grouped() -> dict[str, Any]:
    """What torch's function wants to be told where query heads share key heads; before 2.12 it takes them without a word."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


def _function(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor,
    k_starts: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    causal: bool,
    window: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    grouped: dict[str, Any] = _grouped() if q.shape[1] != k.shape[1] else {}
    found = varlen_attn(
        q, k, v, q_starts, k_starts, max_q, max_k, return_aux=AuxRequest(lse=True), scale=scale, window_size=window, **grouped
    )  # fmt: skip
    return found[0], found[1]
