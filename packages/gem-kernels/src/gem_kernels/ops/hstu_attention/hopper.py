"""Launches of the Hopper kernels of HSTU: rows without prefix, targets and bias. Importing this module needs triton."""

from typing import Any

from torch import Tensor

from gem_kernels.common import launcher
from gem_kernels.common.hopper.launch import _aligned, _ragged, all_grads, factors, one_an_sm, one_pass_fits
from gem_kernels.common.schedule import Layout, Tiles, tiles
from gem_kernels.ops.gdpa.call import kernel_activation
from gem_kernels.ops.hstu_attention.hopper_forward import forward_kernel
from gem_kernels.ops.hstu_attention.hopper_key_grad import key_grad_kernel
from gem_kernels.ops.hstu_attention.hopper_query_grad import query_grad_kernel
from gem_kernels.ops.limits import unmeasured

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


def grad(inputs: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of a call that has something to do; ``inputs`` as in ``launch``."""
    q, k, v, dout = _aligned(inputs.q), _aligned(inputs.k), _aligned(inputs.v), _aligned(dout.contiguous())
    if one_pass_fits(q, k, v, inputs.window, inputs.max_length):
        found, activation = _tiles(inputs), kernel_activation("silu", q.dtype)
        k_factor, v_factor = factors(activation, inputs.scale, after=False)
        return all_grads(
            "hstu_attention", (q, k, v, dout), found, found, inputs.rows, scale=inputs.scale, k_factor=k_factor * inputs.norm,
            v_factor=v_factor * inputs.norm, ACTIVATION=activation, AFTER=False, CAUSAL=inputs.causal,
        )  # fmt: skip
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    block, stages = _streamed("grad", q, v)
    read = {"q_desc": _ragged(q, HALF), "do_desc": _ragged(dout, HALF), "k_desc": _ragged(k, HALF), "v_desc": _ragged(v, HALF)}
    # The sums get what ``silu_gate`` leaves out; no GPU has run it yet.
    gate = unmeasured()
    factor, norm = (0.5 * inputs.scale * inputs.norm,) * 2 if gate else (inputs.scale * inputs.norm, inputs.norm)
    read |= {"factor": factor, "STAGES": stages, "ACTIVATION": "silu_gate" if gate else kernel_activation("silu", q.dtype)}
    _over_tiles(query_grad_kernel, inputs, (q, k, v), **read, dq_desc=_ragged(dq, HALF), BLOCK_M=TILE, BLOCK_N=block)
    written = {"dk_desc": _ragged(dk, HALF), "dv_desc": _ragged(dv, HALF), "norm": norm}
    _over_tiles(key_grad_kernel, inputs, (q, k, v), **read, **written, BLOCK_M=block, BLOCK_N=TILE)
    return dq, dk, dv


def _streamed(direction: str, q: Tensor, v: Tensor) -> tuple[int, int]:
    block, stages = STREAMED[direction]
    return block, stages[64 if max(q.shape[-1], v.shape[-1]) <= 64 else 128]


def _tiles(inputs: Any) -> Tiles:
    """Queries and keys have the same rows, so that one list serves all passes."""
    tokens, longest = inputs.q.shape[0], inputs.max_length
    return tiles(Layout(inputs.offsets, inputs.offsets, inputs.rows, longest, longest, tokens, tokens, inputs.q.device), "q", TILE)


def _over_tiles(kernel: Any, inputs: Any, read: tuple[Tensor, Tensor, Tensor], **arguments: Any) -> None:
    """Launch one program on each SM over the tiles times the heads."""
    q, k, v = read
    heads, found = q.shape[1], _tiles(inputs)
    grid = one_an_sm("hstu_attention", found, heads, q.device)
    given = {
        "records": found.records, "count": found.count, "heads": heads, "scale": inputs.scale, "window": inputs.window or 0,
        "q_head": q.stride(1), "k_head": k.stride(1), "v_head": v.stride(1), "D": q.shape[-1], "V": v.shape[-1],
        "CAUSAL": inputs.causal, "WINDOW": inputs.window is not None, "num_warps": 4,
    }  # fmt: skip
    launcher.launch(kernel, grid, q.device, {**given, **arguments})
