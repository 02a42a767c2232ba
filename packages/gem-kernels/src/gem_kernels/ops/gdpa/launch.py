"""The ``triton`` backend of ``gdpa``: checks, launch, custom ops with fake and autograd registration, FLOP formulas.

Importing this module needs no triton; the first call does.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from gem_core.ops.dispatch import cuda_arch
from gem_core.ops.gdpa import flops
from gem_core.spec import KernelUnavailable, MachineError, RequestError
from gem_kernels.ops.gdpa.configs import INTERPRETER, Config, block_width, choose, config_key
from gem_kernels.ops.gdpa.limits import MAX_WIDTH, NO_BF16

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_GRID = 2**31 - 1
MAX_TOKEN_STRIDE = 2**24 - 1
"""In elements: 128 rows of a tile stay below 2^31."""
QUERY_RUNS = 256
"""A shared query's gradient is added up in at most this many runs of rows, whatever the device, so that its rounding is the same everywhere."""


def gdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor | None,
    *,
    max_q: int,
    max_k: int,
    activation: str = "gelu",
    scale: float = 1.0,
    scale_position: str = "inside",
    window: int | None = None,
) -> Tensor:
    """Generalised dot-product attention; the meaning is that of ``gem_core.ops.gdpa``.

    Args:
        q: ``[q_tokens, heads, dim]``, or ``[queries, heads, dim]`` shared by all rows when ``q_offsets`` is None.
        k: ``[k_tokens, kv_heads, dim]``, or ``[rows, keys, kv_heads, dim]`` when ``k_offsets`` is None.
        v: as ``k``, with its own last size.
        q_offsets: int64 ``[rows + 1]`` or None.
        k_offsets: int64 ``[rows + 1]`` or None.
        max_q: longest row of queries; tokens beyond it get zeros.
        max_k: longest row of keys; tokens beyond it are not seen.
        activation: f, by name.
        scale: c.
        scale_position: ``inside`` computes f(c s), ``after`` computes c f(s).
        window: largest distance between a query and a key it sees, positions aligned at the end of the row.

    Returns:
        ``[q_tokens, heads, v_dim]`` (``[rows * queries, heads, v_dim]`` for a shared query), in q's dtype; accumulated in float32.

    Raises:
        KernelUnavailable: dtype, head size or device that this backend does not take.
        MachineError: triton is missing, or the tensors lie on the CPU and the interpreter is off.
    """
    if scale_position not in ("inside", "after"):
        raise RequestError(f"gdpa scale_position={scale_position!r}", "it is neither 'inside' nor 'after'", "Choose one of the two.")
    out: Tensor = torch.ops.gem_kernels.gdpa(q, k, v, q_offsets, k_offsets, max_q, max_k, activation, float(scale), scale_position == "after", window)
    return out


def _check_call(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Inside the custom op, where a compiler does not look."""
    asked = "gdpa with backend 'triton'"
    if not (q.dtype == k.dtype == v.dtype) or q.dtype not in DTYPES:
        raise KernelUnavailable(asked, f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}", "Give all three the same dtype: float32, bfloat16 or float16.")
    width = max(q.shape[-1], v.shape[-1])
    if width > MAX_WIDTH:
        raise KernelUnavailable(asked, f"head size {width} is above {MAX_WIDTH}", "Use more heads, or backend='reference'.")
    if _interpreted() and q.dtype is torch.bfloat16:
        raise KernelUnavailable(asked, NO_BF16, "Use float32 or float16, or a GPU.")
    if not _interpreted() and not q.is_cuda:
        raise MachineError(asked, f"the tensors lie on {q.device}", "Move them to a GPU, or set TRITON_INTERPRET=1 before triton is imported.")


@cache
def _kernels() -> Any:
    return import_module("gem_kernels.ops.gdpa.triton")


@cache
def _interpreted() -> bool:
    kernels = _kernels()
    return not isinstance(kernels.forward_kernel, kernels.triton.JITFunction)


@dataclass(frozen=True, slots=True)
class _Call:
    """Shapes, strides and compile-time choices that the three kernels share."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_offsets: Tensor | None
    k_offsets: Tensor | None
    max_q: int
    max_k: int
    activation: str
    scale: float
    scale_after: bool
    window: int | None

    @property
    def rows(self) -> int:
        return _rows(self.q_offsets, self.k, self.k_offsets)

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[-2]

    def nothing_to_do(self) -> bool:
        return self.rows == 0 or self.max_q == 0 or self.max_k == 0

    def config(self, direction: str) -> Config:
        if _interpreted():
            return INTERPRETER
        length = self.max_k if direction == "key_grad" else self.max_q
        dim, v_dim = self.q.shape[-1], self.v.shape[-1]
        return choose(
            config_key(direction, dim=dim, v_dim=v_dim, itemsize=self.q.element_size(), max_length=length, arch=cuda_arch(self.q.device.index or 0))
        )

    def kernel_activation(self) -> str:
        return "gelu_16bit" if self.activation == "gelu" and self.q.element_size() == 2 else self.activation

    def run(self, kernel: Any, config: Config, tiles: int, **arguments: Any) -> None:
        dim, v_dim = self.q.shape[-1], self.v.shape[-1]
        dense = self.k_offsets is None
        with nullcontext() if self.q.device.type == "cpu" else torch.cuda.device(self.q.device):
            kernel[(min(tiles, MAX_GRID),)](
                q=self.q, k=self.k, v=self.v, q_offsets=self.q_offsets, k_offsets=self.k_offsets, rows=self.rows,
                q_total=self.q.shape[0], k_total=self.k.shape[0], max_q=self.max_q, max_k=self.max_k, tiles=tiles,
                scale=self.scale, window=self.window or 0, q_token=self.q.stride(0), q_head=self.q.stride(1),
                k_row=self.k.stride(0) if dense else 0, k_token=self.k.stride(-3), k_head=self.k.stride(-2),
                v_row=self.v.stride(0) if dense else 0, v_token=self.v.stride(-3), v_head=self.v.stride(-2),
                GROUP=self.heads // self.kv_heads, DIM=dim, V_DIM=v_dim, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
                BLOCK_D=block_width(dim), BLOCK_V=block_width(v_dim), ACTIVATION=self.kernel_activation(), SCALE_AFTER=self.scale_after,
                WINDOW=self.window is not None, PRECISION="ieee" if self.q.dtype is torch.float32 else "tf32",
                num_warps=config.warps, num_stages=config.stages, **arguments,
            )  # fmt: skip


def _rows(q_offsets: Tensor | None, k: Tensor, k_offsets: Tensor | None) -> int:
    if q_offsets is not None:
        return q_offsets.shape[0] - 1
    return k.shape[0] if k_offsets is None else k_offsets.shape[0] - 1


def _out_tokens(q: Tensor, k: Tensor, q_offsets: Tensor | None, k_offsets: Tensor | None) -> int:
    return q.shape[0] if q_offsets is not None else q.shape[0] * _rows(None, k, k_offsets)


def _readable(*tensors: Tensor) -> list[Tensor]:
    """The kernels step over the last axis one element at a time and keep offsets inside a tile in 32 bits; any other layout is copied."""
    return [t if t.stride(-1) == 1 and t.stride(-3) <= MAX_TOKEN_STRIDE else t.contiguous() for t in tensors]


@torch.library.custom_op("gem_kernels::gdpa", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor | None,
    max_q: int,
    max_k: int,
    activation: str,
    scale: float,
    scale_after: bool,
    window: int | None,
) -> Tensor:
    _check_call(q, k, v)
    q, k, v = _readable(q, k, v)
    call = _Call(q, k, v, q_offsets, k_offsets, max_q, max_k, activation, scale, scale_after, window)
    shape = (_out_tokens(q, k, q_offsets, k_offsets), call.heads, v.shape[-1])
    if call.nothing_to_do():
        return q.new_zeros(shape)
    out = q.new_empty(shape)
    config = call.config("forward")
    call.run(_kernels().forward_kernel, config, call.rows * call.heads * -(-max_q // config.block_m), out=out, heads=call.heads)
    return out


@torch.library.custom_op("gem_kernels::gdpa_query_grad", mutates_args=())
def _query_grad(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor | None,
    max_q: int,
    max_k: int,
    activation: str,
    scale: float,
    scale_after: bool,
    window: int | None,
) -> Tensor:
    q, k, v = _readable(q, k, v)
    call = _Call(q, k, v, q_offsets, k_offsets, max_q, max_k, activation, scale, scale_after, window)
    if call.nothing_to_do():
        return q.new_zeros(q.shape)
    config = call.config("query_grad")
    shared = q_offsets is None
    per_run = -(-call.rows // QUERY_RUNS) if shared else 1
    runs = -(-call.rows // per_run)
    dq = q.new_empty((runs, *q.shape), dtype=torch.float32) if shared else q.new_empty(q.shape)
    tiles = runs * call.heads * -(-max_q // config.block_m)
    call.run(_kernels().query_grad_kernel, config, tiles, dout=dout.contiguous(), dq=dq, heads=call.heads, rows_per_tile=per_run)
    return dq.sum(0).to(q.dtype) if shared else dq


@torch.library.custom_op("gem_kernels::gdpa_key_grad", mutates_args=())
def _key_grad(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor | None,
    max_q: int,
    max_k: int,
    activation: str,
    scale: float,
    scale_after: bool,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    q, k, v = _readable(q, k, v)
    call = _Call(q, k, v, q_offsets, k_offsets, max_q, max_k, activation, scale, scale_after, window)
    if call.nothing_to_do():
        return k.new_zeros(k.shape), v.new_zeros(v.shape)
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    config = call.config("key_grad")
    tiles = call.rows * call.kv_heads * -(-max_k // config.block_n)
    call.run(_kernels().key_grad_kernel, config, tiles, dout=dout.contiguous(), dk=dk, dv=dv, kv_heads=call.kv_heads)
    return dk, dv


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor | None, *rest: Any) -> Tensor:
    return q.new_empty((_out_tokens(q, k, q_offsets, k_offsets), q.shape[1], v.shape[-1]))


@_query_grad.register_fake
def _(dout: Tensor, q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape)


@_key_grad.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.settings = inputs[5:]


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    dq = dk = dv = None
    if ctx.needs_input_grad[0]:
        dq = torch.ops.gem_kernels.gdpa_query_grad(dout, *tensors, *ctx.settings)
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        dk, dv = torch.ops.gem_kernels.gdpa_key_grad(dout, *tensors, *ctx.settings)
    return (dq, dk, dv, *(None,) * 8)


_forward.register_autograd(_backward, setup_context=_save)


def _lengths(offsets: Tensor | None, rows: int, longest: int) -> Sequence[int]:
    """True lengths, cut at ``longest``; fake offsets hold no values, so there every row counts as the longest: an upper bound."""
    if offsets is None or isinstance(offsets, FakeTensor):
        return [longest] * int(rows)
    lengths: list[int] = offsets.diff().clamp(0, longest).tolist()
    return lengths


@register_flop_formula(torch.ops.gem_kernels.gdpa, get_raw=True)
def _forward_flops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor | None,
    max_q: int,
    max_k: int,
    activation: str,
    scale: float,
    scale_after: bool,
    window: int | None,
    *args: Any,
    **kwargs: Any,
) -> int:
    rows = _rows(q_offsets, k, k_offsets)
    return flops(
        q_lengths=_lengths(q_offsets, rows, max_q),
        k_lengths=_lengths(k_offsets, rows, max_k),
        heads=q.shape[1],
        dim=q.shape[-1],
        v_dim=v.shape[-1],
        window=window,
    )


@register_flop_formula([torch.ops.gem_kernels.gdpa_query_grad, torch.ops.gem_kernels.gdpa_key_grad], get_raw=True)
def _backward_flops(dout: Tensor, *args: Any, **kwargs: Any) -> int:
    """Each pass has two of the four gradient products; the recomputed scores are not model FLOPs."""
    return _forward_flops(*args, **kwargs)
