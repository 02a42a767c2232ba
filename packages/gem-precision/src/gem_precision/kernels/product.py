"""Products of ``fp8_block`` operands on FP8 tensor cores of Hopper: ``left right^T``.

Ways with one meaning. The *library* is ``torch._scaled_mm``. Our *own* kernel, in tiles of two widths, takes what the library does not: shapes whose
scales it would take for other kinds, and products with few tiles and a long contraction, such as the weight gradient of a narrow layer, which it
splits along the contraction so that every multiprocessor works; elsewhere it is slower than the library. Both promote partial sums to float32 every
128 elements, because the tensor cores of Hopper keep about 14 bits while they sum FP8 (arXiv 2412.19437).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from functools import cache
from typing import Literal

import torch
from torch import Tensor

from gem_core.spec import RequestError
from gem_precision.kernels.cast import SIDE, Operand
from gem_precision.kernels.language import BLOCK, MULTIPROCESSORS, TensorDescriptor, tl, triton

Way = Literal["library", "own", "wide"]
WARPS = 8
FEW_TILES = 32
"""On an H200 splitting the contraction wins for 16 tiles, and the library for 64."""


@triton.jit
def _promoted(part, left_now, right_scale, column, block, columns, blocks, SQUARE: tl.constexpr):
    """The sum of one block along the contraction, with its scales."""
    if SQUARE:
        scaled = part * (left_now * tl.load(right_scale + column // BLOCK * blocks + block))[:, None]
    else:
        right_now = tl.load(right_scale + tl.cast(block, tl.int64) * columns + column + tl.arange(0, BLOCK))
        scaled = part * left_now[:, None] * right_now[None, :]
    return scaled


@triton.jit
def product_kernel(
    left, right, left_scale, right_scale, out, rows, columns, blocks, share, SQUARE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr
):
    """A tile of 128 x 128, or ``WIDE`` of 128 x 256, of one share of the contraction: ``out [shares, rows, columns]``.

    Args:
        left, right: descriptors of ``[rows, 128 * blocks]`` and ``[columns, 128 * blocks]`` E4M3, in boxes of 128 x 128.
        left_scale: ``[blocks, rows]``.
        right_scale: ``[columns / 128, blocks]`` if ``SQUARE``, else ``[blocks, columns]``.
        share: blocks of 128 that a program contracts.
    """
    width: tl.constexpr = 2 * BLOCK if WIDE else BLOCK
    tiles = columns // width
    row, column = tl.program_id(0) // tiles * BLOCK, tl.program_id(0) % tiles * width
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, blocks)
    r, c = row + tl.arange(0, BLOCK), column + tl.arange(0, BLOCK)
    total, second = tl.zeros([BLOCK, BLOCK], tl.float32), tl.zeros([BLOCK, BLOCK], tl.float32)
    # Stages that the loop names hold for the loads of scales too, which would otherwise wait for the memory in every round.
    for block in tl.range(first, last, num_stages=STAGES):
        left_now = tl.load(left_scale + tl.cast(block, tl.int64) * rows + r)
        elements = left.load([row, block * BLOCK])
        part = tl.dot(elements, right.load([column, block * BLOCK]).T)
        total += _promoted(part, left_now, right_scale, column, block, columns, blocks, SQUARE)
        if WIDE:
            part = tl.dot(elements, right.load([column + BLOCK, block * BLOCK]).T)
            second += _promoted(part, left_now, right_scale, column + BLOCK, block, columns, blocks, SQUARE)
    places = out + (tl.program_id(1).to(tl.int64) * rows + r)[:, None] * columns + c[None, :]
    tl.store(places, total.to(out.dtype.element_ty))
    if WIDE:
        tl.store(places + BLOCK, second.to(out.dtype.element_ty))


def product(left: Operand, right: Operand, dtype: torch.dtype = torch.bfloat16, way: Way | None = None, *, bias: Tensor | None = None) -> Tensor:
    """``left right^T + bias``.

    Args:
        left: ``[m, k]`` in blocks of 1 x 128.
        right: ``[n, k]`` in blocks of either kind.
        dtype: of the result, bfloat16 or float32.
        way: None for what ``choose`` says; ``own`` is our kernel, ``wide`` the same in tiles twice as wide, which reads less and wants an ``n``
            that is a multiple of 256.
        bias: ``[n]``.

    Returns:
        ``[m, n]``; nothing but the bias where ``k`` is 0.

    Raises:
        RequestError: axes that do not fit, or a way that cannot compute this shape.
    """
    (m, k), n = left.elements.shape, right.elements.shape[0]
    asked = f"product of [{m}, {k}] and {list(right.elements.shape)}"
    if left.square or right.elements.shape[1] != k:
        so = "the left one has 128 x 128 blocks" if left.square else "their last axes differ"
        raise RequestError(asked, so, "Give [m, k] in 1 x 128 blocks and [n, k].")
    for operand in (left, right):
        wanted = (operand.elements.shape[0] // (SIDE if operand.square else 1), k // SIDE)
        if operand.scales.shape != wanted:
            raise RequestError(asked, f"scales are {list(operand.scales.shape)} where fp8_block has {list(wanted)}", "Cast both with this package.")
    reasons = library_reasons(m, n, k, right.square) if way == "library" else [f"{n} is no multiple of 256"] if way == "wide" and n % 256 else []
    if reasons:
        raise RequestError(f"{asked} by way {way!r}", "; ".join(reasons), 'Leave the way out, or give way="own".')
    way, device = way or choose(m, n, k, right.square), left.elements.device
    bias = None if bias is None else bias.to(dtype)  # a sum of two dtypes is several times as slow
    if 0 in (m, n, k):
        out = torch.zeros(m, n, dtype=dtype, device=device)
    elif way == "library":
        added = bias if dtype == torch.bfloat16 and right.square and bias is not None and library_adds_bias(device) else None
        out = torch._scaled_mm(left.elements, right.elements.t(), left.scales, right.scales.t(), bias=added, out_dtype=dtype)
        bias = None if added is not None else bias
    else:
        out = _own(left, right, dtype, wide=way == "wide")
    return out if bias is None else out.add_(bias)


def library_reasons(m: int, n: int, k: int, square: bool) -> list[str]:
    """Why ``torch._scaled_mm`` is not trusted with a shape, whose kind of scales it infers from their shape and strides; none if it is.

    A single block along the contraction has the shape of one scale a row. Releases differ in the rows of scales of 128 x 128 blocks: some want
    them to begin at multiples of 16 bytes; both agree where the number of blocks is a multiple of four.
    """
    if k <= SIDE:
        return [f"{k} elements along the contraction are one block, whose scales look like scales of rows"]
    if square and k % (4 * SIDE):
        return [f"{k} elements along the contraction are no multiple of {4 * SIDE}"]
    return []


@cache
def library_adds_bias(device: torch.device) -> bool:
    """Whether ``torch._scaled_mm`` adds a bias to products with scales of blocks; where it does not, adding it costs a pass."""
    zeros, bias = torch.zeros(SIDE, 4 * SIDE, device=device).to(torch.float8_e4m3fn), torch.arange(SIDE, device=device).bfloat16()
    by_row, by_square = torch.ones(4, SIDE, device=device).t(), torch.ones(1, 4, device=device)
    try:
        out = torch._scaled_mm(zeros, zeros.t(), by_row, by_square.t(), bias=bias, out_dtype=torch.bfloat16)
    except (RuntimeError, ValueError):
        return False
    return bool((out == bias).all())


def choose(m: int, n: int, k: int, square: bool) -> Way:
    """Who computes ``[m, k] [n, k]^T``: the library where it can, but for few tiles of 128 x 128 and a contraction long enough to be split."""
    tiles = (m // SIDE) * (n // SIDE)
    if tiles <= FEW_TILES and shares(tiles, k) > 1:
        return "wide" if n % (2 * SIDE) == 0 else "own"
    return "own" if library_reasons(m, n, k, square) else "library"


def shares(tiles: int, k: int) -> int:
    """Into how many parts our kernel splits the contraction: a program a multiprocessor, and at least 16 blocks a part."""
    return max(1, min(MULTIPROCESSORS // tiles, k // SIDE // 16)) if tiles else 1


def _own(left: Operand, right: Operand, dtype: torch.dtype, *, wide: bool) -> Tensor:
    (m, k), n = left.elements.shape, right.elements.shape[0]
    blocks, tiles = k // SIDE, (m // SIDE) * (n // (2 * SIDE if wide else SIDE))
    share = -(-blocks // shares(tiles, k))
    parts = -(-blocks // share)  # none is empty
    out = torch.empty(parts, m, n, dtype=dtype if parts == 1 else torch.float32, device=left.elements.device)
    boxes = [TensorDescriptor.from_tensor(operand.elements, [SIDE, SIDE]) for operand in (left, right)]
    product_kernel[(tiles, parts)](
        *boxes, left.scales, right.scales, out, m, n, blocks, share, SQUARE=right.square, WIDE=wide, STAGES=3 if wide else 4, num_warps=WARPS
    )
    return out[0] if parts == 1 else out.sum(0).to(dtype)
