"""From a checked call to the kernel that runs it. Everything a request holds comes from shapes and dtypes."""

import os
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gem_core.ops.checks import DTYPE_NAMES
from gem_core.spec.kernels import KernelRequest

Kernel = Callable[..., Any]


@cache
def cuda_arch(index: int) -> int:
    """Compute capability of a CUDA device as an integer, 90 for sm90."""
    major, minor = torch.cuda.get_device_capability(index)
    return major * 10 + minor


def device_name(device: torch.device) -> str:
    """The request's word for a torch device. ``meta`` tensors, which hold shapes only, count as ``cpu``."""
    if device.type == "cuda":
        return "cuda"
    return "interpreter" if os.environ.get("TRITON_INTERPRET") == "1" else "cpu"


def make_request(op: str, lead: Tensor, features: Iterable[str], inputs: Iterable[Tensor | None], head_dim: int | None = None) -> KernelRequest:
    """The request of one call.

    Args:
        op: name of the op.
        lead: the tensor whose dtype and device the call has.
        features: words of the op's features that the call uses.
        inputs: every differentiable input.
        head_dim: width of a head of q.
    """
    device = lead.device
    return KernelRequest(
        op=op,
        device=device_name(device),
        dtype=DTYPE_NAMES[lead.dtype],
        arch=cuda_arch(device.index or 0) if device.type == "cuda" else None,
        head_dim=head_dim,
        features=frozenset(features),
        backward=torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def kernel(request: KernelRequest, backend: str | None = None) -> Kernel:
    """The implementation chosen for ``request``.

    Raises:
        KernelUnavailable: the named backend does not fit, or none does.
    """
    from gem_core.select.policy import choose

    return choose(request, backend).impl.resolve()


def run(check: Callable[..., KernelRequest], backend: str | None, *args: Any, **options: Any) -> Any:
    """Check a call, choose its kernel and run it."""
    return kernel(check(*args, **options), backend)(*args, **options)
