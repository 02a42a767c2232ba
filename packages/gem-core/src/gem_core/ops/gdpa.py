"""Generalised dot-product attention: a pointwise activation in the place of softmax. Formula: Kunlun, arXiv 2602.10016.

``O = f(scale * Q K^T) V`` (``inside``) or ``O = scale * f(Q K^T) V`` (``after``), over jagged queries and jagged or dense keys.
"""

from torch import Tensor

from gem_core.ops import masks
from gem_core.ops.activations import ACTIVATIONS
from gem_core.ops.attend import Rows, check_attention, score, weigh
from gem_core.ops.checks import refuse
from gem_core.ops.dispatch import make_request, run
from gem_core.ops.padded import own_precision
from gem_core.spec.kernels import KernelRequest

SCALE_POSITIONS = ("inside", "after")


def gdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor | None,
    *,
    max_q: int,
    max_k: int,
    activation: str = "gelu",
    scale: float = 1.0,
    scale_position: str = "inside",
    window: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attention with a pointwise activation ``f`` over scores.

    Args:
        q: ``[q_tokens, heads, dim]``; with ``q_offsets=None`` ``[queries, heads, dim]`` shared by every row.
        k: ``[k_tokens, kv_heads, dim]``; with ``k_offsets=None`` dense ``[rows, keys, kv_heads, dim]``. ``heads`` is a multiple of ``kv_heads``.
        v: as ``k`` with its own last dimension ``v_dim``.
        q_offsets: ``[rows + 1]`` int64, or None for a shared query.
        k_offsets: ``[rows + 1]`` int64, or None for dense keys; the same tensor as ``q_offsets`` makes it self-attention.
        max_q: longest row of queries; ``queries`` for a shared query.
        max_k: longest row of keys; ``keys`` for dense keys.
        activation: gelu, gelu_tanh, gelu_fast, silu, relu, relu2, leaky_relu (slope 0.01), hardswish or identity.
        scale: factor on the scores.
        scale_position: ``inside`` the activation or ``after`` it.
        window: only keys at most this far from the query's position; positions of a row are aligned at its end. None for all.
        backend: name of a backend; None chooses by policy.

    Returns:
        ``[q_tokens, heads, v_dim]`` of q's dtype; ``[rows * queries, heads, v_dim]``, row by row, for a shared query. Zeros where there is no key.

    Raises:
        RequestError: shapes, dtypes or offsets do not fit together, or a row is longer than its maximum
            (seen on the CPU only; on CUDA the rest is cut: it gives zeros and gets zero gradients).
        KernelUnavailable: the named backend does not fit.
    """
    out: Tensor = run(
        check,
        backend,
        q,
        k,
        v,
        q_offsets,
        k_offsets,
        max_q=max_q,
        max_k=max_k,
        activation=activation,
        scale=scale,
        scale_position=scale_position,
        window=window,
    )
    return out


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor | None,
    *,
    max_q: int,
    max_k: int,
    activation: str = "gelu",
    scale: float = 1.0,
    scale_position: str = "inside",
    window: int | None = None,
) -> KernelRequest:
    """Check a call of ``gdpa`` and describe it."""
    if activation not in ACTIVATIONS:
        refuse("gdpa", f"unknown activation {activation!r}", f"Known: {', '.join(ACTIVATIONS)}.")
    if scale_position not in SCALE_POSITIONS:
        refuse("gdpa", f"scale_position {scale_position!r} is unknown", f"Known: {', '.join(SCALE_POSITIONS)}.")
    features = {f"act_{activation}", *check_attention("gdpa", q, k, v, q_offsets, k_offsets, max_q=max_q, max_k=max_k, window=window)}
    if scale_position == "after":
        features.add("scale_after")
    return make_request("gdpa", q, features, (q, k, v), head_dim=q.shape[-1])


@own_precision
def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor | None,
    *,
    max_q: int,
    max_k: int,
    activation: str = "gelu",
    scale: float = 1.0,
    scale_position: str = "inside",
    window: int | None = None,
) -> Tensor:
    """What ``gdpa`` means, on padded rows. A padded key scores 0, which every activation maps to 0."""
    inside = scale_position == "inside"
    rows = Rows(q, k, v, q_offsets, k_offsets, max_q, max_k)
    scores = score(rows.q * scale if inside else rows.q, rows.k)
    if window is not None:
        scores = scores.masked_fill_(~rows.visible(window=window)[:, None, None], 0.0)
    out = weigh(ACTIVATIONS[activation](scores), rows.v)
    return rows.pack(out if inside else out * scale).to(q.dtype)


def flops(*, q_lengths: masks.Lengths, k_lengths: masks.Lengths, heads: int, dim: int, v_dim: int | None = None, window: int | None = None) -> int:
    """Forward model FLOPs: two matmuls on the visible pairs. A shared query or dense keys have one length for all rows."""
    return 2 * heads * (dim + (v_dim or dim)) * masks.pairs(q_lengths, k_lengths, window=window)
