"""Launches of the Hopper kernels of block attention. Importing this module needs triton."""

from math import gcd
from typing import TYPE_CHECKING

from torch import Tensor

from gem_core.spec import RequestError
from gem_kernels.common import launcher
from gem_kernels.common.hopper.launch import MAX_ITEMS, _ragged
from gem_kernels.common.schedule import Layout, programs, tiles
from gem_kernels.ops.block_attention.hopper import backward_kernel, forward_kernel

if TYPE_CHECKING:
    from gem_kernels.ops.block_attention.launch import Inputs, Settings

ROWS = 64
"""Tokens of a tile."""
GROUP = 4
"""Heads of a tile that a program computes one after the other with the same angles; fewer where that does not divide their number."""
RESIDENT = 2
"""Programs that share an SM, by shared memory."""


def run(kernel: str, inputs: "Inputs", settings: "Settings", results: dict[str, Tensor], dout: Tensor | None) -> None:
    """Launch ``forward`` or ``backward``, which writes ``results``; arguments as ``launch`` has them, addressed by the copy engine.

    Raises:
        RequestError: more tiles than the kernels count, or more tokens than a list of tiles can address.
    """
    q, k, v, q_gain, k_gain, offsets, rope = inputs
    max_length, block, scale, rope_on_v, eps = settings
    tokens, heads, dim = q.shape
    span, group = ROWS // block * block, gcd(heads, GROUP)
    found = tiles(Layout(offsets, offsets, offsets.shape[0] - 1, max_length, max_length, tokens, tokens, q.device), "q", span)
    items = found.bound * (heads // group)
    if items * group > MAX_ITEMS:
        so = f"the kernel counts to {MAX_ITEMS}"
        raise RequestError(f"block_attention of {found.bound} tiles and {heads} heads", so, "Split the batch.")
    tensors = {"q": q, "k": k, "v": v, **results} | ({} if dout is None else {"dout": dout})
    arguments = {
        **{f"{name}_desc": _ragged(x, ROWS) for name, x in tensors.items()}, "rope": rope, "q_gain": q_gain, "k_gain": k_gain,
        "records": found.records, "count": found.count, "heads": heads, "scale": scale, "eps": eps, "q_head": q.stride(1), "k_head": k.stride(1),
        "v_head": v.stride(1), "rope_token": 0 if rope is None else rope.stride(0), "D": dim, "V": v.shape[2], "BLOCK": block, "SPAN": span,
        "GROUP": group, "ROPE": rope is not None, "ROPE_V": rope_on_v, "NORM": q_gain is not None, "num_warps": 4,
    }  # fmt: skip
    function = forward_kernel if kernel == "forward" else backward_kernel
    launcher.launch(function, programs(items, RESIDENT, q.device, persistent=True), q.device, arguments)
