"""The ``triton`` backend of ``pooled_attention``: custom ops with fake and autograd registration, FLOP formulas. The first call imports triton."""

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gem_core.ops.pooled_attention import flops
from gem_kernels.ops import host
from gem_kernels.ops.direct import differentiable, unwatched
from gem_kernels.ops.limits import MAX_WIDTH
from gem_kernels.ops.places import grad_memory, parts_in
from gem_kernels.ops.ragged import copied, ragged

RUNS = 256
"""The gradient of shared seeds is added up in at most this many runs of rows, whatever the device, so that its rounding is the same everywhere."""
FUSED_RUNS = 1024
"""As ``RUNS``, for the kernel that makes all gradients and so has no other programs to fill the device with."""
DELTA_NUMBERS = 4096
"""Numbers of each operand that a program of ``delta_kernel`` reads at once."""
PROGRAMS = 512
"""Programs that fill a large GPU: a smaller batch is split along its keys until there are as many."""
MOST_SEEDS = 64
"""Seeds of a tile of 16-bit values at most."""
SPLIT_KEYS = 1024
"""Fewest keys of the longest row that a split gets."""


def pooled_attention(seeds: Tensor, k: Tensor, v: Tensor, k_offsets: Tensor, *, max_k: int, scale: float | None = None) -> Tensor:
    """Seeds attend to each row's keys; shapes and meaning are those of ``gem_core.ops.pooled_attention``.

    Raises:
        KernelUnavailable: dtype, head size or device that this backend does not take.
        MachineError: triton is missing, or the tensors lie on the CPU and the interpreter is off.
    """
    return attend(seeds, k, v, k_offsets, max_k=max_k, scale=scale, hopper=False)


def attend(seeds: Tensor, k: Tensor, v: Tensor, k_offsets: Tensor, *, max_k: int, scale: float | None, hopper: bool) -> Tensor:
    """As ``pooled_attention``; ``hopper``: the forward pass is that of ``pooled_attention.hopper``, and so are the gradients where its ``one_pass``
    says so; else they are those of this module."""
    out: Tensor = _op(seeds, k, v, k_offsets, max_k, seeds.shape[-1] ** -0.5 if scale is None else float(scale), hopper)[0]
    return out


@cache
def _kernels() -> Any:
    return import_module("gem_kernels.ops.pooled_attention.triton")


@cache
def _hopper() -> Any:
    return import_module("gem_kernels.ops.pooled_attention.hopper")


@cache
def _hopper_launch() -> Any:
    return import_module("gem_kernels.ops.pooled_attention.hopper_launch")


class Inputs(NamedTuple):
    """Arguments of the custom ops, in order."""

    q: Tensor
    k: Tensor
    v: Tensor
    offsets: Tensor
    max_k: int
    scale: float

    def made_readable(self) -> "Inputs":
        k, v = host.readable(self.k, self.v)
        q = self.q if self.q.stride(-1) == 1 and self.q.stride(-3) <= host.MAX_TOKEN_STRIDE else self.q.contiguous()
        return self._replace(q=q, k=k, v=v)

    @property
    def rows(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the output: rows, seeds, heads, v_dim."""
        return self.rows, self.q.shape[-3], self.q.shape[-2], self.v.shape[-1]

    def nothing_to_do(self) -> bool:
        return self.rows == 0 or self.max_k == 0 or self.q.shape[-3] == 0

    def blocks(self) -> tuple[int, int, int, int]:
        """Seeds and keys of a tile, warps, and stages of the load pipeline."""
        width = max(host.block_width(self.q.shape[-1]), host.block_width(self.v.shape[-1]))
        seeds = min(host.block_width(self.q.shape[-3]), MOST_SEEDS)
        if host.interpreted():
            return min(seeds, 32), 64, 1, 1
        if self.q.element_size() > 2:
            return (min(seeds, 32), 32, 8, 1) if width <= 128 else (16, 16, 4, 1)
        return seeds, 64 if width <= 128 else 32, 8 if width > 128 else 4, 2

    def grad_keys(self) -> int:
        """Keys of a tile of the kernel that makes all gradients: beside 64 seeds, heads of 128 leave registers for 32."""
        seeds, keys, _, _ = self.blocks()
        return min(keys, 32) if seeds == MOST_SEEDS and max(self.q.shape[-1], self.v.shape[-1]) > 64 else keys

    def splits(self, programs: int) -> int:
        return max(1, min(PROGRAMS // max(programs, 1), self.max_k // SPLIT_KEYS))

    def run(self, kernel: Any, tiles: int, *, keys: int | None = None, pipelined: bool = True, **arguments: Any) -> None:
        q, k, v = self.q, self.k, self.v
        block_m, block_n, warps, stages = self.blocks()
        host.launch(
            kernel, q, tiles, offsets=self.offsets, rows=self.rows, seeds=q.shape[-3], total=k.shape[0], max_k=self.max_k,
            scale=self.scale, q_row=q.stride(0) if q.dim() == 4 else 0, q_seed=q.stride(-3), q_head=q.stride(-2), k_token=k.stride(0),
            k_head=k.stride(1), v_token=v.stride(0), v_head=v.stride(1), GROUP=q.shape[-2] // k.shape[1], DIM=q.shape[-1], V_DIM=v.shape[-1],
            BLOCK_M=block_m, BLOCK_N=keys or block_n, BLOCK_D=host.block_width(q.shape[-1]), BLOCK_V=host.block_width(v.shape[-1]),
            PRECISION=host.precision(q), num_warps=warps, num_stages=stages if pipelined else 1, **({"q": q, "k": k, "v": v} | arguments),
        )  # fmt: skip


@torch.library.custom_op("gem_kernels::pooled_attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_k: int, scale: float, hopper: bool) -> tuple[Tensor, Tensor]:
    """The output, and the base-2 logarithm of each softmax's sum, float32 ``[rows, seeds, heads]``."""
    host.check_call("pooled_attention", q, (k, v), width=max(q.shape[-1], v.shape[-1]), limit=MAX_WIDTH)
    call = Inputs(q, k, v, offsets, max_k, scale).made_readable()
    rows, seeds, heads, v_dim = call.shape
    if call.nothing_to_do():
        out, lse = q.new_zeros(call.shape), q.new_zeros((heads, rows, seeds), dtype=torch.float32).permute(1, 2, 0)
        return out, lse if hopper else lse.contiguous()
    if hopper:
        found: tuple[Tensor, Tensor] = _hopper().forward(call)
        return found
    programs = rows * heads * -(-seeds // call.blocks()[0])
    splits = call.splits(programs)
    part = torch.float32 if splits > 1 else q.dtype
    out, lse = q.new_empty((rows, splits, seeds, heads, v_dim), dtype=part), q.new_empty((rows, splits, seeds, heads), dtype=torch.float32)
    call.run(_kernels().forward_kernel, programs * splits, out=out, lse=lse, heads=heads, splits=splits)
    if splits == 1:
        return out.squeeze(1), lse.squeeze(1)
    top = lse.amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    shares = (lse - top).exp2()
    whole = shares.sum(1, keepdim=True)
    joined = (out * (shares / whole.clamp(min=1e-30))[..., None]).sum(1)
    return joined.to(q.dtype), (top + whole.log2()).squeeze(1)


@torch.library.custom_op("gem_kernels::pooled_attention_grad", mutates_args=())
def _grad(
    dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_k: int, scale: float, hopper: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(dout, out, lse, Inputs(q, k, v, offsets, max_k, scale), hopper, k.new_empty(k.shape), v.new_empty(v.shape))


def _gradients(dout: Tensor, out: Tensor, lse: Tensor, inputs: Inputs, hopper: bool, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the seeds, of k and of v; the last two are written to ``dk`` and ``dv``."""
    call = inputs.made_readable()
    if call.nothing_to_do():
        return call.q.new_zeros(call.q.shape), dk.zero_(), dv.zero_()
    dout = dout.contiguous()
    if hopper and _hopper().one_pass(call.q, call.k, call.v):
        return _hopper_launch().grad(call, dout, out.contiguous(), lse, dk, dv), dk, dv
    lse = lse.contiguous()
    delta = _delta(dout, out.contiguous())
    shared: dict[str, Any] = {"dout": dout, "lse": lse, "delta": delta}
    block_m, block_n, _, stages = call.blocks()
    if fused(call):
        return _grad_at_once(call, dk, dv, stages, shared), dk, dv
    kv_heads = call.k.shape[1]
    tiles = call.rows * kv_heads * -(-call.max_k // block_n)
    # Few seeds make a short loop, which a pipeline only takes registers from.
    call.run(_kernels().key_grad_kernel, tiles, pipelined=False, kv_heads=kv_heads, **_written(dk, dv), **shared)
    return _query_grad(call, block_m, shared), dk, dv


def _delta(dout: Tensor, out: Tensor) -> Tensor:
    """``rowsum(dout * out)``, float32 ``[rows, seeds, heads]``."""
    delta = out.new_empty(out.shape[:-1], dtype=torch.float32)
    rows, width = delta.numel(), out.shape[-1]
    block = host.block_width(width)
    height = max(1, DELTA_NUMBERS // block)
    host.launch(_kernels().delta_kernel, out, -(-rows // height), dout=dout, out=out, delta=delta, rows=rows, V_DIM=width, BLOCK_V=block, ROWS=height)
    return delta


def _written(dk: Tensor, dv: Tensor) -> dict[str, Any]:
    return {"dk": dk, "dv": dv, "DK_PARTS": parts_in(dk), "DV_PARTS": parts_in(dv)}


def fused(call: Inputs) -> bool:
    """Whether one kernel makes all gradients: one tile holds all seeds, and each head has its own keys."""
    return call.q.shape[-3] <= call.blocks()[0] and call.q.shape[-2] == call.k.shape[1]


def _grad_at_once(call: Inputs, dk: Tensor, dv: Tensor, stages: int, shared: dict[str, Any]) -> Tensor:
    """Gradient of the seeds; writes those of k and v."""
    dq, splits, per_run = _query_sums(call, FUSED_RUNS, 1)
    runs, heads, block = dq.shape[0], dq.shape[3], call.grad_keys()
    engine = copied(call.k, call.v)
    described = {"k": call.k, "v": call.v, "dk_desc": dk, "dv_desc": dv}
    given = {name: ragged(x, block) for name, x in described.items()} if engine else {"dk_desc": None, "dv_desc": None}
    call.run(
        _kernels().grad_kernel, runs * splits * heads, keys=block, pipelined=False, dq=dq, heads=heads, splits=splits, rows_per_run=per_run,
        STAGES=stages, ENGINE=engine, **_written(dk, dv), **given, **shared,
    )  # fmt: skip
    return _added(call, dq)


def _query_sums(call: Inputs, most: int, seed_tiles: int) -> tuple[Tensor, int, int]:
    """Memory for the gradient of the seeds ``[runs, splits, seeds, heads, dim]``, float32 where some are to be added, how many splits, and how many
    rows in a run."""
    rows, seeds, heads, _ = call.shape
    per_run = -(-rows // most) if call.q.dim() == 3 else 1
    runs = -(-rows // per_run)
    splits = call.splits(runs * heads * seed_tiles)
    dtype = torch.float32 if call.q.dim() == 3 or splits > 1 else call.q.dtype
    return call.q.new_empty((runs, splits, seeds, heads, call.q.shape[-1]), dtype=dtype), splits, per_run


def _added(call: Inputs, dq: Tensor) -> Tensor:
    if call.q.dim() == 3:
        return dq.sum((0, 1)).to(call.q.dtype)
    return dq.squeeze(1) if dq.shape[1] == 1 else dq.sum(1).to(call.q.dtype)


def _query_grad(call: Inputs, block_m: int, shared: dict[str, Any]) -> Tensor:
    seed_tiles = -(-call.q.shape[-3] // block_m)
    dq, splits, per_run = _query_sums(call, RUNS, seed_tiles)
    runs, heads = dq.shape[0], dq.shape[3]
    tiles = runs * splits * heads * seed_tiles
    call.run(_kernels().query_grad_kernel, tiles, dq=dq, heads=heads, splits=splits, rows_per_run=per_run, **shared)
    return _added(call, dq)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_k: int, scale: float, hopper: bool) -> tuple[Tensor, Tensor]:
    rows, seeds, heads = offsets.shape[0] - 1, q.shape[-3], q.shape[-2]
    lse = q.new_empty((heads, rows, seeds), dtype=torch.float32).permute(1, 2, 0)
    return q.new_empty((rows, seeds, heads, v.shape[-1])), lse if hopper else lse.contiguous()


@_grad.register_fake
def _(dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, *inputs[:4])
    ctx.settings = inputs[4:]


def _backward(ctx: Any, dout: Tensor, dlse: Any) -> tuple[Tensor | None, ...]:
    out, lse, *tensors = ctx.saved_tensors
    *settings, hopper = ctx.settings
    inputs = Inputs(*tensors, *settings)
    if unwatched((dout, out, lse, *tensors)):
        dk, dv = grad_memory(ctx.next_functions[1:3], (inputs.k, inputs.v))
        grads = _gradients(dout, out, lse, inputs, hopper, dk, dv)
    else:
        grads = _grad(dout, out, lse, *inputs, hopper)
    return (*grads, None, None, None, None)


_op = differentiable(_forward, _backward, _save)


@register_flop_formula(torch.ops.gem_kernels.pooled_attention, get_raw=True)
def _forward_flops(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_k: int, *args: Any, **kwargs: Any) -> int:
    return flops(seeds=q.shape[-3], k_lengths=host.row_lengths(offsets, max_k), heads=q.shape[-2], dim=q.shape[-1], v_dim=v.shape[-1])


@register_flop_formula(torch.ops.gem_kernels.pooled_attention_grad, get_raw=True)
def _backward_flops(dout: Tensor, out: Tensor, lse: Tensor, *args: Any, **kwargs: Any) -> int:
    """Four gradient products; the recomputed scores are not model FLOPs."""
    return 2 * _forward_flops(*args, **kwargs)
