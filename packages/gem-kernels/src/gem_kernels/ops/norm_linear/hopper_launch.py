"""Launches of the Hopper kernels of ``norm_linear``: 16-bit inputs, both widths up to 256. Importing this module needs no triton."""

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gem_core.ops.dispatch import cuda_arch
from gem_kernels.common.compiled import Block, Described
from gem_kernels.ops import host

ARCH = 90
ROWS = 64
"""Rows of a tile."""
WIDTH = 256
"""Widest x and result."""
SHARED = 224 * 512
"""16-bit values that fit into the shared memory of a program."""
Maybe = Tensor | None


class Cut(NamedTuple):
    """Padded columns of the result and of x, and tiles in flight."""

    block: int
    wide: int
    stages: int


@cache
def cut(width: int, inner: int) -> Cut | None:
    """How the forward kernel cuts a product with a ``[width, inner]`` matrix; None if that does not fit into shared memory."""
    block, wide = (max(64, host.block_width(size)) for size in (width, inner))
    if max(block, wide) > WIDTH:
        return None
    results = 0 if block == wide else 2 * ROWS * block
    return Cut(block, wide, min(4, (SHARED - block * wide - results) // (ROWS * wide)))


@cache
def cut_grad(width: int, inner: int) -> Cut | None:
    """As ``cut``, for the kernel of the gradients, whose programs hold half of the matrix."""
    block, wide = (max(128, host.block_width(size)) for size in (width, inner))
    if max(block, wide) > WIDTH or inner % 8:
        return None
    return Cut(block, wide, min(3, (SHARED - block * wide // 2) // (ROWS * (2 * block + wide // 2))))


def here(x: Tensor) -> bool:
    """Whether the kernels run on the device of ``x``."""
    return x.is_cuda and not host.interpreted() and cuda_arch(x.device.index or 0) == ARCH


def forward(
    x: Tensor, weight: Tensor, *, before: bool, layer: bool, eps: float, bias: Maybe, gamma: Maybe = None, beta: Maybe = None, sums: Maybe = None,
    factors: Maybe = None,
) -> Tensor:  # fmt: skip
    """The result, and in ``factors`` ``[rows]`` float32, unless None, what each row was multiplied by.

    ``before`` takes gamma and beta inside weight and bias, and for LayerNorm ``sums``, those of the weight's rows.
    """
    found = cut(*weight.shape)
    assert found is not None
    out = x.new_empty((x.shape[0], weight.shape[0]))
    host.launch_persistent(
        _module("hopper").norm_linear_kernel, x, _tiles(x), host.multiprocessors(x), x_desc=_described(x, ROWS, found.wide),
        weight_desc=_described(weight, found.block, found.wide), out_desc=_described(out, ROWS, found.block), factors=factors, bias=bias, gamma=gamma,
        beta=beta, sums=sums, rows=x.shape[0], eps=eps, BEFORE=before, LAYER=layer, WIDTH=weight.shape[0], INNER=x.shape[1], ROWS=ROWS,
        BLOCK=found.block, WIDE=found.wide, STAGES=found.stages, num_warps=4,
    )  # fmt: skip
    return out


def backward(
    dout: Tensor, x: Tensor, weight: Tensor, bias: Maybe, gamma: Maybe, out: Tensor, factors: Tensor, *, before: bool, eps: float
) -> tuple[Tensor, Tensor, Maybe, Maybe]:
    """Gradients of x, weight, bias and gamma of an RMSNorm without a residual; ``factors`` as ``forward`` wrote them."""
    (width, inner), found = weight.shape, cut_grad(*weight.shape)
    assert found is not None
    matrix, other = weight, out
    if gamma is not None and before:
        matrix = weight * gamma
    elif gamma is not None:
        other = forward(x, weight, before=False, layer=False, eps=eps, bias=bias)  # what gamma has multiplied
    pairs = max(1, min(_tiles(x), host.multiprocessors(x) // 2))
    dx = x.new_empty(x.shape)
    dweight = x.new_empty((pairs, width, inner), dtype=torch.float32)
    sums = bias is not None or (gamma is not None and not before)
    dcolumns = x.new_empty((pairs, 2, 8, width), dtype=torch.float32) if sums else None
    dout, other = (t if t.data_ptr() % 16 == 0 else t.clone() for t in (dout.contiguous(), other))
    host.launch_persistent(
        _module("hopper_grad").norm_linear_grad_kernel, x, 2 * _tiles(x), 2 * pairs,
        dout_desc=_described(dout, ROWS, found.block), other_desc=_described(other, ROWS, found.block), x_desc=_described(x, ROWS, found.wide // 2),
        weight_desc=_described(matrix, found.block, found.wide // 2), dx_desc=_described(dx, ROWS, found.wide // 2), r=factors,
        gamma=None if before else gamma, bias=bias if before else None, dweight=dweight, dcolumns=dcolumns, rows=x.shape[0], BEFORE=before,
        WIDTH=width, INNER=inner, ROWS=ROWS, BLOCK=found.block, HALF=found.wide // 2, STAGES=found.stages, num_warps=8,
    )  # fmt: skip
    whole = dweight.sum(0)
    of_gamma, of_bias = (None, None) if dcolumns is None else dcolumns.sum((0, 2)).to(x.dtype).unbind()
    if before and gamma is not None:
        of_gamma = (whole * weight).sum(0).to(x.dtype)
        whole = whole * gamma
    return dx, whole.to(x.dtype), None if bias is None else of_bias, None if gamma is None else of_gamma


def _tiles(x: Tensor) -> int:
    return -(-x.shape[0] // ROWS)


@cache
def _module(name: str) -> Any:
    return import_module(f"gem_kernels.ops.norm_linear.{name}")


def _described(x: Tensor, rows: int, columns: int) -> Block:
    """Descriptor of blocks of a matrix."""
    return Block((x, _tile(rows, columns, x.dtype)))


@cache
def _tile(rows: int, columns: int, dtype: torch.dtype) -> Described:
    shared = import_module("gem_kernels.common.hopper.launch")
    return Described((rows, columns), shared.gl.NVMMASharedLayout.get_default_for([rows, columns], shared.DTYPES[dtype]))
