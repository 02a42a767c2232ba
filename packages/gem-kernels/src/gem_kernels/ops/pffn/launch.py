"""The ``triton`` and ``gluon`` backends of ``pffn``: a pass that norms, ``gdpa`` by that backend, and a pass that adds, norms and adds.

The gradients are those passes backwards. The first call imports triton.
"""

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gem_core.ops.pffn import flops
from gem_core.spec import KernelUnavailable
from gem_kernels.common import launcher
from gem_kernels.common.schedule import programs
from gem_kernels.ops import host
from gem_kernels.ops.direct import differentiable, direct
from gem_kernels.ops.gdpa.call import Call
from gem_kernels.ops.limits import MAX_HOPPER_WIDTH, MAX_NORM_WIDTH, MAX_WIDTH

JUMPING = "gelu_fast"
"""Its slope jumps by 0.17 at both ends of the polynomial."""
HALVED = (torch.bfloat16,)
"""Dtypes so coarse that rounding the normed queries carries some scores across such a jump, and gradients out of the bound of the conformance suite:
there the queries are the sum of two tensors of the dtype, side by side, and the keys are seen twice."""
WARP = 1024
"""Values that a warp holds of each tensor, 32 a thread: rows of up to so many are summed without a word to other warps."""
RESIDENT_WARPS = 32
"""Of an SM, by the registers of the kernels; they only size the grid when SMs are reserved."""


def pffn(q0: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, **options: Any) -> Tensor:
    """The personalised feed-forward block; shapes and meaning are those of ``gem_core.ops.pffn``.

    Raises:
        KernelUnavailable: dtype, width or device that this backend does not take.
        MachineError: triton is missing, or the tensors lie on the CPU and the interpreter is off.
    """
    return _block("triton", q0, k, v, q_offsets, **options)


def gluon(q0: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, **options: Any) -> Tensor:
    """As ``pffn``, around the kernels for Hopper of ``gdpa``; 16-bit dtypes, heads of 64 or 128."""
    return _block("gluon", q0, k, v, q_offsets, **options)


def _block(
    backend: str,
    q0: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    *,
    max_q: int,
    activation: str = "gelu",
    scale: float = 1.0,
    scale_position: str = "inside",
    eps: float = 1e-5,
) -> Tensor:
    out: Tensor = _op(q0, k, v, q_offsets, max_q, activation, float(scale), scale_position == "after", float(eps), backend)[0]
    return out


@cache
def _kernels() -> Any:
    return import_module("gem_kernels.ops.pffn.triton")


class _Inputs(NamedTuple):
    """Arguments of the forward op, in order."""

    q0: Tensor
    k: Tensor
    v: Tensor
    offsets: Tensor
    max_q: int
    activation: str
    scale: float
    scale_after: bool
    eps: float
    backend: str

    @property
    def halved(self) -> bool:
        return self.activation == JUMPING and self.q0.dtype in HALVED

    @property
    def ln_shape(self) -> tuple[int, int, int]:
        """Of the normed queries: ``[tokens, heads, dim]``, or twice as wide."""
        tokens, heads, dim = self.q0.shape
        return tokens, heads, 2 * dim if self.halved else dim

    def checked(self) -> "_Inputs":
        """The call with q0 as the kernels step over it; what they do not take is refused before any of them runs."""
        asked, (_, heads, dim) = f"pffn with backend {self.backend!r}", self.q0.shape
        limit = MAX_HOPPER_WIDTH if self.backend == "gluon" else MAX_WIDTH
        if self.halved and dim > limit // 2:
            so = f"{JUMPING} takes queries in two halves, and head size {dim} is above {limit // 2}"
            raise KernelUnavailable(asked, so, "Use backend='reference'.")
        host.check_call("pffn", self.q0, (self.k, self.v), width=dim, limit=limit)
        if heads * dim > MAX_NORM_WIDTH:
            raise KernelUnavailable(asked, f"tokens of {heads * dim} are above {MAX_NORM_WIDTH}", "Use backend='reference'.")
        return self._replace(q0=self.q0.contiguous())

    def norm(self) -> tuple[Tensor, Tensor]:
        """Normed queries, and two numbers a token, float32 ``[2, tokens]``."""
        ln, stats = self.q0.new_empty(self.ln_shape), self.q0.new_empty((2, self.q0.shape[0]), dtype=torch.float32)
        rows = self.offsets.shape[0] - 1
        self.run(
            "norm", stats, offsets=self.offsets.contiguous(), ln=ln, rows=rows, max_q=self.max_q, span=_span(rows), eps=self.eps,
            HALVES=self.halved, DIM=self.q0.shape[2],
        )  # fmt: skip
        return ln, stats

    def attention(self, ln: Tensor) -> Call:
        """The call of ``gdpa`` inside the block."""
        k = torch.cat([self.k, self.k], dim=-1) if self.halved else self.k
        return Call(
            op="gdpa", q=ln, k=k, v=self.v, q_offsets=self.offsets, k_offsets=None, max_q=self.max_q, max_k=k.shape[1], scale=self.scale,
            window=None, activation=self.activation, scale_after=self.scale_after, backend=self.backend,
        )  # fmt: skip

    def run(self, kernel: str, stats: Tensor, **arguments: Any) -> None:
        """Launch a kernel over all tokens."""
        (tokens, heads, dim), device = self.q0.shape, self.q0.device
        if tokens == 0:
            return
        block = host.block_width(heads * dim)
        rows = max(1, min(16, WARP // block))
        warps, tiles = max(1, rows * block // WARP), -(-tokens // rows)
        grid = min(programs(tiles, max(1, RESIDENT_WARPS // warps), device), host.MAX_GRID)
        given = {
            "q0": self.q0, "stats": stats, "total": tokens, "tiles": tiles, "WIDTH": heads * dim, "ROWS": rows, "BLOCK": block,
            "num_warps": warps,
        }  # fmt: skip
        launcher.launch(getattr(_kernels(), f"{kernel}_kernel"), grid, device, {**given, **arguments})


def _span(rows: int) -> int:
    """Where the search for a row begins to count: the largest power of 16 (``PROBES``) that is not above ``rows``, 0 where there are none."""
    return 16 ** ((rows.bit_length() - 1) // 4) if rows else 0


@torch.library.custom_op("gem_kernels::pffn", mutates_args=())
def _forward(
    q0: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_q: int,
    activation: str,
    scale: float,
    scale_after: bool,
    eps: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result, and what the gradients need: normed queries, what they attend to, and the numbers of ``norm``."""
    call = _Inputs(q0, k, v, offsets, max_q, activation, scale, scale_after, eps, backend).checked()
    ln, stats = call.norm()
    o = call.attention(ln).forward()
    out = q0.new_empty(q0.shape)
    call.run("forward", stats, o=o, out=out, eps=eps)
    return out, ln, o, stats


@torch.library.custom_op("gem_kernels::pffn_grad", mutates_args=())
def _grad(
    dy: Tensor,
    ln: Tensor,
    o: Tensor,
    stats: Tensor,
    of_queries: bool,
    of_keys: bool,
    q0: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_q: int,
    activation: str,
    scale: float,
    scale_after: bool,
    eps: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q0, k and v; empty ones where they are not asked for."""
    call = _Inputs(q0.contiguous(), k, v, offsets, max_q, activation, scale, scale_after, eps, backend)
    dy, dz, attention = dy.contiguous(), q0.new_empty(q0.shape), call.attention(ln)
    call.run("backward", stats, o=o, dy=dy, dz=dz, eps=eps)
    dim, dk, dv = q0.shape[2], k.new_empty(0), v.new_empty(0)
    if of_keys:
        dk, dv = attention.key_grad(dz)
        if call.halved:
            dk = dk[..., :dim] + dk[..., dim:]
    if not of_queries:
        return q0.new_empty(0), dk, dv
    # Both halves have the gradient of their sum.
    call.run("query_grad", stats, dy=dy, dz=dz, dln=attention.query_grad(dz)[..., :dim].contiguous())
    return dz, dk, dv


@_forward.register_fake
def _(*settings: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = _Inputs(*settings)
    q0 = call.q0
    stats = q0.new_empty((2, q0.shape[0]), dtype=torch.float32)
    return q0.new_empty(q0.shape), q0.new_empty(call.ln_shape), q0.new_empty(q0.shape), stats


@_grad.register_fake
def _(dy: Tensor, ln: Tensor, o: Tensor, stats: Tensor, of_queries: bool, of_keys: bool, *settings: Any) -> tuple[Tensor, ...]:
    q0, k, v, *_ = settings
    return tuple(t.new_empty(t.shape if wanted else 0) for t, wanted in ((q0, of_queries), (k, of_keys), (v, of_keys)))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:], *inputs[:4])
    ctx.settings = inputs[4:]


def _backward(ctx: Any, dy: Tensor | None, *rest: Any) -> tuple[Tensor | None, ...]:
    of_queries, of_keys = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:3])
    if dy is None:
        return (None,) * 10
    ln, o, stats, *tensors = ctx.saved_tensors
    dq, dk, dv = direct(_grad, dy, ln, o, stats, of_queries, of_keys, *tensors, *ctx.settings)
    return (dq if of_queries else None, *((dk, dv) if of_keys else (None, None)), *(None,) * 7)


_op = differentiable(_forward, _backward, _save)


@register_flop_formula(torch.ops.gem_kernels.pffn, get_raw=True)
def _forward_flops(q0: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_q: int, *args: Any, **kwargs: Any) -> int:
    """Each key once: that queries in halves see it twice is how they are kept."""
    return flops(q_lengths=host.row_lengths(offsets, max_q), keys=k.shape[1], heads=q0.shape[1], dim=q0.shape[2])


@register_flop_formula(torch.ops.gem_kernels.pffn_grad, get_raw=True)
def _backward_flops(
    dy: Tensor, ln: Tensor, o: Tensor, stats: Tensor, of_queries: bool, of_keys: bool, *args: Any, **kwargs: Any
) -> int:  # fmt: skip
    """The two gradient products of the queries and the two of keys and values; the recomputed scores are not model FLOPs."""
    return (of_queries + of_keys) * _forward_flops(*args, **kwargs)
