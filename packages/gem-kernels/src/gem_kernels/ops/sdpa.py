"""The ``sdpa`` backend of ``jagged_attention`` and ``pooled_attention``: padded rows through torch's scaled_dot_product_attention.

It serves models on a CPU, where torch's fused kernel needs neither the scores nor their gradient in memory, and GPUs without a kernel of ours.
Padding costs memory and time in proportion to ``rows * longest row``; the mask of a causal or windowed call also to ``max_q * max_k``.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_core.ops import masks
from gem_core.ops.padded import Padding, own_precision
from gem_core.spec import KernelUnavailable


@own_precision
def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    *,
    max_q: int,
    max_k: int,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    bias: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor:
    """Softmax attention within rows; shapes and meaning are those of ``gem_core.ops.jagged_attention``.

    Raises:
        KernelUnavailable: ``return_lse``, which torch's function does not give.
    """
    if return_lse:
        raise KernelUnavailable("jagged_attention with backend 'sdpa'", "it does not return the log-sum-exp", "Use backend='reference'.")
    keys = Padding(k_offsets, k.shape[0], max_k)
    queries = None
    if q_offsets is not None:
        queries = keys if q_offsets is k_offsets and max_q == max_k else Padding(q_offsets, q.shape[0], max_q)
    padded_q = q.expand(keys.rows, *q.shape) if queries is None else queries.pad(q)
    mask = masks.visible(max_q if queries is None else queries.lengths, keys.lengths, max_q, max_k, causal=causal, window=window)
    out = _attend(padded_q, keys.pad(k), keys.pad(v), mask[:, None], bias, scale)
    return out.flatten(0, 1) if queries is None else queries.unpad(out)


@own_precision
def pooled_attention(seeds: Tensor, k: Tensor, v: Tensor, k_offsets: Tensor, *, max_k: int, scale: float | None = None) -> Tensor:
    """Seeds attend to each row's keys; shapes and meaning are those of ``gem_core.ops.pooled_attention``."""
    keys = Padding(k_offsets, k.shape[0], max_k)
    q = seeds if seeds.dim() == 4 else seeds.expand(keys.rows, *seeds.shape)
    mask = masks.visible(seeds.shape[-3], keys.lengths, seeds.shape[-3], max_k)
    return _attend(q, keys.pad(k), keys.pad(v), mask[:, None], None, scale)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None, scale: float | None) -> Tensor:
    """Padded attention.

    Args:
        q: ``[rows, max_q, heads, dim]``.
        k: ``[rows, max_k, kv_heads, dim]``.
        v: ``[rows, max_k, kv_heads, v_dim]``.
        mask: ``[rows, 1, max_q or 1, max_k]``, True where a query sees a key.
        bias: added to the scores, ``[rows or 1, heads or 1, max_q, max_k]``; minus infinity removes a key.
        scale: factor on the scores, None for ``dim ** -0.5``.

    Returns:
        ``[rows, max_q, heads, v_dim]``, zeros for a query without a key.
    """
    if bias is not None:
        mask = mask & (bias != -torch.inf)
    # A query without any key would divide zero by zero: it sees them all and its output, with its gradients, is set to zero afterwards.
    blind = ~mask.any(-1, keepdim=True)
    allowed = mask | blind
    weights = allowed if bias is None else torch.where(mask, bias, torch.where(blind, 0.0, -torch.inf).to(bias.dtype))
    if q.shape[-1] != v.shape[-1]:
        q = q.contiguous()  # cuDNN lays the output out like q, which it cannot where q is shared and v has another width
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=weights, scale=scale, enable_gqa=q.shape[2] != k.shape[2]
    )
    return out.masked_fill(blind, 0.0).transpose(1, 2)
