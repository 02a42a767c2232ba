"""A norm of a sum, with an optional gate behind it: what stands around attention and experts where no matmul is near enough to fuse with.

RMSNorm: arXiv 1910.07467. LayerNorm: arXiv 1607.06450. ``N(attention) * U`` of HSTU: arXiv 2402.17152.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_core.ops.checks import check_exact_shape, check_index_range, check_tensors, refuse
from gem_core.ops.dispatch import make_request, run
from gem_core.ops.norm_linear import NORMS
from gem_core.ops.padded import own_precision, widen
from gem_core.spec.kernels import KernelRequest


def add_norm(
    x: Tensor,
    residual: Tensor | None = None,
    *,
    norm: str = "layer",
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    gate: Tensor | None = None,
    concat: Tensor | None = None,
    eps: float = 1e-5,
    backend: str | None = None,
) -> Tensor:
    """``N(x + residual) * gate``, with the norm ``N`` of ``norm_linear`` over the last dimension; with ``concat``, ``[gate || concat || that]``.

    Args:
        x: ``[..., width]``.
        residual: ``[..., width]``, added before the norm.
        norm: ``rms`` or ``layer``.
        gamma: ``[width]``, ones by default.
        beta: ``[width]``, only for ``layer``; zeros by default.
        gate: ``[..., width]``, multiplies what was normed.
        concat: ``[..., width]``, only with a gate: what HSTU's output layer reads between the gate and the gated result.
        eps: added to the mean square.
        backend: name of a backend; None chooses by policy.

    Returns:
        ``[..., width]``, or ``[..., 3 width]`` with ``concat``, of x's dtype. Sum, statistics and product are float32 at least and are rounded once.

    Raises:
        RequestError: shapes or dtypes do not fit together.
        KernelUnavailable: the named backend does not fit.
    """
    out: Tensor = run(check, backend, x, residual, norm=norm, gamma=gamma, beta=beta, gate=gate, concat=concat, eps=eps)
    return out


def check(
    x: Tensor,
    residual: Tensor | None = None,
    *,
    norm: str = "layer",
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    gate: Tensor | None = None,
    concat: Tensor | None = None,
    eps: float = 1e-5,
) -> KernelRequest:
    """Check a call of ``add_norm`` and describe it."""
    op = "add_norm"
    if norm not in NORMS:
        refuse(op, f"norm {norm!r} is unknown", f"Known: {', '.join(NORMS)}.")
    if beta is not None and norm == "rms":
        refuse(op, "rms has no beta", "Leave beta out, or use norm='layer'.")
    if eps <= 0:
        refuse(op, f"eps is {eps}", "Give a positive number.")
    if concat is not None and gate is None:
        refuse(op, "there is a concat and no gate", "Give a gate, which stands before it.")
    inputs = {"residual": residual, "gamma": gamma, "beta": beta, "gate": gate, "concat": concat}
    check_tensors(op, x, inputs)
    if x.dim() < 1 or x.shape[-1] < 1:
        refuse(op, f"x has shape {list(x.shape)}", "Give [..., width] with a width of at least 1.")
    for name, tensor in inputs.items():
        if tensor is not None:
            check_exact_shape(op, name, tensor, x.shape[-1:] if name in ("gamma", "beta") else x.shape)
    check_index_range(x.numel() // x.shape[-1], "rows of x in add_norm")
    used = {"affine": gamma is not None or beta is not None, "residual": residual is not None, "gate": gate is not None}
    used |= {"concat": concat is not None}
    return make_request(op, x, {norm, *(word for word, on in used.items() if on)}, (x, *inputs.values()))


@own_precision
def reference(
    x: Tensor,
    residual: Tensor | None = None,
    *,
    norm: str = "layer",
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    gate: Tensor | None = None,
    concat: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """What ``add_norm`` means."""
    total = widen(x) if residual is None else widen(x) + widen(residual)
    scale, shift = (None if vector is None else widen(vector) for vector in (gamma, beta))
    width = total.shape[-1:]
    out = F.rms_norm(total, width, scale, eps) if norm == "rms" else F.layer_norm(total, width, scale, shift, eps)
    out = (out if gate is None else out * widen(gate)).to(x.dtype)
    return out if gate is None or concat is None else torch.cat((gate, concat, out), -1)


def flops() -> int:
    """Norms and products of elements count as no FLOPs."""
    return 0
