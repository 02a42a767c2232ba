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
from gem_kernels.ops.hstu_attention.hopper_slopes import query_product_kernel

TILE, HALF = 128, 64
"""Tokens of a tile, and of each warpgroup's half."""
STREAMED = {"forward": (128, {64: 4, 128: 2}), "grad": (64, {64: 3, 128: 3})}
"""Tokens of the blocks that stream past a tile, and how many are in flight by the larger head size."""
LONG, MAX_KEPT = 4096, 2**33
"""Tokens of a row from which its slopes are kept between two passes, and most bytes of those of all rows; others make the scores again."""
IN_FLIGHT = 6
"""Blocks of keys and their slopes that are on the way to the product with the keys."""


def forward(inputs: Any, out: Tensor) -> None:
    """Write ``out`` ``[tokens, heads, v_dim]``; ``inputs`` as in ``launch``."""
    q, k, v = _aligned(inputs.q), _aligned(inputs.k), _aligned(inputs.v)
    block, stages = _streamed("forward", q, v)
    _over_tiles(
        forward_kernel, inputs, **_words(inputs, q, k, v), q_desc=_ragged(q, HALF), k_desc=_ragged(k, block), v_desc=_ragged(v, block),
        o_desc=_ragged(out, HALF), norm=inputs.norm, BLOCK_M=TILE, BLOCK_N=block, STAGES=stages,
    )  # fmt: skip


def grad(inputs: Any, dout: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Write ``dq``, ``dk`` and ``dv`` of a call that has something to do, heads side by side; ``inputs`` as in ``launch``."""
    q, k, v, dout = _aligned(inputs.q), _aligned(inputs.k), _aligned(inputs.v), _aligned(dout.contiguous())
    block, stages = _streamed("grad", q, v)
    longest, squares = _squares(inputs)
    slopes = q.new_empty(squares * q.shape[1] * HALF, 1, HALF) if _keeps_slopes(inputs, squares * q.shape[1]) else None
    words: dict[str, Any] = {**_words(inputs, q, k, v), "factor": inputs.scale * inputs.norm, "STAGES": stages}
    kept = {"longest": longest, "squares": squares, "long": None if slopes is None else LONG}
    words |= {"q_desc": _ragged(q, HALF), "do_desc": _ragged(dout, HALF), "k_desc": _ragged(k, HALF), "v_desc": _ragged(v, HALF)}
    _over_tiles(query_grad_kernel, inputs, **words, dq_desc=_ragged(dq, HALF), long=kept["long"], BLOCK_M=TILE, BLOCK_N=block)
    written = {"dk_desc": _ragged(dk, HALF), "dv_desc": _ragged(dv, HALF), "norm": inputs.norm}
    _over_tiles(key_grad_kernel, inputs, **words, **written, **kept, slopes=slopes, BLOCK_M=block, BLOCK_N=TILE)
    if slopes is not None:
        _over_tiles(
            query_product_kernel, inputs, **kept, slopes_desc=_ragged(slopes, HALF), k_desc=words["k_desc"], dq=dq, k_head=k.stride(1),
            dq_token=dq.stride(0), D=q.shape[-1], BLOCK_M=TILE, STAGES=IN_FLIGHT,
        )  # fmt: skip


def _squares(inputs: Any) -> tuple[int, int]:
    """Blocks of the longest row, and squares of a block of keys by one of queries of all rows, at most: half of the blocks times the longest."""
    longest = -(-inputs.max_length // HALF)
    return longest, (inputs.q.shape[0] // HALF + inputs.rows) * (longest + 1) // 2


def _keeps_slopes(inputs: Any, squares: int) -> bool:
    """Whether slopes of scores go from the pass over the keys to that over the queries: there may be long rows, and ``squares`` over all heads fit.
    Which rows are long, the kernels see."""
    fits = squares * HALF * HALF * inputs.q.element_size() <= MAX_KEPT
    return inputs.causal and inputs.window is None and inputs.max_length >= LONG and fits


def _streamed(direction: str, q: Tensor, v: Tensor) -> tuple[int, int]:
    block, stages = STREAMED[direction]
    return block, stages[64 if max(q.shape[-1], v.shape[-1]) <= 64 else 128]


def _words(inputs: Any, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """What all passes over scores are told."""
    return {
        "scale": inputs.scale, "window": inputs.window or 0, "q_head": q.stride(1), "k_head": k.stride(1), "v_head": v.stride(1), "D": q.shape[-1],
        "V": v.shape[-1], "CAUSAL": inputs.causal, "WINDOW": inputs.window is not None, "ACTIVATION": kernel_activation("silu", q.dtype),
    }  # fmt: skip


def _over_tiles(kernel: Any, inputs: Any, **arguments: Any) -> None:
    """Launch one program on each SM over the tiles times the heads. Queries and keys have the same rows: one list serves all passes."""
    tokens, heads = inputs.q.shape[:2]
    longest, device = inputs.max_length, inputs.q.device
    found = tiles(Layout(inputs.offsets, inputs.offsets, inputs.rows, longest, longest, tokens, tokens, device), "q", TILE)
    if found.bound * heads > MAX_ITEMS:
        raise RequestError(f"hstu_attention of {found.bound} tiles and {heads} heads", f"the kernel counts to {MAX_ITEMS}", "Split the batch.")
    grid = programs(found.bound * heads, 1, device, persistent=True)
    launcher.launch(kernel, grid, device, {"records": found.records, "count": found.count, "heads": heads, "num_warps": 4, **arguments})
