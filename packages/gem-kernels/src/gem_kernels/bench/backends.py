"""What an op is timed with: the backends of this package that fit, and peers that come with torch. All are functions of a workload's arguments."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch

from gem_core.ops.dispatch import kernel
from gem_core.ops.slot import check_of
from gem_core.spec import KernelUnavailable
from gem_kernels.bench.shapes import BATCH, BLOCK
from gem_kernels.bench.workloads import Workload
from gem_kernels.plugin import gem_kernel_impls

Function = Callable[..., Any]
REFERENCE = "reference"
# A backward pass is timed again and again, which torch's compiler refuses where it may write into what the forward pass kept.
functorch.donated_buffer = False


def backends_of(op: str) -> list[str]:
    """Names of this package's backends of ``op``, the reference last."""
    return [*dict.fromkeys(impl.backend for impl in gem_kernel_impls() if impl.op == op), REFERENCE]


def resolve(workload: Workload, backend: str) -> Function | str:
    """The backend's function for a call, or why it does not fit."""
    try:
        return kernel(workload.call(check_of(workload.op)), backend)
    except KernelUnavailable as error:
        return error.so


def peers_of(workload: Workload, variant: str) -> dict[str, Function]:
    """Peers that compute the same or, where it says so, less: ``matmul`` is the product without its norm."""
    makers: dict[str, dict[str, Function]] = {
        "jagged_attention": {"cudnn": _cudnn, "varlen_attn": _varlen},
        "gdpa": {"compiled_bmm": _compiled_bmm},
        "block_attention": {} if variant else {"varlen_attn": _varlen_blocks},
        "norm_linear": {"matmul": _matmul, "compiled": _compiled_after if variant == "after" else _compiled_before},
        "add_norm": {"compiled": _compiled_add_norm},
        "gated_residual": {"compiled": _compiled_gated_residual},
    }
    return makers.get(workload.op, {})


def _varlen(q: Tensor, *, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, max_q: int, max_k: int) -> Any:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(q, k, v, q_offsets.int(), k_offsets.int(), max_q, max_k)


def _cudnn(q: Tensor, *, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, max_q: int, max_k: int) -> Any:
    """Dense rows only, laid out head by head beforehand in a caller's model; here as views, which cuDNN reads by stride."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (t.view(-1, longest, *t.shape[1:]).transpose(1, 2) for t, longest in ((q, max_q), (k, max_k), (v, max_k)))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def _compiled_bmm(q: Tensor, *, k: Tensor, v: Tensor, max_q: int, max_k: int, activation: str, scale: float, **offsets: Tensor) -> Tensor:
    """Dense rows only: two batched products with the activation between them, compiled; the scores go through memory."""
    q, k, v = (t.view(-1, longest, *t.shape[1:]).transpose(1, 2) for t, longest in ((q, max_q), (k, max_k), (v, max_k)))
    return _gelu_products(q, k, v, scale)


@torch.compile(dynamic=False)
def _gelu_products(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return torch.nn.functional.gelu(q @ k.mT * scale) @ v


def _varlen_blocks(q: Tensor, *, k: Tensor, v: Tensor, offsets: Tensor, max_length: int) -> Any:
    """Each block as a row of its own."""
    from torch.nn.attention.varlen import varlen_attn

    starts = (offsets[:-1, None] + torch.arange(0, max_length, BLOCK, device=offsets.device)).minimum(offsets[1:, None]).flatten()
    blocks = torch.cat([starts, offsets[-1:]]).int()
    return varlen_attn(q, k, v, blocks, blocks, BLOCK, BLOCK)


def _matmul(x: Tensor, *, weight: Tensor, where: str) -> Tensor:
    return torch.nn.functional.linear(x, weight)


@torch.compile(dynamic=False)
def _compiled_add_norm(x: Tensor, *, gamma: Tensor, beta: Tensor, residual: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
    out = torch.nn.functional.layer_norm(x if residual is None else x + residual, gamma.shape, gamma, beta)
    return out if gate is None else out * gate


@torch.compile(dynamic=False)
def _compiled_gated_residual(x: Tensor, *, gate: Tensor, residual: Tensor) -> Tensor:
    return gate * x + residual


@torch.compile(dynamic=False)
def _compiled_after(x: Tensor, *, weight: Tensor, where: str) -> Tensor:
    return torch.nn.functional.rms_norm(torch.nn.functional.linear(x, weight), (weight.shape[0],), eps=1e-5)


@torch.compile(dynamic=False)
def _compiled_before(x: Tensor, *, weight: Tensor, where: str) -> Tensor:
    return torch.nn.functional.linear(torch.nn.functional.rms_norm(x, (weight.shape[1],), eps=1e-5), weight)


def takes(peer: str, workload: Workload) -> bool:
    """Whether a peer takes the call's rows: some want all of them full."""
    if peer not in ("cudnn", "compiled_bmm"):
        return True
    arguments = workload.arguments
    rows = arguments["q_offsets"].shape[0] - 1
    return rows == BATCH and bool(rows * arguments["max_q"] == arguments["q"].shape[0])
