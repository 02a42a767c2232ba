"""What the adapters of FlashAttention share: rows as its kernels want them, whatever a call of ``jagged_attention`` holds.

Those kernels leave memory unwritten where a row has queries but no keys or the other way round, and know nothing of rows that are cut at a maximum.
Here tokens that take part are moved together, and the others give zeros and get zero gradients: one gather of each tensor.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_core.ops.jagged_attention import reference
from gem_core.ops.padded import Padding, own_precision
from gem_core.spec import KernelUnavailable
from gem_kernels.ops.limits import MAX_WIDTH

Attend = Callable[..., tuple[Tensor, Tensor]]
"""``(q, k, v, q_starts, k_starts, max_q, max_k, scale, causal, window)`` to the output ``[tokens, heads, width]`` and its log-sum-exp
``[heads, tokens]``; starts are int32 ``[rows + 1]``, ``window`` is what is seen on each side, -1 for all."""
MULTIPLE = 8
"""Head sizes are padded to a multiple of 16 bytes."""


class Together(Padding):
    """Packed tokens of ``offsets`` with those that take part first: ``lengths`` ``[rows]`` of each row, from its start."""

    def __init__(self, offsets: Tensor, total: int, lengths: Tensor) -> None:
        self.rows, self.max_length, self.lengths, self.cut = 1, total, lengths, True
        self.starts = F.pad(lengths.cumsum(0), (1, 0))
        tokens = torch.arange(total, device=offsets.device)
        row = torch.searchsorted(offsets[1:], tokens, right=True)
        inside = row < lengths.shape[0]
        row = row.clamp(max=lengths.shape[0] - 1)
        position = tokens - offsets[row]
        inside = inside & (position >= 0) & (position < lengths[row])
        self.slot = torch.where(inside, self.starts[row] + position, total)
        self.token = tokens.new_full((total + 1,), total).scatter_(0, self.slot, tokens)[:-1]


def refuse_bias(backend: str, bias: Tensor | None) -> None:
    """No adapter adds one to the scores."""
    if bias is not None:
        raise KernelUnavailable(f"jagged_attention with backend {backend!r}", "it takes no bias", "Use backend='triton'.")


@own_precision
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    *,
    function: Attend,
    backend: str,
    max_q: int,
    max_k: int,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    bias: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """A call of ``jagged_attention`` by ``function``; shapes and meaning are those of ``gem_core.ops.jagged_attention``.

    Raises:
        KernelUnavailable: there is a bias, or a head is too wide.
    """
    refuse_bias(backend, bias)
    options: dict[str, Any] = {"scale": scale, "causal": causal, "window": window, "return_lse": return_lse}
    rows, dim, v_dim = k_offsets.shape[0] - 1, q.shape[-1], v.shape[-1]
    if max(dim, v_dim) > MAX_WIDTH:
        so = f"head size {max(dim, v_dim)} is above {MAX_WIDTH}"
        raise KernelUnavailable(f"jagged_attention with backend {backend!r}", so, "Use more heads, or backend='reference'.")
    if 0 in (rows, max_q, max_k, q.shape[0], k.shape[0]):  # no query sees a key: there is nothing to compute
        return reference(q, k, v, q_offsets, k_offsets, max_q=max_q, max_k=max_k, **options)
    if q_offsets is None:
        q_offsets = torch.arange(rows + 1, device=q.device) * q.shape[0]
        q = q.expand(rows, *q.shape).flatten(0, 1)
    queries, keys = _together(q_offsets, k_offsets, q.shape[0], k.shape[0], max_q, max_k)
    factor = dim**-0.5 if scale is None else float(scale)
    if factor <= 0:  # the kernels take the largest score before they scale it
        q, factor = q * (-1.0 if factor < 0 else 0.0), abs(factor) or 1.0
    width = -(-max(dim, v_dim) // MULTIPLE) * MULTIPLE
    packed = (rows_of.pad(_widened(x, width))[0] for x, rows_of in ((q, queries), (k, keys), (v, keys)))
    reach = -1 if window is None else min(window, max_q + max_k)
    # FlashAttention 2 takes a window as long as the longest row for no window, which it is not for queries before the first key
    longest = max(max_k, reach + 1)
    starts = (queries.starts.int(), keys.starts.int())
    out, lse = function(*packed, *starts, max_q, longest, factor, causal, (reach, 0 if causal else reach))
    out = queries.unpad(out[None])[..., :v_dim]
    return (out, _lse(lse.detach().T, queries)) if return_lse else out


def _together(q_offsets: Tensor, k_offsets: Tensor, q_tokens: int, k_tokens: int, max_q: int, max_k: int) -> tuple[Together, Together]:
    """Queries and keys that take part: of rows that have both, up to the maxima."""
    q_lengths, k_lengths = q_offsets.diff().clamp(0, max_q), k_offsets.diff().clamp(0, max_k)
    both = (q_lengths > 0) & (k_lengths > 0)
    queries = Together(q_offsets, q_tokens, q_lengths * both)
    if q_offsets is k_offsets and max_q == max_k:
        return queries, queries
    return queries, Together(k_offsets, k_tokens, k_lengths * both)


def _widened(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _lse(lse: Tensor, queries: Together) -> Tensor:
    """``[tokens, heads]`` in the order of the call, minus infinity for a query without a key (infinity in FlashAttention)."""
    moved = queries.unpad(lse.masked_fill(lse == torch.inf, -torch.inf)[None])
    return moved.masked_fill(queries.is_cut()[:, None], -torch.inf)
