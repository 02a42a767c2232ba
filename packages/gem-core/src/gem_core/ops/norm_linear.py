"""A norm next to a matmul, with an optional residual: the places where the two fuse.

RMSNorm: arXiv 1910.07467. LayerNorm: arXiv 1607.06450. Pre-norm layers, whose residual stream is what ``return_sum`` gives: arXiv 2002.04745.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from gem_core.ops.checks import check_exact_shape, check_index_range, check_tensors, refuse
from gem_core.ops.dispatch import make_request, run
from gem_core.ops.padded import own_precision, widen
from gem_core.spec.kernels import KernelRequest

NORMS = ("rms", "layer")
PLACES = ("before", "after")


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
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``N(x + residual) weight^T + bias`` (``before``) or ``N(x weight^T + bias + residual)`` (``after``).

    ``N`` is over the last dimension: ``z / sqrt(mean(z^2) + eps) * gamma`` (``rms``) or ``(z - mean(z)) / sqrt(var(z) + eps) * gamma + beta``
    (``layer``). Statistics are float32 at least, the variance is that of the centred values.

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]``.
        bias: ``[out]``.
        norm: ``rms`` or ``layer``.
        where: the norm stands ``before`` or ``after`` the matmul.
        gamma: ``[in]`` before, ``[out]`` after; ones by default.
        beta: as ``gamma``, only for ``layer``; zeros by default.
        residual: added to what is normed: ``[..., in]`` before, ``[..., out]`` after.
        eps: added to the mean square.
        return_sum: also return the tensor that was normed, in x's dtype: the norm reads it as rounded, so that backward needs nothing else of x and
            the residual. Before the matmul this adds a branch to a residual stream: the next layer goes on from the sum.
        backend: name of a backend; None chooses by policy.

    Returns:
        ``[..., out]`` of x's dtype; with ``return_sum`` also ``[..., in]`` (before) or ``[..., out]`` (after).

    Raises:
        RequestError: shapes or dtypes do not fit together.
        KernelUnavailable: the named backend does not fit.
    """
    out: Tensor | tuple[Tensor, Tensor] = run(
        check,
        backend,
        x,
        weight,
        bias,
        norm=norm,
        where=where,
        gamma=gamma,
        beta=beta,
        residual=residual,
        eps=eps,
        return_sum=return_sum,
    )
    return out


def check(
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
) -> KernelRequest:
    """Check a call of ``norm_linear`` and describe it."""
    op = "norm_linear"
    if norm not in NORMS:
        refuse(op, f"norm {norm!r} is unknown", f"Known: {', '.join(NORMS)}.")
    if where not in PLACES:
        refuse(op, f"where {where!r} is unknown", f"Known: {', '.join(PLACES)}.")
    if beta is not None and norm == "rms":
        refuse(op, "rms has no beta", "Leave beta out, or use norm='layer'.")
    if eps <= 0:
        refuse(op, f"eps is {eps}", "Give a positive number.")
    inputs = {"weight": weight, "bias": bias, "gamma": gamma, "beta": beta, "residual": residual}
    check_tensors(op, x, inputs)
    if x.dim() < 1 or weight.dim() != 2 or weight.shape[1] != x.shape[-1] or 0 in weight.shape:
        refuse(op, f"x has shape {list(x.shape)}, weight {list(weight.shape)}", "Give x [..., in] and weight [out, in], both widths at least 1.")
    outer, (wide_out, wide_in) = tuple(x.shape[:-1]), weight.shape
    normed = wide_in if where == "before" else wide_out
    for name, tensor, shape in (
        ("bias", bias, (wide_out,)),
        ("gamma", gamma, (normed,)),
        ("beta", beta, (normed,)),
        ("residual", residual, (*outer, normed)),
    ):
        if tensor is not None:
            check_exact_shape(op, name, tensor, shape)
    check_index_range(x.numel() // wide_in, "rows of x in norm_linear")
    used = {"affine": gamma is not None or beta is not None, "residual": residual is not None, "return_sum": return_sum}
    return make_request(op, x, {norm, where, *(word for word, on in used.items() if on)}, (x, *inputs.values()))


@own_precision
def reference(
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
    """What ``norm_linear`` means."""

    def wide(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else widen(tensor)

    def normalise(z: Tensor) -> Tensor:
        if norm == "rms":
            return F.rms_norm(z, z.shape[-1:], wide(gamma), eps)
        return F.layer_norm(z, z.shape[-1:], wide(gamma), wide(beta), eps)

    def add(z: Tensor) -> Tensor:
        total = z if residual is None else z + widen(residual)
        return widen(total.to(x.dtype)) if return_sum else total

    if where == "before":
        total = add(widen(x))
        out = F.linear(normalise(total), widen(weight), wide(bias))
    else:
        total = add(F.linear(widen(x), widen(weight), wide(bias)))
        out = normalise(total)
    return (out.to(x.dtype), total.to(x.dtype)) if return_sum else out.to(x.dtype)


def flops(*, tokens: int | Sequence[int], in_features: int, out_features: int) -> int:
    """Forward model FLOPs: the matmul alone; ``tokens`` is a count, or counts to be added."""
    return 2 * (tokens if isinstance(tokens, int) else int(sum(tokens))) * in_features * out_features
