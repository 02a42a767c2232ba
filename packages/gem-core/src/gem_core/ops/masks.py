"""Which query sees which key, as a boolean mask for references and as an exact count for FLOPs.

Queries and keys of a row are aligned at their ends: query ``i`` of ``q_length`` has position ``i + k_length - q_length``.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Lengths = int | Sequence[int] | npt.NDArray[np.int64]


def visible(q_lengths: Tensor | int, k_lengths: Tensor, max_q: int, max_k: int, *, causal: bool = False, window: int | None = None) -> Tensor:
    """Mask ``[rows, max_q, max_k]`` (``max_q`` 1 if it is the same for all queries) of the pairs that see each other.

    Args:
        q_lengths: ``[rows]`` int64, or one length for all rows.
        k_lengths: ``[rows]`` int64.
        max_q: longest row of queries.
        max_k: longest row of keys.
        causal: key positions up to the query's own.
        window: distance to the query's position at most this.
    """
    keys = torch.arange(max_k, device=k_lengths.device)
    mask = (keys < k_lengths[:, None])[:, None, :]
    if not causal and window is None:
        return mask
    position = torch.arange(max_q, device=k_lengths.device) + (k_lengths - q_lengths)[:, None]
    distance = position[:, :, None] - keys
    if causal:
        mask = mask & (distance >= 0)
    if window is not None:
        mask = mask & (distance.abs() <= window)
    return mask


def _as_int64(lengths: Lengths) -> npt.NDArray[np.int64]:
    return np.asarray(lengths, dtype=np.int64)


def _clipped_sum(n: npt.NDArray[np.int64], cap: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Sum of ``min(max(t, 0), cap)`` over all integers ``t <= n``."""
    inside = np.clip(n, 0, cap)
    return np.asarray(inside * (inside + 1) // 2 + np.maximum(n - cap, 0) * cap, dtype=np.int64)


def pairs(q_lengths: Lengths, k_lengths: Lengths, *, causal: bool = False, window: int | None = None) -> int:
    """Exact number of (query, key) pairs that ``visible`` allows, summed over rows, in closed form."""
    queries, keys = np.broadcast_arrays(_as_int64(q_lengths), _as_int64(k_lengths))
    if not causal and window is None:
        return int((queries * keys).sum())
    last, first = keys - 1, keys - queries
    ahead = np.zeros_like(keys) if causal else np.full_like(keys, window or 0)
    # keys at positions <= p number clip(p + 1, 0, keys): sum that over the positions of all queries
    total = _clipped_sum(last + ahead + 1, keys) - _clipped_sum(first + ahead, keys)
    if window is not None:
        total = total - _clipped_sum(last - window, keys) + _clipped_sum(first - window - 1, keys)
    return int(total.sum())


def block_pairs(lengths: Lengths, block: int) -> int:
    """Exact number of pairs inside the diagonal blocks of ``block`` tokens."""
    full, rest = np.divmod(_as_int64(lengths), block)
    return int((full * block * block + rest * rest).sum())


def hstu_pairs(lengths: Lengths, contextual: Lengths, targets: Lengths, *, causal: bool, window: int | None) -> int:
    """Exact number of pairs that the mask of ``hstu_attention`` allows: prefix, history and targets of each row."""
    length, prefix, target = np.broadcast_arrays(_as_int64(lengths), _as_int64(contextual), _as_int64(targets))
    history = length - prefix - target
    reach = history if window is None else np.minimum(history, window)
    seen = prefix * (prefix + history) + history * prefix + target * (prefix + reach + 1)
    return int(seen.sum()) + pairs(history, history, causal=causal, window=window)
