"""A gate and a residual in one pass: the crossing of DCN v2 (arXiv 2008.13535) around its matmuls."""

from torch import Tensor

from gem_core.ops.checks import check_exact_shape, check_tensors
from gem_core.ops.dispatch import make_request, run
from gem_core.ops.padded import own_precision, widen
from gem_core.spec.kernels import KernelRequest


def gated_residual(x: Tensor, gate: Tensor, residual: Tensor, *, backend: str | None = None) -> Tensor:
    """``gate * x + residual``, element by element.

    Args:
        x: ``[...]``, any shape.
        gate: as ``x``.
        residual: as ``x``.
        backend: name of a backend; None chooses by policy.

    Returns:
        A tensor like ``x``. Computed in float32 at least and rounded once.

    Raises:
        RequestError: shapes or dtypes differ.
        KernelUnavailable: the named backend does not fit.
    """
    out: Tensor = run(check, backend, x, gate, residual)
    return out


def check(x: Tensor, gate: Tensor, residual: Tensor) -> KernelRequest:
    """Check a call of ``gated_residual`` and describe it."""
    op = "gated_residual"
    inputs: dict[str, Tensor | None] = {"gate": gate, "residual": residual}
    check_tensors(op, x, inputs)
    for name, tensor in (("gate", gate), ("residual", residual)):
        check_exact_shape(op, name, tensor, x.shape)
    return make_request(op, x, (), (x, gate, residual))


@own_precision
def reference(x: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
    """What ``gated_residual`` means."""
    return (widen(gate) * widen(x) + widen(residual)).to(x.dtype)


def flops() -> int:
    """Products and sums of elements count as no FLOPs."""
    return 0
