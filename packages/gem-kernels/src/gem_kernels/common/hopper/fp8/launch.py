"""Launches of the FP8 forward kernel for an ``AttentionCall``. Importing this module needs triton."""

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gem_core.spec import KernelUnavailable, RequestError
from gem_kernels.common import launcher
from gem_kernels.common.compiled import Block, Described
from gem_kernels.common.hopper.fp8.cast import cast_tokens_kernel, cast_values_kernel
from gem_kernels.common.hopper.fp8.forward import fp8_forward_kernel
from gem_kernels.common.hopper.gluon import gl
from gem_kernels.common.hopper.launch import TILE, _ragged
from gem_kernels.common.schedule import Tiles, programs

if TYPE_CHECKING:
    from gem_kernels.ops.attention import AttentionCall

DIM = 128
"""Head size of queries, keys and values."""
STAGES = 4
CAST_WARPS = 8
ACTIVATIONS = ("softmax", "gelu_bf16", "gelu_tanh_bf16", "silu_bf16")
MAX_ITEMS = 2**31 // TILE - 1
"""Tiles times heads: the copy engine counts their tokens in 32 bits."""


@dataclass(frozen=True, slots=True)
class Low:
    """The operands of a call as ``fp8.cast`` writes them: E4M3 in tiles, their scales, and where the keys of a row lie."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_scales: Tensor
    k_scales: Tensor
    v_scales: Tensor
    bounds: Tensor
    bases: Tensor


def forward(call: "AttentionCall", out: Tensor, lse: Tensor | None = None) -> None:
    """Write ``out`` ``[q_tokens, heads, 128]`` and, for softmax, ``lse`` ``[heads, q_tokens]``, the base-2 logarithms of its sums.

    Raises:
        KernelUnavailable: a call that the kernel does not take.
        RequestError: as ``cast``.
    """
    if reasons := why_not(call):
        raise KernelUnavailable(f"{call.op} with backend 'gluon_fp8'", "; ".join(reasons), "Name the backend 'gluon'.")
    attend(call, cast(call), out, lse)


def why_not(call: "AttentionCall") -> list[str]:
    """Why the kernel does not take a call; no reason if it does."""
    widths = {x.shape[-1] for x in (call.q, call.v)}
    reasons = [f"heads are {width} wide, not {DIM}" for width in sorted(widths - {DIM})]
    if call.q.dtype is not torch.bfloat16:
        reasons.append(f"its gradients are of bfloat16, this is {call.q.dtype}")
    if call.activation not in ACTIVATIONS:
        reasons.append(f"it has no activation {call.activation!r}")
    absent = {"a mask": call.causal, "a window": call.window is not None, "a bias": call.bias is not None, "a query that rows share": call.shared}
    return reasons + [f"it has no form with {what}" for what, asked in absent.items() if asked]


def cast(call: "AttentionCall") -> Low:
    """Cast q, k and v of a call.

    Raises:
        RequestError: more tiles times heads than the kernel counts.
    """
    queries, keys = _tiles(call, "q", call.heads), _tiles(call, "k", call.kv_heads)
    device = call.q.device

    def room(tiles: Tiles, heads: int) -> tuple[Tensor, Tensor]:
        low = torch.empty(tiles.bound * heads * TILE, DIM, dtype=torch.float8_e4m3fn, device=device)
        return low, torch.empty(tiles.bound * heads, device=device)

    (q, q_scales), (k, k_scales), (v, v_scales) = (room(queries, call.heads), room(keys, call.kv_heads), room(keys, call.kv_heads))
    bounds = torch.zeros((call.rows + 1) * call.kv_heads, dtype=torch.int32, device=device)
    low = Low(q, k, v, q_scales, k_scales, v_scales, bounds.view(torch.float32), torch.empty(call.rows + 1, dtype=torch.int32, device=device))
    for x, tiles, heads, elements, scales in ((call.q, queries, call.heads, q, q_scales), (call.k, keys, call.kv_heads, k, k_scales)):
        _over_tiles(cast_tokens_kernel, x, tiles, heads, low=elements, scales=scales, KEYS=tiles is keys)
    by_key = call.activation != "softmax"
    given = {"k_scales": k_scales, "bounds": bounds, "bases": low.bases, "BY_KEY": by_key}
    _over_tiles(cast_values_kernel, call.v, keys, call.kv_heads, low=v.view(torch.int32), scales=v_scales, **given)
    return low


def _over_tiles(kernel: Any, x: Tensor, tiles: Tiles, heads: int, **arguments: Any) -> None:
    """Launch a cast of ``x`` ``[tokens, heads, 128]`` with one program for each tile and head."""
    where = {"token_stride": x.stride(0), "head_stride": x.stride(1), "records": tiles.records, "count": tiles.count, "heads": heads}
    launcher.launch(kernel, tiles.bound * heads, x.device, {"x": x, **where, **arguments, "num_warps": CAST_WARPS})


def attend(call: "AttentionCall", low: Low, out: Tensor, lse: Tensor | None = None) -> None:
    """Write ``out`` ``[q_tokens, heads, 128]`` and, for softmax, ``lse`` ``[heads, q_tokens]`` from the operands of ``cast(call)``."""
    found = _tiles(call, "q", call.heads)
    softmax = call.activation == "softmax"
    before, after = (1.0, call.scale) if call.scale_after else (call.scale, 1.0)
    sign = (call.scale > 0) - (call.scale < 0) if softmax else 1
    launcher.launch(
        fp8_forward_kernel, programs(found.bound * call.heads, 1, out.device, persistent=True), out.device,
        {"q_desc": _tiled(low.q, TILE // 2), "k_desc": _tiled(low.k, TILE), "v_desc": _tiled(low.v, TILE), "o_desc": _ragged(out, TILE // 2),
         "q_scales": low.q_scales, "k_scales": low.k_scales, "v_scales": low.v_scales, "bounds": low.bounds, "records": found.records,
         "bases": low.bases, "count": found.count, "heads": call.heads, "out_tokens": call.out_tokens, "lse": lse,
         "scale": (abs(before) or 1.0) * math.log2(math.e) if softmax else before, "after": after, "SIGN": sign, "GROUP": call.heads // call.kv_heads,
         "STAGES": STAGES, "ACTIVATION": call.activation, "num_warps": 4},
    )  # fmt: skip


def _tiles(call: "AttentionCall", axis: str, heads: int) -> Tiles:
    found = call.tiles(axis, TILE)
    if found.bound * heads > MAX_ITEMS:
        raise RequestError(f"{call.op} of {found.bound} tiles and {heads} heads", f"the kernel counts to {MAX_ITEMS}", "Split the batch.")
    return found


def _tiled(x: Tensor, rows: int) -> Block:
    """The descriptor of ``x`` ``[tokens, 128]`` for blocks of ``rows``."""
    return Block((x, _described(rows)))


@cache
def _described(rows: int) -> Described:
    return Described((rows, DIM), gl.NVMMASharedLayout.get_default_for([rows, DIM], gl.float8e4nv))
