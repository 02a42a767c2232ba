"""Pooling by attention: learned seeds attend to each row's keys. Formula: pooling by multi-head attention (PMA), arXiv 1810.00825."""

import torch
from torch import Tensor

from gem_core.ops import masks
from gem_core.ops.checks import check_heads, check_rank, check_rows, check_tensors, refuse
from gem_core.ops.dispatch import make_request, run
from gem_core.ops.jagged_attention import reference as attend
from gem_core.spec.kernels import KernelRequest


def pooled_attention(
    seeds: Tensor, k: Tensor, v: Tensor, k_offsets: Tensor, *, max_k: int, scale: float | None = None, backend: str | None = None
) -> Tensor:
    """``softmax(scale * seeds k^T) v`` over each row's keys.

    Args:
        seeds: ``[seeds, heads, dim]`` shared by all rows, or ``[rows, seeds, heads, dim]``.
        k: ``[k_tokens, kv_heads, dim]``; ``heads`` is a multiple of ``kv_heads``.
        v: ``[k_tokens, kv_heads, v_dim]``.
        k_offsets: ``[rows + 1]`` int64.
        max_k: longest row of keys.
        scale: factor on the scores, ``dim ** -0.5`` by default.
        backend: name of a backend; None chooses by policy.

    Returns:
        ``[rows, seeds, heads, v_dim]`` of the seeds' dtype, zeros for a row without keys.

    Raises:
        RequestError: shapes, dtypes or offsets do not fit together, or a row is longer than ``max_k``
            (seen on the CPU only; on CUDA the rest is cut: it gives zeros and gets zero gradients).
        KernelUnavailable: the named backend does not fit.
    """
    out: Tensor = run(check, backend, seeds, k, v, k_offsets, max_k=max_k, scale=scale)
    return out


def check(seeds: Tensor, k: Tensor, v: Tensor, k_offsets: Tensor, *, max_k: int, scale: float | None = None) -> KernelRequest:
    """Check a call of ``pooled_attention`` and describe it."""
    op = "pooled_attention"
    check_tensors(op, seeds, {"k": k, "v": v})
    per_row = seeds.dim() == 4
    check_rank(op, "seeds", seeds, "rows seeds heads dim" if per_row else "seeds heads dim")
    check_rank(op, "k", k, "keys kv_heads dim")
    check_rank(op, "v", v, "keys kv_heads v_dim")
    check_heads(op, seeds, k, v)
    rows = check_rows(op, "k", k_offsets, k, max_k)
    if per_row and seeds.shape[0] != rows:
        refuse(op, f"seeds have {seeds.shape[0]} rows, k has {rows}", "Give both the same rows.")
    features = {word for word, on in (("per_row_seeds", per_row), ("gqa", seeds.shape[-2] != k.shape[1])) if on}
    return make_request(op, seeds, features, (seeds, k, v), head_dim=seeds.shape[-1])


def reference(seeds: Tensor, k: Tensor, v: Tensor, k_offsets: Tensor, *, max_k: int, scale: float | None = None) -> Tensor:
    """What ``pooled_attention`` means, in terms of ``jagged_attention``."""
    rows, count = k_offsets.numel() - 1, seeds.shape[-3]
    q, q_offsets = seeds, None
    if seeds.dim() == 4:
        q, q_offsets = seeds.flatten(0, 1), torch.arange(rows + 1, device=k_offsets.device) * count
    out = attend(q, k, v, q_offsets, k_offsets, max_q=count, max_k=max_k, scale=scale)
    assert isinstance(out, Tensor)
    return out.view(rows, count, seeds.shape[-2], v.shape[-1])


def flops(*, seeds: int, k_lengths: masks.Lengths, heads: int, dim: int, v_dim: int | None = None) -> int:
    """Forward model FLOPs: two matmuls, every seed with every key of its row."""
    return 2 * heads * (dim + (v_dim or dim)) * masks.pairs(seeds, k_lengths)
