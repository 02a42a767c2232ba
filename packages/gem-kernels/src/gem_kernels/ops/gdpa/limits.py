"""What the ``triton`` backend of ``gdpa`` does not take. Imports no torch, so that kernels are listed quickly."""

from gem_core.spec import KernelRequest

MAX_WIDTH = 256
"""Largest head size: beyond it the accumulators of one tile no longer fit in registers."""
NO_BF16 = "the Triton interpreter computes bf16 products wrongly, without an error"


def check(request: KernelRequest) -> list[str]:
    """Reasons why the backend does not fit ``request`` that its declaration cannot express."""
    reasons = []
    if request.device == "interpreter" and request.dtype == "bf16":
        reasons.append(f"{NO_BF16}; test in fp32 or fp16 there")
    if request.head_dim is not None and request.head_dim > MAX_WIDTH:
        reasons.append(f"head size {request.head_dim} is above {MAX_WIDTH}")
    return reasons
