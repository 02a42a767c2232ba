"""The ``triton`` backend of ``norm_linear``: custom ops with fake and autograd registration, FLOP formulas. The first call imports triton.

16-bit inputs run fused. In float32, with a residual, and where rows are too wide to be held, a kernel adds and norms the rows and torch multiplies.
The sum of a residual stream and a branch is written by the kernel that norms it and is all that is saved of both; the gradient of the stream from
later layers is added by the kernel that makes the gradient of the norm.
"""

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gem_core.ops.norm_linear import flops
from gem_core.spec import KernelUnavailable
from gem_kernels.common.compiled import Block, Described
from gem_kernels.ops import host
from gem_kernels.ops.direct import differentiable, direct, unwatched
from gem_kernels.ops.limits import MAX_NORM_WIDTH
from gem_kernels.ops.norm_linear import hopper_launch
from gem_kernels.ops.norm_linear.rows_launch import Maybe, norm_rows, norm_rows_grad, row_statistics

FUSED_WIDTH = 512
"""Widest rows of the fused kernels: ``after`` holds them in registers, and ``before`` is slower than normed rows and torch's product past it."""
MAX_ROWS = 2**30
"""The copy engine counts rows in 32 bits."""


class Tile(NamedTuple):
    """Rows and columns of a tile of a fused kernel, inner columns a step, stages of the load pipeline, and warps."""

    rows: int
    block: int
    step: int
    stages: int
    warps: int


INTERPRETER = Tile(32, 32, 16, 1, 1)


def norm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: str = "rms",
    where: str = "before",
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    return_sum: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """A norm before or after a matmul; shapes and meaning are those of ``gem_core.ops.norm_linear``.

    Raises:
        KernelUnavailable: dtype, width or device that this backend does not take.
        MachineError: triton is missing, or the tensors lie on the CPU and the interpreter is off.
    """
    outer, before = x.shape[:-1], where == "before"
    flat = None if residual is None else residual.reshape(-1, residual.shape[-1])
    inputs = (x.reshape(-1, x.shape[-1]), weight, bias, gamma, beta, flat)
    # x as its own sum: one kernel adds both gradients, but an op of the dispatcher may not give what it was given
    itself = return_sum and before and residual is None and not unwatched(inputs)
    out, total, _ = _op(*inputs, norm == "layer", before, float(eps), return_sum and not itself)
    out = out.view(*outer, out.shape[-1])
    if itself:
        return out, x
    return (out, total.view(*outer, total.shape[-1])) if return_sum else out


@cache
def _kernels() -> Any:
    return import_module("gem_kernels.ops.norm_linear.triton")


def _fits(x: Tensor, weight: Tensor, before: bool) -> bool:
    """Whether a fused kernel takes the call: tensor descriptors want addresses and rows in multiples of 16 bytes."""
    aligned = (x.data_ptr() | weight.data_ptr()) % 16 == 0 and (x.stride(0) | weight.stride(0) | weight.shape[0]) % 8 == 0
    wide = max(weight.shape) if before else weight.shape[0]
    return x.element_size() == 2 and aligned and 0 < x.shape[0] <= MAX_ROWS and wide <= FUSED_WIDTH


def before_tile(width: int, roomy: bool) -> Tile:
    """How the ``before`` kernel cuts a result of ``width`` columns; ``roomy``: an SM has the shared memory of Hopper."""
    return Tile(128, min(256, host.block_width(width)), 64, 3, 8) if roomy else Tile(64, min(128, host.block_width(width)), 32, 2, 4)


def after_tile(width: int, roomy: bool) -> Tile:
    """As ``before_tile``, for the ``after`` kernel, whose tiles hold whole rows."""
    block = host.block_width(width)
    if not roomy:
        return Tile(32, block, 32, 2, 8)
    return Tile(64, block, 32, 4, 8) if block > 256 else Tile(128, block, 64, 3, 8)


def _descriptor(tensor: Tensor, rows: int, columns: int) -> Block:
    return Block((tensor, _described(rows, columns)))


@cache
def _described(rows: int, columns: int) -> Described:
    return Described((rows, columns))


def _launch_fused(kernel: Any, cut: Tile, x: Tensor, weight: Tensor, layer: bool, **arguments: Any) -> Tensor:
    """One program an SM over the tiles of the result; both operands of the product and the result go through the copy engine."""
    rows, width = x.shape[0], weight.shape[0]
    out = x.new_empty((rows, width))
    host.launch_persistent(
        kernel, x, -(-rows // cut.rows) * -(-width // cut.block), host.multiprocessors(x), x=_descriptor(x, cut.rows, cut.step),
        weight=_descriptor(weight, cut.block, cut.step), out=_descriptor(out, cut.rows, cut.block), rows=rows, LAYER=layer, WIDTH=width,
        INNER=x.shape[1], ROWS=cut.rows, BLOCK=cut.block, STEP=cut.step, STAGES=cut.stages, num_warps=cut.warps, **arguments,
    )  # fmt: skip
    return out


def _on_hopper(x: Tensor, weight: Tensor) -> bool:
    """Whether a call that fits goes to the Hopper kernels."""
    return x.element_size() == 2 and hopper_launch.here(x) and hopper_launch.cut(*map(int, weight.shape)) is not None


def _hopper_grads(x: Tensor, weight: Tensor, layer: bool) -> bool:
    """Whether the gradients of a call that the Hopper kernels take are made by one of them, from the result and the factors of the rows."""
    return not layer and _on_hopper(x, weight) and hopper_launch.cut_grad(*map(int, weight.shape)) is not None


def _bare(gamma: Maybe, beta: Maybe, before: bool) -> bool:
    """Whether the result is the normed rows themselves."""
    return not before and gamma is None and beta is None


def _keeps_factors(x: Tensor, weight: Tensor, gamma: Maybe, beta: Maybe, residual: Maybe, layer: bool, before: bool, keep: bool) -> bool:
    """Whether the factors of the rows are kept with the result: what was normed need not be computed again for the gradients then."""
    rows = before if keep else residual is None  # whether the Hopper kernels find what they norm, or multiply, in one matrix
    return _bare(gamma, beta, before) or (rows and _hopper_grads(x, weight, layer))


def _fused_before(x: Tensor, weight: Tensor, bias: Maybe, gamma: Maybe, beta: Maybe, layer: bool, eps: float, factors: Maybe) -> Tensor:
    shift = None if beta is None else _shift(weight, beta)
    if shift is not None and bias is not None:
        shift = shift + bias
    scaled = weight if gamma is None else weight * gamma
    sums = scaled.float().sum(1) if layer else None
    if _on_hopper(x, scaled):
        bias = bias if shift is None else shift
        return hopper_launch.forward(x, scaled, before=True, layer=layer, eps=eps, bias=bias, sums=sums, factors=factors)
    cut = INTERPRETER if host.interpreted() else before_tile(weight.shape[0], host.roomy(x))
    found, means = row_statistics(x, layer=layer, eps=eps)
    arguments = {"bias": bias if shift is None else shift, "factors": found, "means": means, "sums": sums}
    return _launch_fused(_kernels().before_kernel, cut, x, scaled, layer, **arguments)


def _shift(weight: Tensor, beta: Tensor) -> Tensor:
    with host.no_autocast(weight):
        return weight.float() @ beta.float()


def _fused_after(x: Tensor, weight: Tensor, bias: Maybe, gamma: Maybe, beta: Maybe, layer: bool, eps: float, factors: Maybe) -> Tensor:
    if _on_hopper(x, weight):
        return hopper_launch.forward(x, weight, before=False, layer=layer, eps=eps, bias=bias, gamma=gamma, beta=beta, factors=factors)
    cut = after_tile(weight.shape[0], host.roomy(x))
    if host.interpreted():
        cut = INTERPRETER._replace(block=cut.block)
    return _launch_fused(_kernels().after_kernel, cut, x, weight, layer, eps=eps, bias=bias, gamma=gamma, beta=beta, factors=factors)


@torch.library.custom_op("gem_kernels::norm_linear", mutates_args=())
def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    residual: Tensor | None,
    layer: bool,
    before: bool,
    eps: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, what was normed (empty unless ``keep``), and the rows' factors (empty unless the gradients are made from them).

    With ``keep``, ``before`` and no residual, what was normed is x itself: such a call may not go through the dispatcher.
    """
    host.check_call("norm_linear", x, (weight, bias, gamma, beta, residual))
    normed = weight.shape[1] if before else weight.shape[0]
    if normed > MAX_NORM_WIDTH:
        raise KernelUnavailable("norm_linear with backend 'triton'", f"rows of {normed} are above {MAX_NORM_WIDTH}", "Use backend='reference'.")
    x, weight, residual = _readable(x, weight, residual)
    if keep and before and residual is not None and _on_hopper(x, weight):
        x, residual = x + residual, None  # the kernels for small matrices read one tensor of rows, and are worth a pass
    itself = keep and before and residual is None
    fits = residual is None and (itself or not keep) and _fits(x, weight, before)
    kept = x.shape[0] if _keeps_factors(x, weight, gamma, beta, residual, layer, before, keep) else 0
    factors = (x.new_zeros if before and not fits else x.new_empty)(kept, dtype=torch.float32)
    written, total = factors if kept else None, x if itself else x.new_empty(0)
    if fits:
        fused = _fused_before if before else _fused_after
        return fused(x, weight, bias, gamma, beta, layer, eps, written), total, factors
    options: dict[str, Any] = {"layer": layer, "eps": eps, "keep": keep and not itself}
    with host.no_autocast(x):
        if before:
            normed_rows, summed = norm_rows(x, residual, gamma, beta, **options)
            return F.linear(normed_rows, weight, bias), total if itself else summed, factors
        product = F.linear(x, weight, bias)
        return *norm_rows(product, residual, gamma, beta, factors=written, **options), factors


def _readable(x: Tensor, weight: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    x, weight = host.readable(x, weight)
    return x, weight, None if residual is None else host.readable(residual)[0]


@torch.library.custom_op("gem_kernels::norm_linear_grad", mutates_args=())
def _grad(
    dout: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    factors: Tensor | None,
    layer: bool,
    before: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias, gamma, beta, and after the matmul of what was normed; empty tensors for what is not there."""
    x, weight, residual = _readable(x, weight, residual)
    options: dict[str, Any] = {"layer": layer, "eps": eps, "dtotal": dtotal}
    alone = residual is None and (before or dtotal is None) and _fits(x, weight, before)
    if out is not None and factors is not None and alone and _hopper_grads(x, weight, layer):
        dx, dweight, dbias, dgamma = hopper_launch.backward(dout, x, weight, bias, gamma, out, factors, before=before, eps=eps)
        dx = dx if dtotal is None else dx.add_(dtotal)
        return dx, dweight, _filled(x, dbias), _filled(x, dgamma), x.new_empty(0), x.new_empty(0)
    with host.no_autocast(x):
        if before:
            found = norm_rows_grad(dout @ weight, x, residual, gamma, beta, normed=True, **options)
            assert found.normed is not None
            dx, dweight = found.dz, dout.mT @ found.normed
            dbias = None if bias is None else _column_sums(dout)
        else:
            options["total"] = bias is not None
            if out is not None and _bare(gamma, beta, before):
                found = norm_rows_grad(dout, out, None, None, None, factors=factors, **options)
            else:
                found = norm_rows_grad(dout, F.linear(x, weight, bias), residual, gamma, beta, **options)
            dx, dweight, dbias = found.dz @ weight, found.dz.mT @ x, found.total
    dz = None if before or residual is None else found.dz
    return dx, dweight, _filled(x, dbias), _filled(x, found.dgamma), _filled(x, found.dbeta), _filled(x, dz)


def _column_sums(x: Tensor) -> Tensor:
    """Sums over rows, of 16-bit values as a product, which reads them faster than torch's sum does."""
    return (x.mT @ x.new_ones((x.shape[0], 8)))[:, 0].contiguous() if x.element_size() == 2 else x.sum(0)


def _filled(like: Tensor, grad: Tensor | None) -> Tensor:
    """Custom ops return tensors: an empty one for a gradient that is not there."""
    return like.new_empty(0) if grad is None else grad


@_forward.register_fake
def _(x: Tensor, weight: Tensor, bias: Any, gamma: Any, beta: Any, residual: Any, layer: bool, before: bool, eps: float, keep: bool) -> Any:
    out = x.new_empty((x.shape[0], weight.shape[0]))
    kept = _keeps_factors(x, weight, gamma, beta, residual, layer, before, keep)
    factors = x.new_empty(x.shape[0] if kept else 0, dtype=torch.float32)
    return out, x.new_empty((x.shape if before else out.shape) if keep else (0,)), factors


@_grad.register_fake
def _(dout: Tensor, dtotal: Tensor | None, *inputs: Any) -> Any:
    *kept, residual, _out, _factors, _layer, before, _eps = inputs
    return tuple(inputs[0].new_empty(0 if t is None else t.shape) for t in (*kept, None if before else residual))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    (x, *columns, residual), settings, keep = inputs[:6], inputs[6:9], inputs[9]
    out, total, factors = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(factors)
    ctx.settings, ctx.added = settings, keep and settings[1] and residual is not None
    x, residual = (total, None) if ctx.added else (x, residual)
    ctx.save_for_backward(x, *columns, residual, *((out, factors) if factors.shape[0] else (None, None)))


def _backward(ctx: Any, dout: Maybe, dtotal: Maybe, _: None) -> tuple[Maybe, ...]:
    (*given, out, factors), before = ctx.saved_tensors, ctx.settings[1]
    if dout is None:
        dout = given[0].new_zeros((given[0].shape[0], given[1].shape[0]))
    dx, *others, dz = direct(_grad, dout, dtotal, *given, out, factors, *ctx.settings)
    *grads, dresidual = (None if t is None else grad for t, grad in zip(given, (dx, *others, dx if before else dz), strict=True))
    return (*grads, dx if ctx.added else dresidual, None, None, None, None)


_op = differentiable(_forward, _backward, _save)


@register_flop_formula(torch.ops.gem_kernels.norm_linear, get_raw=True)
def _forward_flops(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    return flops(tokens=int(x.shape[0]), in_features=int(weight.shape[1]), out_features=int(weight.shape[0]))


@register_flop_formula(torch.ops.gem_kernels.norm_linear_grad, get_raw=True)
def _backward_flops(dout: Tensor, dtotal: Any, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    """Two gradient products."""
    return 2 * _forward_flops(x, weight)
