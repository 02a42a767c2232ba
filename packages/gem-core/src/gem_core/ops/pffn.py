"""The personalised feed-forward block: ``gdpa`` on weights generated per sample, between two norms.

Source: the fused block of https://pytorch.org/blog/towards-free-normalization-fusing-normalization-into-gemm-and-attention-kernels/
"""

import torch.nn.functional as F
from torch import Tensor

from gem_core.ops import masks
from gem_core.ops.activations import ACTIVATIONS
from gem_core.ops.checks import check_rank, check_rows, check_shape, check_tensors, refuse
from gem_core.ops.dispatch import make_request, run
from gem_core.ops.gdpa import SCALE_POSITIONS
from gem_core.ops.gdpa import reference as gdpa
from gem_core.ops.padded import Padding, own_precision, widen
from gem_core.spec.kernels import KernelRequest


def pffn(
    q0: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    *,
    max_q: int,
    activation: str = "gelu",
    scale: float = 1.0,
    scale_position: str = "inside",
    eps: float = 1e-5,
    backend: str | None = None,
) -> Tensor:
    """``y = RMSNorm(o) + q0`` with ``o = gdpa(ln, k, v) + ln`` and ``ln = LayerNorm(q0)``.

    Both norms are over ``heads * dim`` and have no affine parameters.

    Args:
        q0: ``[tokens, heads, dim]``.
        k: dense ``[rows, keys, heads, dim]``.
        v: dense ``[rows, keys, heads, dim]``.
        q_offsets: ``[rows + 1]`` int64.
        max_q: longest row.
        activation: as for ``gdpa``.
        scale: as for ``gdpa``.
        scale_position: as for ``gdpa``.
        eps: of both norms.
        backend: name of a backend; None chooses by policy.

    Returns:
        ``[tokens, heads, dim]`` of q0's dtype.

    Raises:
        RequestError: shapes, dtypes or offsets do not fit together, or a row is longer than ``max_q``
            (seen on the CPU only; on CUDA the rest is cut: it gives zeros and gets zero gradients).
        KernelUnavailable: the named backend does not fit.
    """
    out: Tensor = run(check, backend, q0, k, v, q_offsets, max_q=max_q, activation=activation, scale=scale, scale_position=scale_position, eps=eps)
    return out


def check(
    q0: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    *,
    max_q: int,
    activation: str = "gelu",
    scale: float = 1.0,
    scale_position: str = "inside",
    eps: float = 1e-5,
) -> KernelRequest:
    """Check a call of ``pffn`` and describe it."""
    op = "pffn"
    if activation not in ACTIVATIONS:
        refuse(op, f"unknown activation {activation!r}", f"Known: {', '.join(ACTIVATIONS)}.")
    if scale_position not in SCALE_POSITIONS:
        refuse(op, f"scale_position {scale_position!r} is unknown", f"Known: {', '.join(SCALE_POSITIONS)}.")
    if eps <= 0:
        refuse(op, f"eps is {eps}", "Give a positive number.")
    check_tensors(op, q0, {"k": k, "v": v})
    check_rank(op, "q0", q0, "tokens heads dim")
    check_rank(op, "k", k, "rows keys heads dim")
    if 0 in q0.shape[1:]:
        refuse(op, f"q0 has shape {list(q0.shape)}", "Give at least one head of at least one element.")
    rows = check_rows(op, "q0", q_offsets, q0, max_q)
    for name, tensor in (("k", k), ("v", v)):
        check_shape(op, name, tensor, ((rows,), (k.shape[1],), (q0.shape[1],), (q0.shape[2],)))
    features = {f"act_{activation}"} | ({"scale_after"} if scale_position == "after" else set())
    return make_request(op, q0, features, (q0, k, v), head_dim=q0.shape[-1])


@own_precision
def reference(
    q0: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    *,
    max_q: int,
    activation: str = "gelu",
    scale: float = 1.0,
    scale_position: str = "inside",
    eps: float = 1e-5,
) -> Tensor:
    """What ``pffn`` means, in terms of ``gdpa``."""
    flat = widen(q0).flatten(1)
    ln = F.layer_norm(flat, flat.shape[1:], eps=eps)
    attended = gdpa(
        ln.view_as(q0),
        widen(k),
        widen(v),
        q_offsets,
        None,
        max_q=max_q,
        max_k=k.shape[1],
        activation=activation,
        scale=scale,
        scale_position=scale_position,
    )
    out = F.rms_norm(attended.flatten(1) + ln, flat.shape[1:], eps=eps) + flat
    rows = Padding(q_offsets, q0.shape[0], max_q)
    if rows.cut:
        out = out.masked_fill(rows.is_cut()[:, None], 0.0)
    return out.view_as(q0).to(q0.dtype)


def flops(*, q_lengths: masks.Lengths, keys: int, heads: int, dim: int) -> int:
    """Forward model FLOPs: the two matmuls of ``gdpa``; norms are not counted."""
    return 4 * heads * dim * masks.pairs(q_lengths, keys)
