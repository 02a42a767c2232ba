"""What the attention ops share: the checks of their common arguments, and queries, keys and values as padded rows."""

import torch
from torch import Tensor

from gem_core.ops import masks
from gem_core.ops.checks import check_heads, check_rank, check_rows, check_tensors, check_window, refuse
from gem_core.ops.padded import Padding, widen


def check_attention(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor | None,
    *,
    max_q: int,
    max_k: int,
    window: int | None = None,
) -> set[str]:
    """Check queries (jagged or shared) against keys (jagged or dense); return the feature words they use."""
    check_tensors(op, q, {"k": k, "v": v})
    check_rank(op, "q", q, "tokens heads dim")
    shape = "keys kv_heads dim" if k_offsets is not None else "rows keys kv_heads dim"
    check_rank(op, "k", k, shape)
    check_rank(op, "v", v, shape)
    check_heads(op, q, k, v)
    check_window(op, window)
    if k_offsets is not None:
        rows = check_rows(op, "k", k_offsets, k, max_k)
    elif max_k != k.shape[1]:
        refuse(op, f"max_k is {max_k}, dense keys have {k.shape[1]}", "Give the number of keys.")
    else:
        rows = k.shape[0]
    if q_offsets is None and max_q != q.shape[0]:
        refuse(op, f"max_q is {max_q}, a shared query has {q.shape[0]} tokens", "Give the number of queries, or offsets of q.")
    if q_offsets is not None and check_rows(op, "q", q_offsets, q, max_q) != rows:
        refuse(op, f"q has {q_offsets.numel() - 1} rows, k has {rows}", "Give both the same rows.")
    used = {
        "broadcast_q": q_offsets is None,
        "dense_kv": k_offsets is None,
        "cross": q_offsets is not None and k_offsets is not None and q_offsets is not k_offsets,
        "window": window is not None,
        "gqa": q.shape[1] != k.shape[-2],
    }
    return {word for word, on in used.items() if on}


class Rows:
    """Queries ``q [rows, max_q, heads, dim]``, keys ``k [rows, max_k, kv_heads, dim]`` and values ``v``, zero where padded, at least float32."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor | None, max_q: int, max_k: int) -> None:
        self.max_q, self.max_k = max_q, max_k
        if k_offsets is None:
            self.k, self.v, rows = widen(k), widen(v), k.shape[0]
            self.k_lengths = torch.full((rows,), max_k, dtype=torch.int64, device=k.device)
        else:
            keys = Padding(k_offsets, k.shape[0], max_k)
            self.k, self.v, self.k_lengths, rows = keys.pad(widen(k)), keys.pad(widen(v)), keys.lengths, keys.rows
        self.queries: Padding | None = None
        self.q_lengths: Tensor | int = max_q
        if q_offsets is None:
            self.q = widen(q).expand(rows, *q.shape)
            return
        same = q_offsets is k_offsets and max_q == max_k
        self.queries = keys if same else Padding(q_offsets, q.shape[0], max_q)
        self.q, self.q_lengths = self.queries.pad(widen(q)), self.queries.lengths

    def visible(self, *, causal: bool = False, window: int | None = None) -> Tensor:
        """Mask ``[rows, max_q or 1, max_k]`` of the keys that each query sees."""
        return masks.visible(self.q_lengths, self.k_lengths, self.max_q, self.max_k, causal=causal, window=window)

    def pack(self, x: Tensor) -> Tensor:
        """``[rows, max_q, ...]`` to ``[q_tokens, ...]``, or ``[rows * queries, ...]`` for a shared query."""
        return x.flatten(0, 1) if self.queries is None else self.queries.unpad(x)


def score(q: Tensor, k: Tensor) -> Tensor:
    """``q k^T``: ``[rows, max_q, heads, dim]`` and ``[rows, max_k, kv_heads, dim]`` to ``[rows, kv_heads, group, max_q, max_k]``.

    Query head ``h`` reads key head ``h // group``.
    """
    grouped = q.reshape(*q.shape[:2], k.shape[2], q.shape[2] // k.shape[2], q.shape[3])
    return torch.einsum("rikgd,rjkd->rkgij", grouped, k)


def weigh(p: Tensor, v: Tensor) -> Tensor:
    """``p v``: ``[rows, kv_heads, group, max_q, max_k]`` and ``[rows, max_k, kv_heads, v_dim]`` to ``[rows, max_q, heads, v_dim]``."""
    return torch.einsum("rkgij,rjkd->rikgd", p, v).flatten(2, 3)


def softmax_weigh(scores: Tensor, mask: Tensor, v: Tensor) -> Tensor:
    """``softmax(scores) v`` over the keys of ``mask``; a query without any gets zeros and passes zero gradients.

    Hidden scores get a large finite number off, in place: no NaN arises in either direction, and the gradient passes the addition without a copy.

    Args:
        scores: ``[rows, kv_heads, group, max_q, max_k]``, overwritten.
        mask: bool, of that shape or 1 where it is the same for all queries, or for all heads.
        v: ``[rows, max_k, kv_heads, v_dim]``.

    Returns:
        ``[rows, max_q, heads, v_dim]``.
    """
    hidden = torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device).masked_fill_(~mask, torch.finfo(scores.dtype).min / 2)
    weights = scores.add_(hidden).softmax(-1)
    return torch.where(per_head(mask.any(-1))[..., None], weigh(weights, v), 0.0)


def per_head(x: Tensor) -> Tensor:
    """``[rows, kv_heads, group, max_q]`` to ``[rows, max_q, heads]``."""
    return x.permute(0, 3, 1, 2).flatten(2, 3)
