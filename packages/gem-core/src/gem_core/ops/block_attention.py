"""Softmax attention inside the diagonal blocks of each row, optionally with norms of queries and keys and rotary position embedding.

Norms of queries and keys (QK-norm) are RMSNorms over the head size with a learned gain, as in Qwen3 and Gemma 3.
Sources: block attention of https://pytorch.org/blog/tlx-block-attention-a-warp-specialized-blackwell-kernel-for-fixed-block-sparse-self-attention/ ;
rotary embedding, arXiv 2104.09864; norms of queries and keys, arXiv 2010.04245 and, by RMSNorm, arXiv 2505.09388.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_core.ops import masks
from gem_core.ops.attend import score, softmax_weigh
from gem_core.ops.checks import check_heads, check_rank, check_rows, check_shape, check_tensors, refuse
from gem_core.ops.dispatch import make_request, run
from gem_core.ops.padded import Padding, own_precision, widen
from gem_core.spec.kernels import KernelRequest


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    max_length: int,
    block: int = 64,
    scale: float | None = None,
    rope: Tensor | None = None,
    rope_on_v: bool = False,
    q_gain: Tensor | None = None,
    k_gain: Tensor | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """``softmax(scale * q k^T) v`` where a token sees the tokens of its own block of its row; not causal.

    Args:
        q: ``[tokens, heads, dim]``.
        k: ``[tokens, heads, dim]``.
        v: ``[tokens, heads, v_dim]``.
        offsets: ``[rows + 1]`` int64.
        max_length: longest row.
        block: tokens of a block; the last block of a row may be shorter.
        scale: factor on the scores, ``dim ** -0.5`` by default.
        rope: rotation angles ``[tokens, dim // 2]`` in radians, float32 (float64 for float64 inputs), without gradient; q and k are rotated by them
            in interleaved pairs ``(0, 1), (2, 3), ...``.
        rope_on_v: rotate v too; then ``v_dim`` equals ``dim``.
        q_gain: ``[dim]``; with it, and only together with ``k_gain``, each head of q is divided by its root mean square and multiplied by this,
            before the rotation. All heads share it.
        k_gain: ``[dim]``, the same for k.
        eps: added to the mean square.
        backend: name of a backend; None chooses by policy.

    Returns:
        ``[tokens, heads, v_dim]`` of q's dtype.

    Raises:
        RequestError: shapes, dtypes or offsets do not fit together, or a row is longer than ``max_length``
            (seen on the CPU only; on CUDA the rest is cut: it gives zeros and gets zero gradients).
        KernelUnavailable: the named backend does not fit.
    """
    out: Tensor = run(
        check,
        backend,
        q,
        k,
        v,
        offsets,
        max_length=max_length,
        block=block,
        scale=scale,
        rope=rope,
        rope_on_v=rope_on_v,
        q_gain=q_gain,
        k_gain=k_gain,
        eps=eps,
    )
    return out


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    max_length: int,
    block: int = 64,
    scale: float | None = None,
    rope: Tensor | None = None,
    rope_on_v: bool = False,
    q_gain: Tensor | None = None,
    k_gain: Tensor | None = None,
    eps: float = 1e-6,
) -> KernelRequest:
    """Check a call of ``block_attention`` and describe it."""
    op = "block_attention"
    check_tensors(op, q, {"k": k, "v": v})
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_rank(op, name, tensor, "tokens heads dim")
    check_heads(op, q, k, v)
    if q.shape != k.shape:
        refuse(op, f"q has shape {list(q.shape)}, k has shape {list(k.shape)}", "Give q and k the same tokens and heads.")
    if block < 1:
        refuse(op, f"block is {block}", "Give at least 1 token.")
    check_rows(op, "q", offsets, q, max_length)
    features = set()
    if rope is not None:
        features.add("rope")
        wanted = torch.float64 if q.dtype == torch.float64 else torch.float32
        if rope.dtype != wanted or rope.device != q.device or rope.requires_grad:
            refuse(op, f"rope is {rope.dtype} on {rope.device}, gradient {rope.requires_grad}", f"Give {wanted} angles beside q, without gradient.")
        check_shape(op, "rope", rope, ((q.shape[0],), (q.shape[2] // 2,)))
        if q.shape[2] % 2:
            refuse(op, f"dim {q.shape[2]} is odd", "Rotary embedding turns pairs: give an even dim.")
    if rope_on_v:
        features.add("rope_v")
        if rope is None or v.shape[2] != q.shape[2]:
            refuse(op, "rope_on_v needs angles and a v as wide as q", "Give rope, and v_dim equal to dim.")
    if q_gain is not None or k_gain is not None:
        features.add("qk_norm")
        _check_gains(op, q, {"q_gain": q_gain, "k_gain": k_gain}, eps)
    return make_request(op, q, features, (q, k, v, q_gain, k_gain), head_dim=q.shape[-1])


def _check_gains(op: str, q: Tensor, gains: dict[str, Tensor | None], eps: float) -> None:
    check_tensors(op, q, gains)
    for name, gain in gains.items():
        if gain is None:
            refuse(op, f"{name} is missing", "Give gains for both q and k, or for neither.")
        check_shape(op, name, gain, ((q.shape[2],),))
    if eps <= 0:
        refuse(op, f"eps is {eps}", "Give a positive number.")


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn interleaved pairs of ``x [tokens, heads, dim]`` by ``angles [tokens, dim // 2]``: ``(a, b)`` to ``(a cos - b sin, a sin + b cos)``."""
    cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


@own_precision
def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    max_length: int,
    block: int = 64,
    scale: float | None = None,
    rope: Tensor | None = None,
    rope_on_v: bool = False,
    q_gain: Tensor | None = None,
    k_gain: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """What ``block_attention`` means: each padded row is cut into blocks, and each block attends to itself."""
    wide_q, wide_k, wide_v = widen(q), widen(k), widen(v)
    if q_gain is not None and k_gain is not None:
        wide_q, wide_k = (F.rms_norm(x, gain.shape, widen(gain), eps) for x, gain in ((wide_q, q_gain), (wide_k, k_gain)))
    if rope is not None:
        wide_q, wide_k = rotate(wide_q, rope), rotate(wide_k, rope)
        wide_v = rotate(wide_v, rope) if rope_on_v else wide_v
    width = max(min(block, max_length), 1)
    blocks = -(-max_length // width)
    rows = Padding(offsets, q.shape[0], blocks * width, limit=max_length)

    def cut(x: Tensor) -> Tensor:
        return rows.pad(x).view(rows.rows * blocks, width, *x.shape[1:])

    mask = rows.filled().view(rows.rows * blocks, 1, 1, 1, width)
    scores = score(cut(wide_q * (q.shape[-1] ** -0.5 if scale is None else scale)), cut(wide_k))
    out = softmax_weigh(scores, mask, cut(wide_v)).reshape(rows.rows, blocks * width, q.shape[1], v.shape[2])
    return rows.unpad(out).to(q.dtype)


def flops(*, lengths: masks.Lengths, heads: int, dim: int, v_dim: int | None = None, block: int = 64) -> int:
    """Forward model FLOPs: two matmuls on the pairs inside blocks; rotations are not counted."""
    return 2 * heads * (dim + (v_dim or dim)) * masks.block_pairs(lengths, block)
