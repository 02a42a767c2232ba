"""The ``gluon`` backend of ``pooled_attention``: the seeds of a row are queries of ``jagged_attention``. Importing this module needs no triton."""

import torch
from torch import Tensor

from gem_kernels.ops.jagged_attention.launch import gluon as attend


def gluon(seeds: Tensor, k: Tensor, v: Tensor, k_offsets: Tensor, *, max_k: int, scale: float | None = None) -> Tensor:
    """As ``launch.pooled_attention``, by kernels for Hopper whose tiles have 128 queries; 16-bit dtypes.

    Raises:
        KernelUnavailable: dtype, head size or device that this backend does not take.
    """
    rows, count = k_offsets.shape[0] - 1, seeds.shape[-3]
    q, q_offsets = seeds, None
    if seeds.dim() == 4:
        q, q_offsets = seeds.flatten(0, 1), torch.arange(rows + 1, device=k_offsets.device) * count
    out = attend(q, k, v, q_offsets, k_offsets, max_q=count, max_k=max_k, scale=scale)
    assert isinstance(out, Tensor)
    return out.view(rows, count, *out.shape[1:])
