"""Launches of the Hopper kernels for an ``AttentionCall``. Importing this module needs triton."""

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gem_core.spec import RequestError
from gem_kernels.common import launcher
from gem_kernels.common.hopper.delta import delta_kernel
from gem_kernels.common.hopper.forward import forward_kernel
from gem_kernels.common.hopper.gluon import TensorDescriptor, gl
from gem_kernels.common.hopper.key_grad import key_grad_kernel
from gem_kernels.common.hopper.one_pass import SUMS, all_grads_kernel, query_sums_kernel
from gem_kernels.common.hopper.query_grad import query_grad_kernel
from gem_kernels.common.schedule import Tiles, programs
from gem_kernels.ops.limits import unmeasured

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
ONE_PASS = 1024
"""Longest row from which all gradients in one pass are faster than in two, on an H200."""
DELTA_BLOCK = 64
"""Tokens of which a program of ``delta_kernel`` adds up a head."""
SUMMERS = 6
"""Programs that an SM holds of the kernel that rounds the sums of ``all_grads``."""


def forward(call: "AttentionCall", out: Tensor, lse: Tensor | None) -> None:
    """Write ``out`` ``[out_tokens, heads, v_dim]`` and, for softmax, ``lse`` ``[heads, out_tokens]``."""
    q, k, v = _aligned(call.q), _aligned(call.k), _aligned(call.v)
    keys, stages = _blocks("forward", q, v)
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
    q, k, v, dout = _aligned(call.q), _aligned(call.k), _aligned(call.v), _aligned(dout)
    (keys, stages), half = _blocks("query_grad", q, v), TILE // 2
    do_desc = _ragged(dout, half)
    _over_tiles(
        call, query_grad_kernel, "q", TILE, call.heads, (q, k, v), keys=keys, stages=stages,
        q_desc=_ragged(q, half), do_desc=do_desc, o_desc=do_desc if out is None else _ragged(out, half),
        k_desc=_ragged(k, keys), v_desc=_ragged(v, keys), dq_desc=_ragged(dq, half), lse=lse, delta=delta, **_scales(call),
    )  # fmt: skip


def key_grad(call: "AttentionCall", dout: Tensor, dk: Tensor, dv: Tensor, *, lse: Tensor | None = None, delta: Tensor | None = None) -> None:
    """Write ``dk`` and ``dv``."""
    q, k, v, dout = _aligned(call.q), _aligned(call.k), _aligned(call.v), _aligned(dout)
    (queries, stages), keys = _blocks("key_grad", q, v), TILE
    _over_tiles(
        call, key_grad_kernel, "k", queries, call.kv_heads, (q, k, v), keys=keys, stages=stages,
        q_desc=_ragged(q, queries), do_desc=_ragged(dout, queries), k_desc=_ragged(k, keys // 2), v_desc=_ragged(v, keys // 2),
        dk_desc=_ragged(dk, keys // 2), dv_desc=_ragged(dv, keys // 2), lse=lse, delta=delta, SHARED=call.shared, **_scales(call),
    )  # fmt: skip


def one_pass_fits(q: Tensor, k: Tensor, v: Tensor, window: int | None, longest: int) -> bool:
    """Whether gradients are made by ``all_grads``: heads of 128, each query head with its own keys, no window, and rows so long that one pass is
    faster than two. Not in torch's deterministic mode: its additions meet in any order."""
    plain = window is None and q.shape[1:] == k.shape[1:] == v.shape[1:] and q.shape[-1] == 128
    return plain and longest >= ONE_PASS and unmeasured() and not torch.are_deterministic_algorithms_enabled()


def in_one_pass(call: "AttentionCall") -> bool:
    """As ``one_pass_fits``. Queries are no shared ones, and under a causal mask they are the rows of the keys: the mask is that of the diagonal."""
    aligned = not call.causal or (call.q_offsets is call.k_offsets and call.max_q == call.max_k)
    return not call.shared and aligned and one_pass_fits(call.q, call.k, call.v, call.window, min(call.max_q, call.max_k))


def grads(call: "AttentionCall", dout: Tensor, *, out: Tensor | None = None, lse: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of a call that ``in_one_pass`` takes; softmax needs ``out`` and ``lse``."""
    k_factor, v_factor = factors(call.activation, call.scale, call.scale_after)
    delta = None if out is None else delta_of(out, dout)
    return all_grads(
        call.op, (call.q, call.k, call.v, dout), call.tiles("k", TILE), call.tiles("q", TILE), call.rows, scale=_scales(call)["scale"],
        k_factor=k_factor, v_factor=v_factor, lse=lse, delta=delta, ACTIVATION=call.activation, AFTER=call.scale_after, CAUSAL=call.causal,
    )  # fmt: skip


def all_grads(
    op: str,
    read: tuple[Tensor, Tensor, Tensor, Tensor],
    keys: Tiles,
    queries: Tiles,
    rows: int,
    *,
    scale: float,
    k_factor: float,
    v_factor: float,
    lse: Tensor | None = None,
    delta: Tensor | None = None,
    **words: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v ``[tokens, heads, 128]`` by one pass over the keys, whose additions to dq meet in any order.

    Args:
        op: name of the op, for messages.
        read: q, k, v and dout, as many heads each.
        keys: the tiles of 128 keys.
        queries: the tiles of 128 queries.
        rows: number of rows.
        scale: factor on the scores.
        k_factor: what the sums for dq and dk are multiplied by at the end.
        v_factor: what those for dv are multiplied by.
        lse: of softmax, log2 of the denominators ``[heads, tokens]``.
        delta: of softmax, as ``delta_of`` gives it.
        words: ``ACTIVATION``, ``AFTER`` and ``CAUSAL`` of the kernel.
    """
    q, k, v, dout = (_aligned(x) for x in read)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    heads, half = q.shape[1], TILE // 2
    # Rows start at blocks of their own: that of the first token, and one more for each row before.
    sums = q.new_zeros(((q.shape[0] // half + rows + 1) * heads * 2, *SUMS), dtype=torch.float32)
    sums_desc = _Ragged(sums, list(sums.shape), list(sums.stride()), [1, *SUMS], _layout_of_sums())
    launcher.launch(all_grads_kernel, one_an_sm(op, keys, heads, q.device), q.device, {
        "q_desc": _ragged(q, half), "do_desc": _ragged(dout, half), "k_desc": _ragged(k, half), "v_desc": _ragged(v, half),
        "dk_desc": _ragged(dk, half), "dv_desc": _ragged(dv, half), "sums_desc": sums_desc, "lse": lse, "delta": delta,
        "records": keys.records, "count": keys.count, "heads": heads, "tokens": q.shape[0], "scale": scale, "k_factor": k_factor,
        "v_factor": v_factor, "q_head": q.stride(1), "k_head": k.stride(1), "v_head": v.stride(1), "D": q.shape[-1], "STAGES": 3,
        "AHEAD": False, "TURN": False, "num_warps": 4, **words,
    })  # fmt: skip
    dq_desc = _ragged(dq, half, dq.shape[-1] // 2)
    launcher.launch(query_sums_kernel, SUMMERS * one_an_sm(op, queries, heads, q.device), q.device, {
        "dq_desc": dq_desc, "sums": sums, "records": queries.records, "count": queries.count, "heads": heads, "factor": k_factor, "D": dq.shape[-1],
        "num_warps": 4,
    })  # fmt: skip
    return dq, dk, dv


def delta_of(out: Tensor, dout: Tensor) -> Tensor:
    """The sum of ``dout * out`` over each head ``[heads, tokens]`` float32, of contiguous tensors ``[tokens, heads, dim]``."""
    tokens, heads, dim = out.shape
    delta = out.new_empty((heads, tokens), dtype=torch.float32)
    grid = -(-tokens // DELTA_BLOCK) * heads
    launcher.launch(delta_kernel, grid, out.device, {
        "out": out, "dout": dout, "delta": delta, "heads": heads, "tokens": tokens, "D": dim, "BLOCK": DELTA_BLOCK, "num_warps": 4,
    })  # fmt: skip
    return delta


def factors(activation: str, scale: float, after: bool) -> tuple[float, float]:
    """What the sums for dq and dk, and those for dv, lack: ``gates`` leaves a half of slopes out, and of weights a half and the scale."""
    if activation in ("gelu_bf16", "gelu_tanh_bf16", "silu_bf16"):
        return 0.5 * scale, 0.5 * scale
    return scale, scale if after else 1.0  # softmax too


def _blocks(direction: str, q: Tensor, v: Tensor) -> tuple[int, int]:
    return BLOCKS[direction][64 if max(q.shape[-1], v.shape[-1]) <= 64 else 128]


def _scales(call: "AttentionCall") -> dict[str, float]:
    """The factor on the scores as the kernels of the gradients take it, and the factor on their sums."""
    return {"scale": call.scale * math.log2(math.e) if call.activation == "softmax" else call.scale, "factor": call.scale}


def _aligned(x: Tensor) -> Tensor:
    """``x`` ``[tokens, heads, width]``, copied where the copy engine cannot address it: it wants multiples of 16 bytes."""
    fits = x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and (x.shape[1] - 1) * x.stride(1) + x.shape[2] <= MAX_COLUMNS
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _ragged(x: Tensor, rows: int, columns: int | None = None) -> TensorDescriptor:
    """The descriptor of ``gem_kernels.common.hopper.language`` for blocks of ``rows`` tokens of one head of ``x`` ``[tokens, heads, width]``, or of
    some of its columns."""
    heads, width = x.shape[1:]
    columns = columns or width
    block = [1, 1, rows, columns]
    token = x.stride(0)
    shape = [AXIS, AXIS, 2**30, (heads - 1) * x.stride(1) + width]
    return _Ragged(x, shape, [2**34 - token, token, token, 1], block, _layout(rows, columns, x.dtype))


class _Ragged(TensorDescriptor):  # type: ignore[misc]
    def __post_init__(self) -> None:
        """No checks: ``_aligned`` has seen to what they ask, and they take longer than the rest of a launch."""


@cache
def _layout(rows: int, width: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], DTYPES[dtype])


@cache
def _layout_of_sums() -> Any:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=3)


def one_an_sm(op: str, found: Tiles, heads: int, device: torch.device) -> int:
    """One program on each SM, for at most as many items."""
    if found.bound * heads > MAX_ITEMS:
        raise RequestError(f"{op} of {found.bound} tiles and {heads} heads", f"the kernel counts to {MAX_ITEMS}", "Split the batch.")
    return programs(found.bound * heads, 1, device, persistent=True)


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
    grid = one_an_sm(call.op, found, heads, q.device)
    given = {
        "records": found.records, "count": found.count, "heads": call.heads, "out_tokens": call.out_tokens, "window": call.window or 0,
        "q_head": q.stride(1), "k_head": k.stride(1), "v_head": v.stride(1), "GROUP": call.heads // call.kv_heads, "D": q.shape[-1],
        "V": v.shape[-1], "BLOCK_M": queries, "BLOCK_N": keys, "STAGES": stages, "ACTIVATION": call.activation, "SCALE_AFTER": call.scale_after,
        "CAUSAL": call.causal, "WINDOW": call.window is not None, "num_warps": 4,
    }  # fmt: skip
    launcher.launch(kernel, grid, q.device, {**given, **arguments})
