"""Linear layers with a matrix for each group of rows: a token of every row, or the rows of an expert. Each group is rounded by itself.

Formats are chosen as for one linear layer: those of the activations, the weights and the output gradient, and whether the weight gradient is low.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from gem_core.spec import RequestError
from gem_precision.linear import LinearRule, Watch, emulated_linear
from gem_precision.weights import HeldWeight


def grouped_linear(x: Tensor, weight: Tensor, rule: LinearRule, held: HeldWeight, watch: Watch | None = None) -> Tensor:
    """``x[g] weight[g]^T`` for each group: ``[groups, rows, in]`` and ``[groups, out, in]`` to ``[groups, rows, out]`` float32, with gradients.

    Raises:
        RequestError: shapes do not fit together.
    """
    if x.dim() != 3 or weight.dim() != 3 or x.shape[0] != weight.shape[0] or x.shape[2] != weight.shape[2]:
        so = f"x has shape {list(x.shape)} and weight {list(weight.shape)}"
        raise RequestError("grouped_linear", so, "Give x [groups, rows, in] and weight [groups, out, in].")
    return emulated_linear(x, weight, rule, held, watch)


def token_linear(x: Tensor, weight: Tensor, rule: LinearRule, held: HeldWeight, watch: Watch | None = None, bias: Tensor | None = None) -> Tensor:
    """A linear map for each token: ``[rows * tokens, in]``, ``[tokens, in, out]``, ``[tokens, out]`` to ``[rows * tokens, out]``, float32."""
    tokens = x.reshape(-1, *weight.shape[:2]).transpose(0, 1)
    out = grouped_linear(tokens, weight.mT, rule, held, watch).transpose(0, 1)
    return (out if bias is None else out + bias).flatten(0, 1)


def ragged_linear(x: Tensor, weight: Tensor, ends: Tensor, rule: LinearRule, held: Sequence[HeldWeight]) -> Tensor:
    """As ``grouped_linear`` with as many rows in each group as ``ends`` says, as torch's grouped matmul takes them. Blocks do not cross groups.

    Args:
        x: ``[rows, in]``, the groups one after the other.
        weight: ``[groups, out, in]``.
        ends: ``[groups]`` integers: where each group ends, the last with the last row. Read on the host.
        rule: the formats.
        held: what holds each group's weight.

    Returns:
        ``[rows, out]`` float32.

    Raises:
        RequestError: shapes do not fit together, or ``ends`` are no ends of consecutive groups.
    """
    edges = [0, *ends.tolist()]
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2] or len(edges) - 1 != len(weight) or len(held) != len(weight):
        so = f"x has shape {list(x.shape)}, weight {list(weight.shape)}; there are {len(edges) - 1} ends, and {len(held)} weights are held"
        raise RequestError("ragged_linear", so, "Give x [rows, in], weight [groups, out, in], and one end and one held weight a group.")
    if edges != sorted(edges) or edges[-1] != len(x):
        raise RequestError("ragged_linear", f"groups end at {edges[1:]} of {len(x)} rows", "Ends rise, and the last is the number of rows.")
    parts = [emulated_linear(x[begin:end], weight[g], rule, held[g]) for g, (begin, end) in enumerate(pairwise(edges))]
    return torch.cat([x.new_zeros(0, weight.shape[1], dtype=torch.float32), *parts])
