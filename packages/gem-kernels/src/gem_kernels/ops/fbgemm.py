"""The ``fbgemm`` backend of three jagged helpers: the jagged operators of fbgemm-gpu, held to the contract on the CPU.

fbgemm joins and splits no jagged tensors, and pads no float64.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from gem_core.ops.padded import own_precision
from gem_core.spec import MachineError


@cache
def _operators() -> Any:
    """``torch.ops.fbgemm``, filled."""
    try:
        import fbgemm_gpu  # noqa: F401  registers the operators
    except Exception as error:  # a wheel that was built for another torch fails in ways of its own
        so, do = f"fbgemm_gpu does not load: {error}", "`gem doctor` says which release fits this torch."
        raise MachineError("a jagged op with backend 'fbgemm'", so, do) from error
    operators = torch.ops.fbgemm
    if not hasattr(operators, "jagged_to_padded_dense"):
        so, do = "fbgemm_gpu is imported, but its native library is not loaded", "`gem doctor` says which release fits this torch."
        raise MachineError("a jagged op with backend 'fbgemm'", so, do)
    return operators


def jagged_pad(values: Tensor, offsets: Tensor, *, max_length: int, fill: float = 0.0, truncate: str | None = None) -> Tensor:
    """Packed rows to padded rows; as ``gem_core.ops.jagged_pad``.

    Raises:
        MachineError: fbgemm is missing or does not load.
    """
    tail = values.shape[1:]
    if truncate == "left":  # fbgemm drops ends only
        lengths = offsets.diff()
        kept = torch.arange(values.shape[0]) >= torch.repeat_interleave(offsets[1:] - max_length, lengths, output_size=values.shape[0])
        values = values[kept]
        offsets = torch.cat([offsets[:1], lengths.clamp(max=max_length).cumsum(0)])
    out: Tensor = _operators().jagged_to_padded_dense(values.reshape(values.shape[0], tail.numel()), [offsets], [max_length], fill)
    return out.view(out.shape[0], max_length, *tail)


def jagged_unpad(dense: Tensor, offsets: Tensor, *, total: int | None = None) -> Tensor:
    """Padded rows to packed rows; as ``gem_core.ops.jagged_unpad``.

    Raises:
        MachineError: fbgemm is missing or does not load.
    """
    tail, total = dense.shape[2:], int(offsets[-1]) if total is None else total
    values, _ = _operators().dense_to_jagged(dense.reshape(*dense.shape[:2], tail.numel()), [offsets], total)
    out: Tensor = values.view(total, *tail)
    return out


@own_precision
def jagged_dense_bmm_add(values: Tensor, offsets: Tensor, dense: Tensor, bias: Tensor, *, max_length: int) -> Tensor:
    """``values_r dense[r] + bias[r]`` for each row; as ``gem_core.ops.jagged_dense_bmm_add``.

    Raises:
        MachineError: fbgemm is missing or does not load.
    """
    product, _ = _operators().jagged_dense_bmm(values, offsets, dense, max_length)
    out: Tensor = product + bias.repeat_interleave(offsets.diff(), dim=0, output_size=values.shape[0])
    return out
