"""Launches of the row kernels: norms of rows and their gradients, for ``norm_linear`` and for the ops that are norms with something around them."""

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gem_kernels.ops import host
from gem_kernels.ops.places import parts_in

Maybe = Tensor | None
PROGRAMS = 1056
"""Programs that add up columns' gradients, whatever the device, so that their rounding is the same everywhere; eight for each SM of an H200."""
HELD, SUMMED = 4096, 2048
"""Values of a tile: of most kernels, and of one that holds sums of tiles beside them."""
GATED_REGISTERS = 128
"""Most registers of a thread that holds sums of tiles and a gate: an SM then holds four of ``PROGRAMS``, and all of them take two even turns; left to
itself the compiler takes 167 for rows of 256."""


class RowGrads(NamedTuple):
    """What ``norm_rows_grad`` gives: gradients of x (that of the residual is the same), gamma, beta and the gate, the normed rows, and the sum of the
    first over rows; None for what is not there or not asked for."""

    dz: Tensor
    dgamma: Maybe
    dbeta: Maybe
    dgate: Maybe
    normed: Maybe
    total: Maybe


@cache
def _rows() -> Any:
    return import_module("gem_kernels.ops.norm_linear.rows")


def row_tile(width: int, values: int = HELD) -> tuple[int, int, int]:
    """Rows and columns of a tile of whole rows, about ``values`` of them, and warps."""
    block = host.block_width(width)
    return max(1, min(16, values // block)), block, 4 if block <= 2048 else 8


def row_statistics(x: Tensor, *, layer: bool, eps: float) -> tuple[Tensor, Maybe]:
    """What a norm multiplies each row of ``[rows, width]`` by, ``[rows]`` float32, and for LayerNorm the rows' means."""
    rows, width = x.shape
    factors = x.new_empty(rows, dtype=torch.float32)
    means = torch.empty_like(factors) if layer else None
    tile, block, warps = row_tile(width)
    host.launch(
        _rows().statistics_kernel, x, -(-rows // tile), x=x, factors=factors, means=means, rows=rows, eps=eps, x_stride=x.stride(0), LAYER=layer,
        WIDTH=width, ROWS=tile, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return factors, means


def norm_rows(
    x: Tensor, residual: Maybe, gamma: Maybe, beta: Maybe, *, layer: bool, eps: float, gate: Maybe = None, concat: Maybe = None, keep: bool = False,
    factors: Maybe = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``N(x + residual) gate`` of ``[rows, width]``, with ``concat`` behind the gate and it, and, with ``keep``, ``x + residual`` (else an empty
    tensor); ``factors`` ``[rows]`` float32 get what each row was multiplied by."""
    rows, width = x.shape
    out, total = x.new_empty((rows, width if concat is None else 3 * width)), x.new_empty(x.shape if keep else (0,))
    if x.numel():
        tile, block, warps = row_tile(width)
        host.launch(
            _rows().forward_kernel, x, -(-rows // tile), x=x, residual=residual, gamma=gamma, beta=beta, gate=gate,
            concat=concat, out=out, total=total if keep else None, factors=factors, rows=rows, eps=eps,
            **_strides(x=x, residual=residual, gate=gate, concat=concat), LAYER=layer, WIDTH=width, ROWS=tile, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return out, total


def norm_rows_grad(
    dy: Tensor, x: Tensor, residual: Maybe, gamma: Maybe, beta: Maybe, *, layer: bool, eps: float, gate: Maybe = None, dgate: Maybe = None,
    dbeside: Maybe = None, dtotal: Maybe = None, factors: Maybe = None, normed: bool = False, total: bool = False,
) -> RowGrads:  # fmt: skip
    """Gradients of ``norm_rows`` in one pass over memory.

    Args:
        dy: ``[..., width]``, the gradient of the result, read where it lies: models hand on columns of a wider gradient.
        x, residual, gamma, beta, layer, eps, gate: as ``norm_rows`` got them.
        dgate: ``[rows, width]``, memory for the gradient of the gate, alone or among others of one tensor; None for memory of its own.
        dbeside: gradient of the gate, from elsewhere.
        dtotal: gradient of what was normed, from elsewhere.
        factors: ``[rows]`` float32, what each row was multiplied by; ``x`` then are the normed rows.
        normed: also give ``N(x + residual)``.
        total: also give the sum over rows of the gradient of x.
    """
    rows, width = x.shape
    (dy,) = host.readable(dy.reshape(rows, width))
    dtotal, dbeside = (None if t is None else host.readable(t.reshape(rows, width))[0] for t in (dtotal, dbeside))
    dz, rows_out = x.new_empty(x.shape), x.new_empty(x.shape) if normed else None
    if gate is not None and dgate is None:
        dgate = x.new_empty(x.shape)
    columns = (gamma is not None, beta is not None, total)
    tile, block, warps = row_tile(width, SUMMED if any(columns) else HELD)
    programs = min(PROGRAMS if any(columns) else host.MAX_GRID, -(-rows // tile))
    dgamma, dbeta, dsum = (x.new_zeros((programs, width), dtype=torch.float32) if wanted else None for wanted in columns)
    if x.numel():
        most = GATED_REGISTERS if gate is not None and any(columns) and warps == 4 else None
        host.launch(
            _rows().backward_kernel, x, -(-rows // tile), programs=programs, x=x, residual=residual, gamma=gamma, beta=beta, gate=gate,
            factors=factors, dy=dy, dtotal=dtotal, dbeside=dbeside, dz=dz, normed=rows_out, dgamma=dgamma, dbeta=dbeta, dgate=dgate, dsum=dsum,
            rows=rows, eps=eps, **_strides(x=x, residual=residual, gate=gate, dy=dy, dtotal=dtotal, dbeside=dbeside), LAYER=layer, WIDTH=width,
            ROWS=tile, BLOCK=block, GATE_PARTS=1 if dgate is None else parts_in(dgate), num_warps=warps, maxnreg=most,
        )  # fmt: skip
    return RowGrads(dz, _added(dgamma, x.dtype), _added(dbeta, x.dtype), dgate, rows_out, _added(dsum, x.dtype))


def _strides(**tensors: Maybe) -> dict[str, int]:
    """Steps from row to row, 0 where there are none."""
    return {f"{name}_stride": 0 if t is None else t.stride(0) for name, t in tensors.items()}


def _added(parts: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if parts is None else parts.sum(0).to(dtype)
