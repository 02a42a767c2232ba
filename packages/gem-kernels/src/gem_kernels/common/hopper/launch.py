"""Launches of the Hopper kernels for an ``AttentionCall``. Importing this module needs triton."""

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gem_core.spec import RequestError
from gem_kernels.common import launcher
from gem_kernels.common.compiled import Block, Described
from gem_kernels.common.hopper.forward import forward_kernel
from gem_kernels.common.hopper.gluon import gl
from gem_kernels.common.hopper.key_grad import key_grad_kernel
from gem_kernels.common.hopper.query_grad import query_grad_kernel
from gem_kernels.common.schedule import programs

if TYPE_CHECKING:
    from gem_kernels.ops.attention import AttentionCall

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
MAX_COLUMNS = 2**31 - 1
MAX_ITEMS = 2**31 - 1
AXIS = 2**31 - 2**16
"""Size of the descriptor axes that are not to end anywhere."""
TILE = 128
"""Tokens of a tile, half of them for each warpgroup; a descriptor copies a half."""
BLOCKS = {
    "forward": {64: (128, 4), 128: (128, 2)},
    "query_grad": {64: (64, 3), 128: (64, 3)},
    "key_grad": {64: (64, 3), 128: (64, 3)},
}
"""Tokens of the blocks that stream past a tile, and how many are in flight, by the larger head size: what fits the registers and shared memory."""


def forward(call: "AttentionCall", out: Tensor, lse: Tensor | None) -> None:
    """Write ``out`` ``[out_tokens, heads, v_dim]`` and, for softmax, ``lse`` ``[heads, out_tokens]``."""
    q, k, v = map(_aligned, (call.q, call.k, call.v))
    keys, stages = _blocks("forward", call)
    sign = (call.scale > 0) - (call.scale < 0)
    softmax = call.activation == "softmax"
    _over_tiles(
        call, forward_kernel, "q", TILE, call.heads, (q, k, v), keys=keys, stages=stages,
        q_desc=_ragged(q, TILE // 2), k_desc=_ragged(k, keys), v_desc=_ragged(v, keys), o_desc=_ragged(out, TILE // 2), lse=lse,
        scale=(abs(call.scale) or 1.0) * math.log2(math.e) if softmax else call.scale, SIGN=sign if softmax else 1, SHARED=call.shared,
    )  # fmt: skip


def query_grad(
    call: "AttentionCall", dout: Tensor, dq: Tensor, *, out: Tensor | None = None, lse: Tensor | None = None, delta: Tensor | None = None
) -> None:
    """Write ``dq`` and, for softmax, ``delta``. Not for a shared query."""
    q, k, v, dout = map(_aligned, (call.q, call.k, call.v, dout))
    (keys, stages), half = _blocks("query_grad", call), TILE // 2
    do_desc = _ragged(dout, half)
    _over_tiles(
        call, query_grad_kernel, "q", TILE, call.heads, (q, k, v), keys=keys, stages=stages,
        q_desc=_ragged(q, half), do_desc=do_desc, o_desc=do_desc if out is None else _ragged(out, half),
        k_desc=_ragged(k, keys), v_desc=_ragged(v, keys), dq_desc=_ragged(dq, half), lse=lse, delta=delta, **_scales(call),
    )  # fmt: skip


def key_grad(call: "AttentionCall", dout: Tensor, dk: Tensor, dv: Tensor, *, lse: Tensor | None = None, delta: Tensor | None = None) -> None:
    """Write ``dk`` and ``dv``."""
    q, k, v, dout = map(_aligned, (call.q, call.k, call.v, dout))
    (queries, stages), keys = _blocks("key_grad", call), TILE
    _over_tiles(
        call, key_grad_kernel, "k", queries, call.kv_heads, (q, k, v), keys=keys, stages=stages,
        q_desc=_ragged(q, queries), do_desc=_ragged(dout, queries), k_desc=_ragged(k, keys // 2), v_desc=_ragged(v, keys // 2),
        dk_desc=_ragged(dk, keys // 2), dv_desc=_ragged(dv, keys // 2), lse=lse, delta=delta, SHARED=call.shared, **_scales(call),
    )  # fmt: skip


def _blocks(direction: str, call: "AttentionCall") -> tuple[int, int]:
    return BLOCKS[direction][64 if call.dim <= 64 and call.v_dim <= 64 else 128]


def _scales(call: "AttentionCall") -> dict[str, float]:
    """The factor on the scores as the kernels of the gradients take it, and the factor on their sums."""
    return {"scale": call.scale * math.log2(math.e) if call.activation == "softmax" else call.scale, "factor": call.scale}


def _aligned(x: Tensor) -> Tensor:
    """``x`` ``[tokens, heads, width]``, copied where the copy engine cannot address it: it wants multiples of 16 bytes."""
    (token, head, _), (_, heads, width) = x.stride(), x.shape
    fits = x.data_ptr() % 16 == 0 and token % 8 == 0 and (heads - 1) * head + width <= MAX_COLUMNS
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _ragged(x: Tensor, rows: int) -> Any:
    """The descriptor of ``gem_kernels.common.hopper.language`` for blocks of ``rows`` tokens of one head of ``x`` ``[tokens, heads, width]``."""
    return Block((x, _described(x.dtype, x.shape[1:], x.stride(), rows)))


@lru_cache(1024)
def _described(dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...], rows: int) -> Described:
    (heads, width), (token, head, _) = shape, strides
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], DTYPES[dtype])
    return Described((1, 1, rows, width), layout, (AXIS, AXIS, 2**30, (heads - 1) * head + width), (2**34 - token, token, token, 1))


def _over_tiles(
    call: "AttentionCall",
    kernel: Any,
    axis: str,
    queries: int,
    heads: int,
    read: tuple[Tensor, Tensor, Tensor],
    *,
    keys: int,
    stages: int,
    **arguments: Any,
) -> None:
    """Launch one program on each SM over the tiles of ``axis``, times ``heads``."""
    q, k, v = read
    found = call.tiles(axis, queries if axis == "q" else keys)
    if found.bound * heads > MAX_ITEMS:
        raise RequestError(f"{call.op} of {found.bound} tiles and {heads} heads", f"the kernel counts to {MAX_ITEMS}", "Split the batch.")
    grid = programs(found.bound * heads, 1, q.device, persistent=True)
    arguments |= {
        "records": found.records, "count": found.count, "heads": call.heads, "out_tokens": call.out_tokens, "window": call.window or 0,
        "q_head": q.stride(1), "k_head": k.stride(1), "v_head": v.stride(1), "GROUP": call.heads // call.kv_heads, "D": call.dim,
        "V": call.v_dim, "BLOCK_M": queries, "BLOCK_N": keys, "STAGES": stages, "ACTIVATION": call.activation, "SCALE_AFTER": call.scale_after,
        "CAUSAL": call.causal, "WINDOW": call.window is not None, "num_warps": 4,
    }  # fmt: skip
    launcher.launch(kernel, grid, q.device, arguments)
