"""What the portable Triton kernels do not take. Imports no torch, so that kernels are listed quickly."""

import os
from importlib.metadata import PackageNotFoundError, version

from gem_core.spec import KernelRequest

NO_BF16 = "the Triton interpreter computes bf16 products wrongly, without an error"
MAX_WIDTH = 256
"""Largest head size of the HSTU and pooled kernels: beyond it the accumulators of one tile no longer fit in registers."""
MAX_HOPPER_WIDTH = 128
"""Largest head size of the attention kernels for Hopper."""
MAX_BLOCK_WIDTH = 128
"""Largest head size of block attention, whose backward holds seven tiles of it at once."""
MAX_BLOCK = 128
"""Largest diagonal block: its scores stay in registers."""

UNMEASURED = "GEM_UNMEASURED"
"""Variable of the environment that lets kernels be taken which no GPU has shown to be right and faster than what they replace."""
MAX_NORM_WIDTH = 8192
"""Longest row that is normed: a program holds it in registers."""


def check(request: KernelRequest) -> list[str]:
    """Reasons against any request that a declaration cannot express."""
    if request.device == "interpreter" and request.dtype == "bf16":
        return [f"{NO_BF16}; test in fp32 or fp16 there"]
    return []


def _unmeasured(request: KernelRequest) -> list[str]:
    """Against what no GPU has shown right and faster yet: it is taken where ``GEM_UNMEASURED=1`` asks for it, as the tests and measurements of this
    package do."""
    waits = request.device == "cuda" and os.environ.get(UNMEASURED) != "1"
    return [f"no GPU has shown it right and faster yet; {UNMEASURED}=1 takes it all the same"] if waits else []


def check_unmeasured(request: KernelRequest) -> list[str]:
    """As ``check``, for a kernel that no GPU has shown right and faster yet."""
    return check(request) + _unmeasured(request)


def _check_width(request: KernelRequest, limit: int) -> list[str]:
    wide = request.head_dim is not None and request.head_dim > limit
    return check(request) + ([f"head size {request.head_dim} is above {limit}"] if wide else [])


def check_attention(request: KernelRequest) -> list[str]:
    """As ``check``, with the head size of the attention kernels."""
    return _check_width(request, MAX_WIDTH)


def check_fa4(request: KernelRequest) -> list[str]:
    """As ``check_attention``; heads end at 128 past Hopper, and FlashAttention of earlier generations has the same import name."""
    try:
        version("flash-attn-4")
        missing = []
    except PackageNotFoundError:
        missing = ["needs the distribution flash-attn-4, which is not installed"]
    return missing + _check_width(request, MAX_WIDTH if request.arch in (None, 90) else 128)


def check_flex(request: KernelRequest) -> list[str]:
    """As ``check_attention``; FlexAttention multiplies nothing narrower than 16."""
    narrow = request.head_dim is not None and request.head_dim < 16
    return check_attention(request) + ([f"head size {request.head_dim} is below 16"] if narrow else [])


def _check_pffn(request: KernelRequest, limit: int) -> list[str]:
    """With ``gelu_fast`` in bf16 queries are kept in halves (``pffn.launch``), which leaves room for heads half as wide."""
    halved = request.dtype == "bf16" and "act_gelu_fast" in request.features
    return _check_width(request, limit // 2 if halved else limit)


def check_pffn(request: KernelRequest) -> list[str]:
    """As ``check_attention``, and half of that head size with ``gelu_fast`` in bf16."""
    return _check_pffn(request, MAX_WIDTH)


def check_pffn_hopper(request: KernelRequest) -> list[str]:
    """As ``check_pffn``, with the head size of the kernels for Hopper."""
    return _check_pffn(request, MAX_HOPPER_WIDTH)


def check_block_attention(request: KernelRequest) -> list[str]:
    """As ``check``, with the head size of block attention."""
    return _check_width(request, MAX_BLOCK_WIDTH)
