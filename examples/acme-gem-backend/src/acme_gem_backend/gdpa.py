"""gdpa without padding: each row is one small problem. Slow on many short rows, and short on memory where rows are few and long."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_core.ops.activations import ACTIVATIONS


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
) -> Tensor:
    """The signature and meaning of ``gem_core.ops.gdpa``."""
    queries, keys, values = _split(q, q_offsets, max_q), _split(k, k_offsets, max_k), _split(v, k_offsets, max_k)
    if q_offsets is None:  # one query for all rows
        queries = queries * len(keys)
    act = ACTIVATIONS[activation]
    inside, after = (scale, 1.0) if scale_position == "inside" else (1.0, scale)
    group = q.shape[1] // k.shape[-2]
    rows = []
    for row_q, row_k, row_v in zip(queries, keys, values, strict=True):
        wide = torch.promote_types(q.dtype, torch.float32)
        row_q, row_k, row_v = row_q.to(wide), row_k.to(wide), row_v.to(wide)
        row_k, row_v = row_k.repeat_interleave(group, dim=1), row_v.repeat_interleave(group, dim=1)
        weight = after * act(inside * torch.einsum("qhd,khd->hqk", row_q, row_k))
        if window is not None:
            weight = weight * _near(len(row_q), len(row_k), window, q.device)
        rows.append(torch.einsum("hqk,khd->qhd", weight, row_v))
    if q_offsets is not None:  # tokens beyond max_q are cut: they give zeros
        rows = [F.pad(row, (0, 0, 0, 0, 0, length - len(row))) for row, length in zip(rows, q_offsets.diff().tolist(), strict=True)]
    if not rows:  # nothing to do, but the inputs still have (zero) gradients
        return q.new_zeros(0, q.shape[1], v.shape[-1]) + (q[:0].sum() + k[:0].sum() + v[:0].sum())
    return torch.cat(rows).to(q.dtype)


def _split(packed: Tensor, offsets: Tensor | None, longest: int) -> list[Tensor]:
    """One tensor a row, no longer than ``longest``. Without offsets: dense keys have a row dimension, a shared query is one row."""
    if offsets is None:
        return list(packed.unbind()) if packed.dim() == 4 else [packed]
    ends = offsets.tolist()
    return [packed[start:end][:longest] for start, end in pairwise(ends)]


def _near(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """True where a key is at most ``window`` from the query; positions are aligned at the end of the row."""
    position = torch.arange(queries, device=device)[:, None] + keys - queries
    return (position - torch.arange(keys, device=device)).abs() <= window
