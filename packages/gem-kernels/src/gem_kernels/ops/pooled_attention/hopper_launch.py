"""The launch of ``hopper_grad``. Importing this module needs triton."""

import math
from typing import TYPE_CHECKING

from torch import Tensor

from gem_core.spec import RequestError
from gem_kernels.common import launcher
from gem_kernels.common.hopper.launch import MAX_ITEMS, TILE, _aligned, _ragged
from gem_kernels.common.schedule import Layout, programs, tiles
from gem_kernels.ops.pooled_attention.hopper_grad import grad_kernel

if TYPE_CHECKING:
    from gem_kernels.ops.pooled_attention.launch import Inputs

HALF = 64
"""Keys of a block, and seeds, of one warpgroup."""
STAGES = {64: 4, 128: 2}
"""Blocks of keys that are in flight, by head size."""
HALF_AN_SM = {"maxnreg": 128}
"""Registers of a program of one warpgroup and one that copies, before they share them out: two such programs fill an SM."""


def grad(inputs: "Inputs", dout: Tensor, out: Tensor, lse: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
    """Gradient of the seeds ``[rows, seeds, heads, dim]``, contiguous; writes those of k and v to ``dk`` and ``dv``, heads side by side.

    ``dout`` and ``out`` are contiguous ``[rows, seeds, heads, dim]``; ``lse`` is float32 ``[rows, seeds, heads]``, rows and seeds as one axis.
    """
    rows, seeds, heads, dim = inputs.q.shape
    q, do, o = (_aligned(x.flatten(0, 1)) for x in (inputs.q, dout, out))
    k, v = _aligned(inputs.k), _aligned(inputs.v)
    dq = q.new_empty(inputs.q.shape)
    groups, tokens, device = -(-seeds // HALF), k.shape[0], q.device
    size = HALF * groups
    found = tiles(Layout(None, inputs.offsets, rows, seeds, inputs.max_k, seeds, tokens, device), "q", TILE)
    if found.bound * heads > MAX_ITEMS:
        raise RequestError(f"pooled_attention of {rows} rows and {heads} heads", f"the kernel counts to {MAX_ITEMS} of both", "Split the batch.")
    launcher.launch(
        grad_kernel, programs(found.bound * heads, 3 - groups, device, persistent=True), device,
        {"q_desc": _ragged(q, size), "do_desc": _ragged(do, size), "o_half": _ragged(o, HALF), "do_half": _ragged(do, HALF),
         "k_desc": _ragged(k, HALF), "v_desc": _ragged(v, HALF),
         "dq_desc": _ragged(dq.flatten(0, 1), HALF), "dk_desc": _ragged(dk, HALF), "dv_desc": _ragged(dv, HALF), "dq": dq, "dk": dk, "dv": dv,
         "lse": lse, "records": found.records, "count": found.count, "heads": heads, "rows": rows, "seeds": seeds, "tokens": tokens,
         "lse_token": lse.stride(1), "lse_head": lse.stride(2), "q_head": q.stride(1), "k_head": k.stride(1), "v_head": v.stride(1),
         "dk_token": dk.stride(0), "dv_token": dv.stride(0), "scale": inputs.scale * math.log2(math.e), "factor": inputs.scale, "D": dim,
         "GROUPS": groups, "STAGES": STAGES[dim], "num_warps": 4, **(HALF_AN_SM if groups == 1 else {})},
    )  # fmt: skip
    return dq
