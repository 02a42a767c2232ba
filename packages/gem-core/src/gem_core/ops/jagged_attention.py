"""Softmax attention over packed rows of different lengths: self, cross, causal, windowed, with a shared query or an additive bias."""

import torch
from torch import Tensor

from gem_core.ops import masks
from gem_core.ops.attend import Rows, check_attention, per_head, score, softmax_weigh
from gem_core.ops.checks import check_shape, check_tensors
from gem_core.ops.dispatch import make_request, run
from gem_core.ops.padded import own_precision, widen
from gem_core.spec.kernels import KernelRequest


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
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``softmax(scale * q k^T + bias) v`` within each row.

    Queries and keys of a row are aligned at their ends: query ``i`` has position ``i + k_length - q_length``.

    Args:
        q: ``[q_tokens, heads, dim]``; with ``q_offsets=None`` ``[queries, heads, dim]`` shared by every row.
        k: ``[k_tokens, kv_heads, dim]``; ``heads`` is a multiple of ``kv_heads``.
        v: ``[k_tokens, kv_heads, v_dim]``.
        q_offsets: ``[rows + 1]`` int64, or None for a shared query.
        k_offsets: ``[rows + 1]`` int64; the same tensor as ``q_offsets`` makes it self-attention.
        max_q: longest row of queries; ``queries`` for a shared query.
        max_k: longest row of keys.
        scale: factor on the scores, ``dim ** -0.5`` by default.
        causal: a query sees keys up to its own position.
        window: a query sees keys at most this far from its position.
        bias: added to the scores, ``[rows or 1, heads or 1, max_q, max_k]``; minus infinity removes a key. Gets gradients.
        return_lse: also return the logarithm of each softmax denominator.
        backend: name of a backend; None chooses by policy.

    Returns:
        ``[q_tokens, heads, v_dim]`` of q's dtype (``[rows * queries, heads, v_dim]``, row by row, for a shared query), zeros for a query without key.
        With ``return_lse`` also ``[q_tokens, heads]`` float32 (float64 for float64), minus infinity for a query without key, without gradient.

    Raises:
        RequestError: shapes, dtypes or offsets do not fit together, or a row is longer than its maximum
            (seen on the CPU only; on CUDA the rest is cut: it gives zeros and gets zero gradients).
        KernelUnavailable: the named backend does not fit.
    """
    out: Tensor | tuple[Tensor, Tensor] = run(
        check,
        backend,
        q,
        k,
        v,
        q_offsets,
        k_offsets,
        max_q=max_q,
        max_k=max_k,
        scale=scale,
        causal=causal,
        window=window,
        bias=bias,
        return_lse=return_lse,
    )
    return out


def check(
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
) -> KernelRequest:
    """Check a call of ``jagged_attention`` and describe it."""
    features = check_attention("jagged_attention", q, k, v, q_offsets, k_offsets, max_q=max_q, max_k=max_k, window=window)
    if bias is not None:
        check_tensors("jagged_attention", q, {"bias": bias})
        check_shape("jagged_attention", "bias", bias, ((k_offsets.numel() - 1, 1), (q.shape[1], 1), (max_q,), (max_k,)))
    features |= {word for word, on in (("causal", causal), ("bias", bias is not None), ("lse", return_lse)) if on}
    return make_request("jagged_attention", q, features, (q, k, v, bias), head_dim=q.shape[-1])


@own_precision
def reference(
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
) -> Tensor | tuple[Tensor, Tensor]:
    """What ``jagged_attention`` means, on padded rows."""
    rows = Rows(q, k, v, q_offsets, k_offsets, max_q, max_k)
    scores = score(rows.q * (q.shape[-1] ** -0.5 if scale is None else scale), rows.k)
    mask = rows.visible(causal=causal, window=window)[:, None, None]
    if bias is not None:
        groups = (1, 1) if bias.shape[1] == 1 else (k.shape[1], q.shape[1] // k.shape[1])
        grouped = bias.reshape(bias.shape[0], *groups, max_q, max_k)
        scores = scores + widen(grouped).clamp(min=torch.finfo(scores.dtype).min / 4)
        mask = mask & (grouped != -torch.inf)
    out = rows.pack(softmax_weigh(scores, mask, rows.v)).to(q.dtype)
    return (out, _lse(scores.detach(), mask, rows)) if return_lse else out


def _lse(scores: Tensor, mask: Tensor, rows: Rows) -> Tensor:
    lse = torch.where(mask.any(-1), scores.logsumexp(-1), -torch.inf)
    packed = rows.pack(per_head(lse if lse.dtype == torch.float64 else lse.float()))
    return packed if rows.queries is None else packed.masked_fill(rows.queries.is_cut()[:, None], -torch.inf)


def flops(
    *,
    q_lengths: masks.Lengths,
    k_lengths: masks.Lengths,
    heads: int,
    dim: int,
    v_dim: int | None = None,
    causal: bool = False,
    window: int | None = None,
) -> int:
    """Forward model FLOPs: two matmuls on the visible pairs. A shared query has one length for all rows."""
    return 2 * heads * (dim + (v_dim or dim)) * masks.pairs(q_lengths, k_lengths, causal=causal, window=window)
