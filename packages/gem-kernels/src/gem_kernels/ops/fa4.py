"""The ``fa4`` backend of ``jagged_attention``: FlashAttention 4 in CuTe, the distribution ``flash-attn-4``; 16-bit dtypes on CUDA."""

from typing import Any

from torch import Tensor

from gem_core.spec import MachineError
from gem_kernels.ops.packed import attend


def jagged_attention(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention within rows; shapes and meaning are those of ``gem_core.ops.jagged_attention``, without a bias.

    Raises:
        KernelUnavailable: there is a bias, or a head is too wide.
        MachineError: flash-attn-4 is missing or does not load.
    """
    return attend(q, k, v, q_offsets, k_offsets, function=_function, backend="fa4", **options)


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
    try:
        from flash_attn.cute import flash_attn_varlen_func  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except Exception as error:  # its compiler's library may fail to load in ways of its own
        raise MachineError(
            "jagged_attention with backend 'fa4'", f"flash-attn-4 does not load: {error}", "python3 -m pip install --pre 'gem-kernels[fa4]'"
        ) from error
    local = window[0] >= 0
    found = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=q_starts, cu_seqlens_k=k_starts, max_seqlen_q=max_q, max_seqlen_k=max_k, softmax_scale=scale,
        causal=causal and not local, window_size=window if local else (None, None), return_lse=True,
    )  # fmt: skip
    return found[0], found[1]
