"""The ``flex`` backend of ``jagged_attention``: padded rows through torch's compiled FlexAttention, which skips the blocks that nothing is seen in.

As with ``sdpa``, padding costs memory in proportion to ``rows * longest row``; arithmetic goes by what is seen. The list of seen blocks is computed
from the lengths, since torch's own way to it would build the whole mask first. The first calls compile, for seconds.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_core.ops.jagged_attention import reference
from gem_core.ops.padded import Padding, own_precision
from gem_kernels.ops.packed import refuse_bias

NARROWEST = 16
"""Smallest head size that FlexAttention multiplies."""
BLOCK = 128
"""Queries and keys of a block of the mask; FlexAttention's own default."""


@own_precision
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
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention within rows; shapes and meaning are those of ``gem_core.ops.jagged_attention``.

    Raises:
        KernelUnavailable: there is a bias.
    """
    refuse_bias("flex", bias)
    if 0 in (k_offsets.shape[0] - 1, max_q, max_k, q.shape[0], k.shape[0]):  # no query sees a key: there is nothing to compute
        options: dict[str, Any] = {"scale": scale, "causal": causal, "window": window, "return_lse": return_lse}
        return reference(q, k, v, q_offsets, k_offsets, max_q=max_q, max_k=max_k, **options)
    keys = Padding(k_offsets, k.shape[0], max_k)
    if q_offsets is None:
        queries, q_lengths = None, torch.full_like(keys.lengths, max_q)
        padded = q.expand(keys.rows, *q.shape)
    else:
        queries = keys if q_offsets is k_offsets and max_q == max_k else Padding(q_offsets, q.shape[0], max_q)
        q_lengths, padded = queries.lengths, queries.pad(q)
    mask = block_mask(q_lengths, keys.lengths, max_q, max_k, causal=causal, window=window)
    wide_v = F.pad(v, (0, max(NARROWEST - v.shape[-1], 0)))
    out, lse = _compiled()(
        padded.transpose(1, 2), keys.pad(k).transpose(1, 2), keys.pad(wide_v).transpose(1, 2), block_mask=mask, scale=scale,
        enable_gqa=q.shape[1] != k.shape[1], return_lse=True,
    )  # fmt: skip
    out, lse = out.transpose(1, 2)[..., : v.shape[-1]], lse.detach().transpose(1, 2)
    if queries is None:
        out, lse = out.flatten(0, 1), lse.flatten(0, 1)
    else:
        out, lse = queries.unpad(out), queries.unpad(lse).masked_fill(queries.is_cut()[:, None], -torch.inf)
    return (out, lse) if return_lse else out


@cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def block_mask(q_lengths: Tensor, k_lengths: Tensor, max_q: int, max_k: int, *, causal: bool, window: int | None) -> Any:
    """The blocks of ``[max_q, max_k]`` in which a query of a row sees a key, and which pairs of them see each other.

    Args:
        q_lengths: int64 ``[rows]``.
        k_lengths: int64 ``[rows]``.
        max_q: longest row of queries.
        max_k: longest row of keys.
        causal: a query sees keys up to its own position.
        window: a query sees keys at most this far from its position.
    """
    from torch.nn.attention.flex_attention import BlockMask

    first = torch.arange(0, max_q, BLOCK, device=k_lengths.device)
    shift = (k_lengths - q_lengths)[:, None]
    last = (first + (BLOCK - 1)).minimum(q_lengths[:, None] - 1) + shift  # position of the block's last query
    begin, end = torch.zeros_like(last), k_lengths[:, None].expand_as(last)
    if causal:
        end = end.minimum(last + 1)
    if window is not None:
        begin = (first + shift - window).clamp(min=0)
        end = end.minimum(last + window + 1)
    end = torch.where((first < q_lengths[:, None]) & (end > begin), end, begin)
    low = begin // BLOCK
    high = torch.where(end > begin, (end + (BLOCK - 1)) // BLOCK, low)
    # blocks that end before the row's last key need no mask where position does not count
    whole = (end // BLOCK).maximum(low) if not causal and window is None else low
    steps = torch.arange(-(-max_k // BLOCK), device=k_lengths.device)

    def ordered(start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
        """How many blocks, ``[rows, 1, query blocks]``, and which, the used ones first."""
        index = (start[..., None] + steps) % steps.shape[0]
        return (stop - start).int()[:, None], index.int()[:, None].contiguous()

    # a tensor: a number that changes from call to call stops torch 2.11's compilation of the gradient
    reach = None if window is None else k_lengths.new_full((), window)

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + k_lengths[row] - q_lengths[row] - key
        seen = (key < k_lengths[row]) & (query < q_lengths[row])
        if causal:
            seen = seen & (distance >= 0)
        if reach is not None:
            seen = seen & (distance <= reach) & (distance >= -reach)
        return seen

    return BlockMask.from_kv_blocks(
        *ordered(whole, high), *ordered(low, whole), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(max_q, max_k)
    )  # fmt: skip
