"""The backends of ``hstu_attention``: custom ops with fake and autograd registration, FLOP formulas. The first call imports triton.

``gluon`` has kernels of its own for Hopper, both ways.
"""

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from gem_core.ops.hstu_attention import flops
from gem_kernels.ops import host
from gem_kernels.ops.direct import differentiable, direct, unwatched
from gem_kernels.ops.limits import MAX_WIDTH
from gem_kernels.ops.places import grad_memory, parts_in


class Config(NamedTuple):
    """``block_m`` queries and ``block_n`` keys a tile, warps of a program, and stages of the load pipeline."""

    block_m: int
    block_n: int
    warps: int
    stages: int


SHORT, MIDDLE = 512, 1024
"""Longest rows up to these count as short, and as middling for the forward pass: measured on an H200."""
SHORT_ROWS = {
    "forward": Config(64, 32, 4, 4),
    "query_grad": Config(64, 32, 4, 3),
    "key_grad": Config(32, 64, 4, 3),
    "bias_grad": Config(64, 64, 4, 1),
}
LONG_ROWS = {"forward": Config(128, 64, 8, 3), "query_grad": Config(128, 64, 8, 3), "key_grad": Config(32, 128, 8, 3)}
"""16-bit inputs with heads up to 128, as ``SHORT_ROWS``."""
INTERPRETER = Config(32, 64, 1, 1)
"""Unequal, so that mixing up the two sizes shows."""


def choose(kernel: str, width: int, *, wide_dtype: bool, longest: int, roomy: bool) -> Config:
    """Tile shapes by kernel (``forward``, ``query_grad``, ``key_grad``, ``bias_grad``), padded head size and longest row: few, so few variants are
    compiled. ``roomy``: an SM has the shared memory of Hopper."""
    if wide_dtype:
        return Config(32, 32, 8, 1) if width <= 128 else Config(16, 16, 4, 1)
    if width > 128:
        stages = 2 if roomy else 1
        return Config(32, 64, 8, stages) if kernel == "key_grad" else Config(64, 32, 8, stages)
    if kernel == "bias_grad" or longest <= SHORT or not roomy:
        return SHORT_ROWS[kernel] if roomy else SHORT_ROWS[kernel]._replace(stages=2)
    if kernel == "forward" and longest <= MIDDLE:
        return Config(64, 64, 4, 3)
    return LONG_ROWS[kernel]


def gluon(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, **options: Any) -> Tensor:
    """As ``hstu_attention``, by the Hopper kernels: without prefix, targets and bias. A value width that is no power of two is padded."""
    missing = max(host.block_width(v.shape[-1]), 32) - v.shape[-1]
    if not missing:
        return hstu_attention(q, k, v, offsets, **options, hopper=True)
    return hstu_attention(q, k, F.pad(v, (0, missing)), offsets, **options, hopper=True)[..., :-missing].contiguous()


def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    max_length: int,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    contextual: Tensor | None = None,
    targets: Tensor | None = None,
    bias: Tensor | None = None,
    norm_length: int | None = None,
    hopper: bool = False,
) -> Tensor:
    """HSTU's pointwise attention; shapes and meaning are those of ``gem_core.ops.hstu_attention``.

    Raises:
        KernelUnavailable: dtype, head size or device that this backend does not take.
        MachineError: triton is missing, or the tensors lie on the CPU and the interpreter is off.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    norm = 1.0 / (max(max_length, 1) if norm_length is None else norm_length)
    settings = (max_length, factor, norm, causal, window, hopper)
    out: Tensor = _op(q, k, v, offsets, contextual, targets, bias, *settings)
    return out


@cache
def _kernels() -> Any:
    return import_module("gem_kernels.ops.hstu_attention.triton")


@cache
def _hopper() -> Any:
    return import_module("gem_kernels.ops.hstu_attention.hopper")


class _Inputs(NamedTuple):
    """Arguments of the custom ops, in order."""

    q: Tensor
    k: Tensor
    v: Tensor
    offsets: Tensor
    contextual: Tensor | None
    targets: Tensor | None
    bias: Tensor | None
    max_length: int
    scale: float
    norm: float
    causal: bool
    window: int | None
    hopper: bool

    def made_readable(self) -> "_Inputs":
        q, k, v = host.readable(self.q, self.k, self.v)
        bias = None if self.bias is None else self.bias.contiguous()
        return self._replace(q=q, k=k, v=v, bias=bias)

    @property
    def rows(self) -> int:
        return self.offsets.shape[0] - 1

    def nothing_to_do(self) -> bool:
        return self.rows == 0 or self.max_length == 0

    def config(self, kernel: str) -> Config:
        if host.interpreted():
            return INTERPRETER
        width = max(host.block_width(self.q.shape[-1]), host.block_width(self.v.shape[-1]))
        return choose(kernel, width, wide_dtype=self.q.element_size() > 2, longest=self.max_length, roomy=host.roomy(self.q))

    def tiles(self, size: int) -> int:
        return self.rows * self.q.shape[1] * -(-self.max_length // size)

    def run(self, kernel: str, config: Config, tiles: int, **results: Any) -> None:
        q, k, v, bias = self.q, self.k, self.v, self.bias
        rows_differ, heads_differ = (False, False) if bias is None else (bias.shape[0] > 1, bias.shape[1] > 1)
        host.launch(
            getattr(_kernels(), f"{kernel}_kernel"), q, tiles, q=q, k=k, v=v, bias=bias, offsets=self.offsets, contextual=self.contextual,
            targets=self.targets, rows=self.rows, heads=q.shape[1], total=q.shape[0], max_length=self.max_length, scale=self.scale, norm=self.norm,
            window=self.window or 0, q_token=q.stride(0), q_head=q.stride(1), k_token=k.stride(0), k_head=k.stride(1), v_token=v.stride(0),
            v_head=v.stride(1), bias_row=bias.stride(0) if bias is not None and rows_differ else 0,
            bias_head=bias.stride(1) if bias is not None and heads_differ else 0, DIM=q.shape[2], V_DIM=v.shape[2], BLOCK_M=config.block_m,
            BLOCK_N=config.block_n, BLOCK_D=host.block_width(q.shape[2]), BLOCK_V=host.block_width(v.shape[2]), CAUSAL=self.causal,
            WINDOW=self.window is not None, CONTEXTUAL=self.contextual is not None, TARGETS=self.targets is not None, BIAS=bias is not None,
            FAST=host.approximate(q), PRECISION=host.precision(q), num_warps=config.warps, num_stages=config.stages, **results,
        )  # fmt: skip


@torch.library.custom_op("gem_kernels::hstu_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    contextual: Tensor | None,
    targets: Tensor | None,
    bias: Tensor | None,
    max_length: int,
    scale: float,
    norm: float,
    causal: bool,
    window: int | None,
    hopper: bool,
) -> Tensor:
    host.check_call("hstu_attention", q, (k, v, bias), width=max(q.shape[-1], v.shape[-1]), limit=MAX_WIDTH)
    call = _Inputs(q, k, v, offsets, contextual, targets, bias, max_length, scale, norm, causal, window, hopper).made_readable()
    shape = (q.shape[0], q.shape[1], v.shape[-1])
    if call.nothing_to_do():
        return q.new_zeros(shape)
    out = q.new_empty(shape)
    if hopper:
        _hopper().forward(call, out)
    else:
        config = call.config("forward")
        call.run("forward", config, call.tiles(config.block_m), out=out)
    return out


@torch.library.custom_op("gem_kernels::hstu_attention_grad", mutates_args=())
def _grad(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    contextual: Tensor | None,
    targets: Tensor | None,
    bias: Tensor | None,
    max_length: int,
    scale: float,
    norm: float,
    causal: bool,
    window: int | None,
    hopper: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = _Inputs(q, k, v, offsets, contextual, targets, bias, max_length, scale, norm, causal, window, hopper)
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    _write_gradients(dout, inputs, dq, dk, dv)
    return dq, dk, dv


def _write_gradients(dout: Tensor, inputs: _Inputs, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    call = inputs.made_readable()
    if call.nothing_to_do():
        for grad in (dq, dk, dv):
            grad.zero_()
        return
    if call.hopper:
        _hopper().grad(call, dout, dq, dk, dv)
        return
    dout = dout.contiguous()
    config = call.config("query_grad")
    call.run("query_grad", config, call.tiles(config.block_m), dout=dout, dq=dq, DQ_PARTS=parts_in(dq))
    config = call.config("key_grad")
    call.run("key_grad", config, call.tiles(config.block_n), dout=dout, dk=dk, dv=dv, DK_PARTS=parts_in(dk), DV_PARTS=parts_in(dv))


@torch.library.custom_op("gem_kernels::hstu_attention_bias_grad", mutates_args=())
def _bias_grad(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    contextual: Tensor | None,
    targets: Tensor | None,
    bias: Tensor,
    max_length: int,
    scale: float,
    norm: float,
    causal: bool,
    window: int | None,
    hopper: bool,
) -> Tensor:
    call = _Inputs(q, k, v, offsets, contextual, targets, bias, max_length, scale, norm, causal, window, hopper).made_readable()
    if call.nothing_to_do():
        return bias.new_zeros(bias.shape)
    dbias = bias.new_empty(bias.shape)
    config = call.config("bias_grad")
    tiles = bias.shape[0] * bias.shape[1] * -(-max_length // config.block_m) * -(-max_length // config.block_n)
    groups = {"row_group": call.rows // bias.shape[0], "head_group": q.shape[1] // bias.shape[1]}
    call.run("bias_grad", config, tiles, dout=dout.contiguous(), dbias=dbias, **groups)
    return dbias


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], v.shape[-1]))


@_grad.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@_bias_grad.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, contextual: Any, targets: Any, bias: Tensor, *rest: Any) -> Tensor:
    return bias.new_empty(bias.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.settings = inputs[7:]


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    tensors, wanted = ctx.saved_tensors, ctx.needs_input_grad
    dq = dk = dv = dbias = None
    if any(wanted[:3]) and unwatched((dout, *tensors)):
        dq, dk, dv = grad_memory(ctx.next_functions[:3], tensors[:3])
        _write_gradients(dout, _Inputs(*tensors, *ctx.settings), dq, dk, dv)
    elif any(wanted[:3]):
        dq, dk, dv = _grad(dout, *tensors, *ctx.settings)
    if wanted[6]:
        dbias = direct(_bias_grad, dout, *tensors, *ctx.settings)
    return (dq, dk, dv, None, None, None, dbias, *(None,) * 6)


_op = differentiable(_forward, _backward, _save)


def _counts(counts: Tensor | None) -> list[int] | int:
    """Lengths of the parts of rows; fake ones hold no values and count as none."""
    if counts is None or isinstance(counts, FakeTensor):
        return 0
    numbers: list[int] = counts.tolist()
    return numbers


@register_flop_formula(torch.ops.gem_kernels.hstu_attention, get_raw=True)
def _forward_flops(*args: Any, **kwargs: Any) -> int:
    call = _Inputs(*args[: len(_Inputs._fields)])
    return flops(
        lengths=host.row_lengths(call.offsets, call.max_length),
        heads=call.q.shape[1],
        dim=call.q.shape[2],
        v_dim=call.v.shape[2],
        causal=call.causal,
        window=call.window,
        contextual=_counts(call.contextual),
        targets=_counts(call.targets),
    )


@register_flop_formula(torch.ops.gem_kernels.hstu_attention_grad, get_raw=True)
def _backward_flops(dout: Tensor, *args: Any, **kwargs: Any) -> int:
    """Four gradient products; the recomputed scores, and those of the bias's gradient, are not model FLOPs."""
    return 2 * _forward_flops(*args, **kwargs)
