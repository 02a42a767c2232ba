"""HSTU's pointwise attention. Formula: arXiv 2402.17152; masks as in its published code."""

import torch
from torch import Tensor

from gem_core.ops import masks
from gem_core.ops.attend import score, weigh
from gem_core.ops.checks import (
    check_heads,
    check_rank,
    check_row_counts,
    check_rows,
    check_shape,
    check_tensors,
    check_window,
    contents_checked,
    refuse,
)
from gem_core.ops.dispatch import make_request, run
from gem_core.ops.padded import Padding, own_precision, widen
from gem_core.spec.kernels import KernelRequest


def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    max_length: int,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    contextual: Tensor | None = None,
    targets: Tensor | None = None,
    bias: Tensor | None = None,
    norm_length: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """``(silu(scale * q k^T + bias) / norm_length * mask) v`` within each row.

    A row is a contextual prefix, a history, and targets (candidates) at its end, any of them empty. Who sees what:

    - a history token sees history tokens: itself and older ones (``causal``), at most ``window`` away;
    - everyone sees the contextual prefix, and a contextual token sees the prefix and the whole history;
    - a target sees the prefix, the history (with ``window`` its last ``window`` tokens) and itself, and is seen by nobody else.

    Args:
        q: ``[tokens, heads, dim]``.
        k: ``[tokens, heads, dim]``.
        v: ``[tokens, heads, v_dim]``.
        offsets: ``[rows + 1]`` int64.
        max_length: longest row.
        scale: factor on the scores, ``dim ** -0.5`` by default.
        causal: history tokens see no later ones.
        window: farthest history token that is seen, None for all.
        contextual: ``[rows]`` int64 lengths of the prefix.
        targets: ``[rows]`` int64 numbers of targets.
        bias: added to the scores, ``[rows or 1, heads or 1, max_length, max_length]``. Gets gradients.
        norm_length: the constant divisor, ``max_length`` by default.
        backend: name of a backend; None chooses by policy.

    Returns:
        ``[tokens, heads, v_dim]`` of q's dtype.

    Raises:
        RequestError: shapes, dtypes or offsets do not fit together; on the CPU also a row longer than ``max_length``, or prefix and targets longer
            than their row (on CUDA the rest is cut: it gives zeros and gets zero gradients; targets first, then the prefix are shortened).
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
        scale=scale,
        causal=causal,
        window=window,
        contextual=contextual,
        targets=targets,
        bias=bias,
        norm_length=norm_length,
    )
    return out


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    max_length: int,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    contextual: Tensor | None = None,
    targets: Tensor | None = None,
    bias: Tensor | None = None,
    norm_length: int | None = None,
) -> KernelRequest:
    """Check a call of ``hstu_attention`` and describe it."""
    op = "hstu_attention"
    check_tensors(op, q, {"k": k, "v": v, "bias": bias})
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_rank(op, name, tensor, "tokens heads dim")
    check_heads(op, q, k, v)
    if q.shape != k.shape:
        refuse(op, f"q has shape {list(q.shape)}, k has shape {list(k.shape)}", "Give q and k the same tokens and heads.")
    check_window(op, window)
    if norm_length is not None and norm_length < 1:
        refuse(op, f"norm_length is {norm_length}", "Give a length of at least 1.")
    rows = check_rows(op, "q", offsets, q, max_length)
    if bias is not None:
        check_shape(op, "bias", bias, ((rows, 1), (q.shape[1], 1), (max_length,), (max_length,)))
    _check_parts(op, offsets, contextual, targets, q)
    used = {"window": window is not None, "contextual": contextual is not None, "targets": targets is not None, "bias": bias is not None}
    features = {word for word, on in used.items() if on} | {"causal" if causal else "noncausal"}
    return make_request(op, q, features, (q, k, v, bias), head_dim=q.shape[-1])


def _check_parts(op: str, offsets: Tensor, contextual: Tensor | None, targets: Tensor | None, like: Tensor) -> None:
    rows = offsets.numel() - 1
    parts = [(name, part) for name, part in (("contextual", contextual), ("targets", targets)) if part is not None]
    for name, part in parts:
        check_row_counts(op, name, part, rows, like)
    if not parts or not rows or not contents_checked(offsets):
        return
    lengths, taken = offsets.diff(), torch.zeros_like(offsets[1:])
    for name, part in parts:
        taken = taken + part
        bad = ((part < 0) | (taken > lengths)).nonzero()
        if bad.numel():
            row = int(bad[0])
            so = f"row {row} has {int(lengths[row])} tokens, its {name} are {int(part[row])}, {int(taken[row])} with what goes before"
            refuse(op, so, "Contextual tokens and targets are counts from 0 that together fit into the row.")


def visible(lengths: Tensor, size: int, *, causal: bool, window: int | None, contextual: Tensor | None, targets: Tensor | None) -> Tensor:
    """Mask ``[rows, size, size]`` of the pairs that see each other.

    Args:
        lengths: ``[rows]`` int64.
        size: longest row.
        causal: as for the op.
        window: as for the op.
        contextual: as for the op.
        targets: as for the op.
    """
    none = torch.zeros_like(lengths)
    prefix = (none if contextual is None else contextual.clamp(min=0)).minimum(lengths)[:, None, None]
    end = lengths[:, None, None] - (none if targets is None else targets.clamp(min=0)).minimum(lengths)[:, None, None]
    end = end.maximum(prefix)
    index = torch.arange(size, device=lengths.device)
    i, j = index[:, None], index[None, :]
    distance = i.minimum(end) - j  # every target stands right behind the history
    history = (j < end) & (distance >= 0) if causal else (j < end) & torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        history = history & (distance.abs() <= window)
    context = (j < prefix) | ((i < prefix) & (j < end))
    alone = (i == j) & (i >= end)
    return (history | context | alone) & (i < lengths[:, None, None]) & (j < lengths[:, None, None])


@own_precision
def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    max_length: int,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    contextual: Tensor | None = None,
    targets: Tensor | None = None,
    bias: Tensor | None = None,
    norm_length: int | None = None,
) -> Tensor:
    """What ``hstu_attention`` means, on padded rows."""
    rows = Padding(offsets, q.shape[0], max_length)
    scores = score(rows.pad(widen(q)) * (q.shape[-1] ** -0.5 if scale is None else scale), rows.pad(widen(k)))
    if bias is not None:
        scores = scores + widen(bias).unsqueeze(2)
    mask = visible(rows.lengths, max_length, causal=causal, window=window, contextual=contextual, targets=targets)
    weights = torch.nn.functional.silu(scores.masked_fill_(~mask[:, None, None], 0.0))
    divisor = max(max_length, 1) if norm_length is None else norm_length
    return rows.unpad(weigh(weights, rows.pad(widen(v))) / divisor).to(q.dtype)


def flops(
    *,
    lengths: masks.Lengths,
    heads: int,
    dim: int,
    v_dim: int | None = None,
    causal: bool = True,
    window: int | None = None,
    contextual: masks.Lengths = 0,
    targets: masks.Lengths = 0,
) -> int:
    """Forward model FLOPs: two matmuls on the visible pairs."""
    count = masks.hstu_pairs(lengths, contextual, targets, causal=causal, window=window)
    return 2 * heads * (dim + (v_dim or dim)) * count
