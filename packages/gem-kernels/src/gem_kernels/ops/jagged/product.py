"""The ``triton`` backend of ``jagged_dense_bmm_add``: custom ops with fake and autograd registration, FLOPs. The first call imports triton."""

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gem_core.ops.jagged import bmm_flops
from gem_kernels.ops import host
from gem_kernels.ops.direct import differentiable, direct


def jagged_dense_bmm_add(values: Tensor, offsets: Tensor, dense: Tensor, bias: Tensor, *, max_length: int) -> Tensor:
    """``values_r dense[r] + bias[r]`` for each row; shapes and meaning are those of ``gem_core.ops.jagged_dense_bmm_add``.

    Raises:
        KernelUnavailable: dtype or device that this backend does not take.
        MachineError: triton is missing, or the tensors lie on the CPU and the interpreter is off.
    """
    out: Tensor = _op(values, offsets, dense, bias, max_length)
    return out


@cache
def _kernels() -> Any:
    return import_module("gem_kernels.ops.jagged.triton")


def _blocks(x: Tensor, tiled: int, width: int) -> dict[str, int]:
    """Tile sizes and launch options; ``tiled`` values along the rows of a tile, ``width`` along its columns."""
    if host.interpreted():
        return {"ROWS": 32, "BLOCK": 32, "STEP": 16, "num_warps": 1, "num_stages": 1}
    if x.element_size() > 2:
        return {"ROWS": 32, "BLOCK": 32, "STEP": 32, "num_warps": 4, "num_stages": 1}
    return {"ROWS": min(64, host.block_width(tiled)), "BLOCK": min(128, host.block_width(width)), "STEP": 32, "num_warps": 4, "num_stages": 3}


def _product(x: Tensor, offsets: Tensor, matrices: Tensor, bias: Tensor | None, max_length: int) -> Tensor:
    """x times the matrix of each row, a strided view ``[rows, in, out]``."""
    rows, inner, width = matrices.shape
    x = host.readable(x)[0]
    if rows == 0 or max_length == 0 or 0 in (inner, width):
        return x.new_zeros((x.shape[0], width))
    out = x.new_empty((x.shape[0], width))
    blocks = _blocks(x, max_length, width)
    tiles = rows * -(-max_length // blocks["ROWS"]) * -(-width // blocks["BLOCK"])
    host.launch(
        _kernels().product_kernel, x, tiles, x=x, matrices=matrices, bias=bias, out=out, offsets=offsets, rows=rows, total=x.shape[0],
        max_length=max_length, x_token=x.stride(0), m_row=matrices.stride(0), m_in=matrices.stride(1), m_out=matrices.stride(2),
        b_row=0 if bias is None else bias.stride(0), INNER=inner, WIDTH=width, PRECISION=host.precision(x), **blocks,
    )  # fmt: skip
    return out


@torch.library.custom_op("gem_kernels::jagged_dense_bmm_add", mutates_args=())
def _forward(values: Tensor, offsets: Tensor, dense: Tensor, bias: Tensor, max_length: int) -> Tensor:
    host.check_call("jagged_dense_bmm_add", values, (dense, bias))
    return _product(values, offsets, dense, host.readable(bias)[0], max_length)


@torch.library.custom_op("gem_kernels::jagged_dense_bmm_add_grad", mutates_args=())
def _grad(dout: Tensor, values: Tensor, offsets: Tensor, dense: Tensor, max_length: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, inner, width = dense.shape
    dvalues = _product(dout, offsets, dense.mT, None, max_length)
    if rows == 0 or max_length == 0 or 0 in (inner, width):
        return dvalues, dense.new_zeros(dense.shape), dense.new_zeros((rows, width))
    ddense, dbias = dense.new_empty(dense.shape), dense.new_empty((rows, width))
    values = host.readable(values)[0]
    blocks = _blocks(values, inner, width)
    host.launch(
        _kernels().matrix_grad_kernel, values, rows * -(-inner // blocks["ROWS"]) * -(-width // blocks["BLOCK"]), x=values, dout=dout.contiguous(),
        dmatrices=ddense, dbias=dbias, offsets=offsets, rows=rows, total=values.shape[0], max_length=max_length, x_token=values.stride(0),
        INNER=inner, WIDTH=width, PRECISION=host.precision(values), **blocks,
    )  # fmt: skip
    return dvalues, ddense, dbias


@_forward.register_fake
def _(values: Tensor, offsets: Tensor, dense: Tensor, bias: Tensor, max_length: int) -> Tensor:
    return values.new_empty((values.shape[0], dense.shape[2]))


@_grad.register_fake
def _(dout: Tensor, values: Tensor, offsets: Tensor, dense: Tensor, max_length: int) -> tuple[Tensor, Tensor, Tensor]:
    return values.new_empty(values.shape), dense.new_empty(dense.shape), dense.new_empty((dense.shape[0], dense.shape[2]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.max_length = inputs[4]


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    dvalues, ddense, dbias = direct(_grad, dout, *ctx.saved_tensors, ctx.max_length)
    return dvalues, None, ddense, dbias, None


_op = differentiable(_forward, _backward, _save)


@register_flop_formula(torch.ops.gem_kernels.jagged_dense_bmm_add, get_raw=True)
def _forward_flops(values: Tensor, offsets: Tensor, dense: Tensor, bias: Any, max_length: int, *args: Any, **kwargs: Any) -> int:
    return bmm_flops(lengths=host.row_lengths(offsets, max_length), in_features=dense.shape[1], out_features=dense.shape[2])


@register_flop_formula(torch.ops.gem_kernels.jagged_dense_bmm_add_grad, get_raw=True)
def _backward_flops(dout: Tensor, values: Tensor, offsets: Tensor, dense: Tensor, max_length: int, *args: Any, **kwargs: Any) -> int:
    """Two gradient products."""
    return 2 * _forward_flops(values, offsets, dense, None, max_length)
