"""Generalised dot-product attention, forward, with both products on the FP8 tensor cores of Hopper: ``O = f(scale Q K^T) V`` over jagged rows.

The casts are those of linear layers: with heads of 128, a scale for 1 x 128 elements is one for a token and a head; and FP8 tensor cores want the
keys' axis of V contiguous, which is what its transposed cast has. Tiles of keys begin at multiples of 128 of all tokens, as the scales of V do, so
keys of neighbouring rows stand in the first and the last one of a row: their weights are set to zero. (A NaN in V shows in every row of its 128
tokens.) Weights are cast with a scale for each query and tile, and each tile's product is promoted to float32.

Right on an H200 and slow there: 104 TFLOP/s on rows of 256 and 212 on rows of 1,024, casts included. Nothing chooses it; the backend ``gluon_fp8`` of
gem-kernels is what attention in FP8 is for speed.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
from torch import Tensor

from gem_core.spec import RequestError
from gem_precision.kernels.activation import Activation, activate, require_activation
from gem_precision.kernels.cast import SIDE, cast_both
from gem_precision.kernels.language import BLOCK, TensorDescriptor, inverse_scale, magnitude, scale, tl, triton


@triton.jit
def gdpa_kernel(
    q,
    k,
    v,
    q_scale,
    k_scale,
    v_scale,
    q_offsets,
    k_offsets,
    out,
    factor,
    heads,
    q_padded,
    k_padded,
    max_q,
    max_k,
    NAME: tl.constexpr,
    STAGES: tl.constexpr,
):
    """128 queries of one row and one head.

    Args:
        q, k: descriptors of ``[tokens, 128 * heads]`` E4M3; ``q_scale`` and ``k_scale`` are ``[heads, padded tokens]``.
        v: descriptor of ``[128 * heads, tokens]`` E4M3; ``v_scale`` is ``[padded tokens / 128, 128 * heads]``.
        out: ``[tokens, 128 * heads]``.
    """
    tiles = (max_q + BLOCK - 1) // BLOCK
    row, tile, head = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    q_first, k_first = tl.load(q_offsets + row), tl.load(k_offsets + row)
    q_end = tl.minimum(tl.load(q_offsets + row + 1), q_first + max_q)
    k_end = tl.minimum(tl.load(k_offsets + row + 1), k_first + max_k)
    first = q_first + tile * BLOCK
    if first >= q_end:
        return
    r, c = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    queries = q.load([first.to(tl.int32), head * BLOCK])
    # a scale of a query times the factor on scores
    by_query = tl.load(q_scale + head.to(tl.int64) * q_padded + r, mask=r < q_end, other=0.0) * factor
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for block in tl.range((k_first // BLOCK).to(tl.int32), ((k_end + BLOCK - 1) // BLOCK).to(tl.int32), num_stages=STAGES):
        keys = block * BLOCK + c
        by_key = tl.load(k_scale + head.to(tl.int64) * k_padded + keys)
        scores = tl.dot(queries, k.load([block * BLOCK, head * BLOCK]).T) * by_query[:, None] * by_key[None, :]
        inside = (keys >= k_first) & (keys < k_end)
        weights = tl.where(inside[None, :], activate(scores, NAME, SLOPE=False), 0.0)
        bits = tl.max(magnitude(weights), 1)
        low = (weights * inverse_scale(bits)[:, None]).to(tl.float8e4nv)
        by_value = tl.load(v_scale + tl.cast(block, tl.int64) * heads * BLOCK + head * BLOCK + c)
        total += tl.dot(low, v.load([head * BLOCK, block * BLOCK]).T) * scale(bits)[:, None] * by_value[None, :]
    places = out + r[:, None] * heads * BLOCK + (head * BLOCK + c)[None, :]
    tl.store(places, total.to(out.dtype.element_ty), mask=(r < q_end)[:, None])


def gdpa_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    *,
    max_q: int,
    max_k: int,
    activation: Activation = "gelu",
    scale: float = 1.0,
) -> Tensor:
    """``gem_core.ops.gdpa`` with ``scale_position="inside"`` and no window, its operands in ``fp8_block``; no gradient.

    Args:
        q: ``[q_tokens, heads, 128]``.
        k, v: ``[k_tokens, heads, 128]``.
        q_offsets, k_offsets: ``[rows + 1]`` int64.
        max_q, max_k: the longest rows; what is longer is cut.
        activation: f.
        scale: factor on the scores.

    Returns:
        ``[q_tokens, heads, 128]`` of q's dtype; zeros where there is no key.

    Raises:
        RequestError: shapes that do not fit, or an activation without a kernel.
    """
    require_activation(activation)
    shapes = [list(t.shape) for t in (q, k, v)]
    if q.dim() != 3 or q.shape[2] != SIDE or k.shape != v.shape or k.shape[1:] != q.shape[1:]:
        raise RequestError(f"gdpa_forward of {shapes}", "its kernel is for heads of 128, as many of keys as of queries", "Give [tokens, heads, 128].")
    if q_offsets.shape != k_offsets.shape or q_offsets.dtype != torch.int64 or k_offsets.dtype != torch.int64:
        so = f"offsets are {q_offsets.dtype} {list(q_offsets.shape)} and {k_offsets.dtype} {list(k_offsets.shape)}"
        raise RequestError("gdpa_forward", so, "Give two of [rows + 1] int64.")
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)  # tokens behind the last row, or that max_q cuts off
    rows, heads = q_offsets.shape[0] - 1, q.shape[1]
    if 0 in (rows, max_q, max_k, q.numel(), k.numel()):
        return out
    low_q, low_k, low_v = (cast_both(t.reshape(t.shape[0], heads * SIDE)) for t in (q, k, v))
    boxes = [TensorDescriptor.from_tensor(t, [SIDE, SIDE]) for t in (low_q.along.elements, low_k.along.elements, low_v.turned.elements)]
    scales = (low_q.along.scales, low_k.along.scales, low_v.turned.scales)
    sizes = (heads, low_q.along.elements.shape[0], low_k.along.elements.shape[0], max_q, max_k)
    grid = (rows * -(-max_q // SIDE), heads)
    gdpa_kernel[grid](*boxes, *scales, q_offsets, k_offsets, out, scale, *sizes, NAME=activation, STAGES=2, num_warps=8)
    return out
