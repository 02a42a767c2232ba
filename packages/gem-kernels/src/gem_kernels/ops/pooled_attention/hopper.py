"""The ``gluon`` backend of ``pooled_attention``: the seeds of a row are queries of ``jagged_attention``. Importing this module needs no triton."""

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_kernels.ops.host import block_width
from gem_kernels.ops.jagged_attention import launch as jagged
from gem_kernels.ops.jagged_attention.call import Call
from gem_kernels.ops.pooled_attention.launch import MOST_SEEDS, Inputs, attend

FEWEST, MOST, WIDTHS = 33, 128, (64, 128)
"""Seeds of a row, from and to, and head sizes for which ``hopper_grad`` makes all gradients; the portable kernel is made for fewer seeds."""


def gluon(seeds: Tensor, k: Tensor, v: Tensor, k_offsets: Tensor, *, max_k: int, scale: float | None = None) -> Tensor:
    """As ``launch.pooled_attention``, by kernels for Hopper whose tiles have 128 queries; 16-bit dtypes.

    Gradients of 33 to 128 seeds of each row's own come from ``hopper_grad``; else those of the portable kernel that makes all of them at once, where
    there is one: few seeds fill a small part of a tile of 128.

    Raises:
        KernelUnavailable: dtype, head size or device that this backend does not take.
    """
    # The first is what ``launch.fused`` says of 16-bit values.
    if (seeds.shape[-3] <= MOST_SEEDS and seeds.shape[-2] == k.shape[1]) or one_pass(seeds, k, v):
        return attend(seeds, k, v, k_offsets, max_k=max_k, scale=scale, hopper=True)
    rows, count = k_offsets.shape[0] - 1, seeds.shape[-3]
    q, q_offsets = _queries(seeds, k_offsets)
    out = jagged.gluon(q, k, v, q_offsets, k_offsets, max_q=count, max_k=max_k, scale=scale)
    assert isinstance(out, Tensor)
    return out.view(rows, count, *out.shape[1:])


def one_pass(seeds: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether ``hopper_grad`` makes the gradients, from shapes alone, since a compiler follows this: rows have seeds, heads keys of their own."""
    fits = seeds.dim() == 4 and FEWEST <= seeds.shape[1] <= MOST and seeds.shape[3] in WIDTHS
    return fits and seeds.shape[2] == k.shape[1] and seeds.shape[3] == v.shape[2]


def _queries(seeds: Tensor, k_offsets: Tensor) -> tuple[Tensor, Tensor | None]:
    """Seeds as queries ``[tokens, heads, dim]``, and their offsets; None where rows share them."""
    if seeds.dim() == 3:
        return seeds, None
    rows, count = seeds.shape[:2]
    return seeds.flatten(0, 1), torch.arange(rows + 1, device=k_offsets.device) * count


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Output ``[rows, seeds, heads, v_dim]`` and, as ``launch`` keeps them, base-2 logarithms ``[rows, seeds, heads]`` float32, infinity where there
    is no key, a view of ``[heads, rows * seeds]``; of a call that has something to do."""
    width = inputs.v.shape[-1]
    missing = max(block_width(width), 32) - width
    v = F.pad(inputs.v, (0, missing)) if missing else inputs.v
    q, q_offsets = _queries(inputs.q, inputs.offsets)
    seeds = inputs.q.shape[-3]
    call = Call(
        op="pooled_attention", q=q, k=inputs.k, v=v, q_offsets=q_offsets, k_offsets=inputs.offsets, max_q=seeds, max_k=inputs.max_k,
        scale=inputs.scale, window=None, backend="gluon",
    )  # fmt: skip
    out, lse = call.forward()
    return out[..., :width].contiguous().view(inputs.shape), lse.t().view(inputs.shape[:3])
