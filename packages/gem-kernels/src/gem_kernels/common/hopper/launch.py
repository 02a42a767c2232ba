"""Launches of the Hopper kernels for an ``AttentionCall``. Importing this module needs triton."""

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gem_core.spec import RequestError
from gem_kernels.common.hopper.forward import forward_kernel
from gem_kernels.common.hopper.gluon import TensorDescriptor, gl
from gem_kernels.common.hopper.key_grad import key_grad_kernel
from gem_kernels.common.hopper.query_grad import query_grad_kernel
from gem_kernels.common.plan import MOST, Described, planned
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
    q, k, v = _aligned(call.q), _aligned(call.k), _aligned(call.v)
    keys, stages = _blocks("forward", q, v)
    sign = (call.scale > 0) - (call.scale < 0)
    softmax = call.activation == "softmax"
    blocks = {"q_desc": (q, TILE // 2), "k_desc": (k, keys), "v_desc": (v, keys), "o_desc": (out, TILE // 2)}
    _over_tiles(
        call, forward_kernel, "q", TILE, call.heads, (q, k, v), blocks, {"lse": lse}, keys=keys, stages=stages,
        scale=(abs(call.scale) or 1.0) * math.log2(math.e) if softmax else call.scale, SIGN=sign if softmax else 1, SHARED=call.shared,
    )  # fmt: skip


def query_grad(
    call: "AttentionCall", dout: Tensor, dq: Tensor, *, out: Tensor | None = None, lse: Tensor | None = None, delta: Tensor | None = None
) -> None:
    """Write ``dq`` and, for softmax, ``delta``. Not for a shared query."""
    q, k, v, dout = _aligned(call.q), _aligned(call.k), _aligned(call.v), _aligned(dout)
    (keys, stages), half = _blocks("query_grad", q, v), TILE // 2
    blocks = {"q_desc": (q, half), "do_desc": (dout, half), "o_desc": (dout if out is None else out, half)}
    blocks |= {"k_desc": (k, keys), "v_desc": (v, keys), "dq_desc": (dq, half)}
    statistics = {"lse": lse, "delta": delta}
    _over_tiles(call, query_grad_kernel, "q", TILE, call.heads, (q, k, v), blocks, statistics, keys=keys, stages=stages, **_scales(call))


def key_grad(call: "AttentionCall", dout: Tensor, dk: Tensor, dv: Tensor, *, lse: Tensor | None = None, delta: Tensor | None = None) -> None:
    """Write ``dk`` and ``dv``."""
    q, k, v, dout = _aligned(call.q), _aligned(call.k), _aligned(call.v), _aligned(dout)
    (queries, stages), half = _blocks("key_grad", q, v), TILE // 2
    blocks = {
        "q_desc": (q, queries),
        "do_desc": (dout, queries),
        "k_desc": (k, half),
        "v_desc": (v, half),
        "dk_desc": (dk, half),
        "dv_desc": (dv, half),
    }
    _over_tiles(
        call, key_grad_kernel, "k", queries, call.kv_heads, (q, k, v), blocks, {"lse": lse, "delta": delta}, keys=TILE, stages=stages,
        SHARED=call.shared, **_scales(call),
    )  # fmt: skip


def _blocks(direction: str, q: Tensor, v: Tensor) -> tuple[int, int]:
    return BLOCKS[direction][64 if max(q.shape[-1], v.shape[-1]) <= 64 else 128]


def _scales(call: "AttentionCall") -> dict[str, float]:
    """The factor on the scores as the kernels of the gradients take it, and the factor on their sums."""
    return {"scale": call.scale * math.log2(math.e) if call.activation == "softmax" else call.scale, "factor": call.scale}


def _aligned(x: Tensor) -> Tensor:
    """``x`` ``[tokens, heads, width]``, copied where the copy engine cannot address it: it wants multiples of 16 bytes."""
    fits = x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and (x.shape[1] - 1) * x.stride(1) + x.shape[2] <= MAX_COLUMNS
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _ragged(x: Tensor, rows: int) -> TensorDescriptor:
    """The descriptor of ``gem_kernels.common.hopper.language`` for blocks of ``rows`` tokens of one head of ``x`` ``[tokens, heads, width]``."""
    found = _described(*_form(x, rows))
    return _Ragged(x, found.shape, found.strides, list(found.block), found.layout)


class _Ragged(TensorDescriptor):  # type: ignore[misc]
    def __post_init__(self) -> None:
        """No checks: ``_aligned`` has seen to what they ask, and they take longer than the rest of a launch."""


def _form(x: Tensor, rows: int) -> tuple[Any, ...]:
    """All that a ragged descriptor holds beside the address."""
    return x.dtype, x.shape[1:], x.stride(), rows


@lru_cache(MOST)
def _described(dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...], rows: int) -> Described:
    (heads, width), (token, head, _) = shape, strides
    block = (1, 1, rows, width)
    layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[dtype])
    return Described(block, layout, (AXIS, AXIS, 2**30, (heads - 1) * head + width), (2**34 - token, token, token, 1))


Blocks = dict[str, tuple[Tensor, int]]
"""By name of a descriptor, a tensor ``[tokens, heads, width]`` and how many tokens of one of its heads are copied at once."""


def launch_ragged(kernel: Any, grid: int, blocks: Blocks, shared: dict[str, Any], **varying: Any) -> None:
    """Launch a kernel with ragged descriptors.

    Args:
        kernel: the kernel.
        grid: number of programs.
        blocks: what is described, one tensor at least.
        shared: arguments and options that follow from the op's options and the forms of its tensors, whatever the number of tokens.
        varying: all others.
    """
    tensors = {name: x for name, (x, _) in blocks.items()}
    forms = {name: _form(*block) for name, block in blocks.items()}
    plan = planned(kernel, (*forms.values(),), shared, lambda: {name: _described(*form) for name, form in forms.items()})
    plan.launch(grid, next(iter(tensors.values())).device, **varying, **tensors)


def _over_tiles(
    call: "AttentionCall",
    kernel: Any,
    axis: str,
    queries: int,
    heads: int,
    read: tuple[Tensor, Tensor, Tensor],
    blocks: Blocks,
    statistics: dict[str, Tensor | None],
    *,
    keys: int,
    stages: int,
    **shared: Any,
) -> None:
    """Launch one program on each SM over the tiles of ``axis``, times ``heads``."""
    q, k, v = read
    found = call.tiles(axis, queries if axis == "q" else keys)
    if found.bound * heads > MAX_ITEMS:
        raise RequestError(f"{call.op} of {found.bound} tiles and {heads} heads", f"the kernel counts to {MAX_ITEMS}", "Split the batch.")
    grid = programs(found.bound * heads, 1, q.device, persistent=True)
    shared |= {
        "heads": call.heads, "window": call.window or 0, "q_head": q.stride(1), "k_head": k.stride(1), "v_head": v.stride(1),
        "GROUP": call.heads // call.kv_heads, "D": q.shape[-1], "V": v.shape[-1], "BLOCK_M": queries, "BLOCK_N": keys, "STAGES": stages,
        "ACTIVATION": call.activation, "SCALE_AFTER": call.scale_after, "CAUSAL": call.causal, "WINDOW": call.window is not None, "num_warps": 4,
    }  # fmt: skip
    launch_ragged(kernel, grid, blocks, shared, records=found.records, count=found.count, out_tokens=call.out_tokens, **statistics)
