"""Launches of the Hopper kernels of HSTU: rows without prefix, targets and bias. Importing this module needs triton."""

from typing import Any

from torch import Tensor

from gem_core.spec import RequestError
from gem_kernels.common import launcher
from gem_kernels.common.hopper.launch import MAX_ITEMS, _aligned, _ragged
from gem_kernels.common.schedule import Layout, programs, tiles
from gem_kernels.ops.gdpa.call import kernel_activation
from gem_kernels.ops.hstu_attention.hopper_forward import forward_kernel
from gem_kernels.ops.hstu_attention.hopper_key_grad import key_grad_kernel
from gem_kernels.ops.hstu_attention.hopper_query_grad import query_grad_kernel

TILE, HALF = 128, 64
"""Tokens of a tile, and of each warpgroup's half."""
STREAMED = {"forward": (128, {64: 4, 128: 2}), "grad": (64, {64: 3, 128: 3})}
"""Tokens of the blocks that stream past a tile, and how many are in flight by the larger head size."""


def forward(inputs: Any, out: Tensor) -> None:
    """Write ``out`` ``[tokens, heads, v_dim]``; ``inputs`` as in ``launch``."""
    q, k, v = _aligned(inputs.q), _aligned(inputs.k), _aligned(inputs.v)
    block, stages = _streamed("forward", q, v)
    _over_tiles(
        forward_kernel, inputs, (q, k, v), q_desc=_ragged(q, HALF), k_desc=_ragged(k, block), v_desc=_ragged(v, block), o_desc=_ragged(out, HALF),
        norm=inputs.norm, BLOCK_M=TILE, BLOCK_N=block, STAGES=stages, ACTIVATION=kernel_activation("silu", q.dtype),
    )  # fmt: skip


def grad(inputs: Any, dout: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Write ``dq``, ``dk`` and ``dv`` of a call that has something to do, heads side by side; ``inputs`` as in ``launch``."""
    q, k, v, dout = _aligned(inputs.q), _aligned(inputs.k), _aligned(inputs.v), _aligned(dout.contiguous())
    block, stages = _streamed("grad", q, v)
    read = {"q_desc": _ragged(q, HALF), "do_desc": _ragged(dout, HALF), "k_desc": _ragged(k, HALF), "v_desc": _ragged(v, HALF)}
    read |= {"factor": inputs.scale * inputs.norm, "STAGES": stages, "ACTIVATION": kernel_activation("silu", q.dtype)}
    _over_tiles(query_grad_kernel, inputs, (q, k, v), **read, dq_desc=_ragged(dq, HALF), BLOCK_M=TILE, BLOCK_N=block)
    written = {"dk_desc": _ragged(dk, HALF), "dv_desc": _ragged(dv, HALF), "norm": inputs.norm}
    _over_tiles(key_grad_kernel, inputs, (q, k, v), **read, **written, BLOCK_M=block, BLOCK_N=TILE)


def _streamed(direction: str, q: Tensor, v: Tensor) -> tuple[int, int]:
    block, stages = STREAMED[direction]
    return block, stages[64 if max(q.shape[-1], v.shape[-1]) <= 64 else 128]


def _over_tiles(kernel: Any, inputs: Any, read: tuple[Tensor, Tensor, Tensor], **arguments: Any) -> None:
    """Launch one program on each SM over the tiles times the heads. Queries and keys have the same rows, so that one list serves all passes."""
    q, k, v = read
    tokens, heads = q.shape[:2]
    longest = inputs.max_length
    found = tiles(Layout(inputs.offsets, inputs.offsets, inputs.rows, longest, longest, tokens, tokens, q.device), "q", TILE)
    if found.bound * heads > MAX_ITEMS:
        raise RequestError(f"hstu_attention of {found.bound} tiles and {heads} heads", f"the kernel counts to {MAX_ITEMS}", "Split the batch.")
    grid = programs(found.bound * heads, 1, q.device, persistent=True)
    given = {
        "records": found.records, "count": found.count, "heads": heads, "scale": inputs.scale, "window": inputs.window or 0,
        "q_head": q.stride(1), "k_head": k.stride(1), "v_head": v.stride(1), "D": q.shape[-1], "V": v.shape[-1],
        "CAUSAL": inputs.causal, "WINDOW": inputs.window is not None, "num_warps": 4,
    }  # fmt: skip
    launcher.launch(kernel, grid, q.device, {**given, **arguments})
