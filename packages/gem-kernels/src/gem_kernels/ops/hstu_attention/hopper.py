"""HSTU rows without prefix, targets and bias are gdpa with SiLU, a causal mask and a factor: the Hopper kernels of gdpa give their gradients.

The factor is applied to the upstream gradient, a pass over memory. Importing this module needs triton.
"""

from typing import Any

from torch import Tensor

from gem_kernels.common.hopper import launch as kernels
from gem_kernels.ops.attention import AttentionCall
from gem_kernels.ops.gdpa.call import kernel_activation


def grad(inputs: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of a call that has something to do; ``inputs`` as in ``launch``."""
    rows = {"q_offsets": inputs.offsets, "k_offsets": inputs.offsets, "max_q": inputs.max_length, "max_k": inputs.max_length}
    mask = {"causal": inputs.causal, "window": inputs.window, "activation": kernel_activation("silu", inputs.q.dtype)}
    call = AttentionCall(op="hstu_attention", q=inputs.q, k=inputs.k, v=inputs.v, scale=inputs.scale, **rows, **mask)
    dq, dk, dv = (t.new_empty(t.shape) for t in (call.q, call.k, call.v))
    dout = (dout * inputs.norm).contiguous()
    kernels.query_grad(call, dout, dq)
    kernels.key_grad(call, dout, dk, dv)
    return dq, dk, dv
