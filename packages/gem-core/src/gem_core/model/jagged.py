"""Index arithmetic on jagged tensors, without synchronising with the device."""

import torch
from torch import Tensor

from gem_core.batch import Jagged


def row_of(offsets: Tensor, total: int) -> Tensor:
    """The row of each of ``total`` packed values: ``[total]`` int64."""
    rows = torch.arange(offsets.numel() - 1, device=offsets.device)
    return torch.repeat_interleave(rows, offsets.diff(), output_size=total)


def from_end(offsets: Tensor, row: Tensor) -> Tensor:
    """How many values of its row come after each value: ``[total]`` int64, 0 for the last."""
    return offsets[1:][row] - 1 - torch.arange(row.numel(), device=row.device)


def mean_rows(column: Jagged) -> Tensor:
    """Mean of each row's values, zeros for an empty row: ``[total, dim] -> [rows, dim]``."""
    row = row_of(column.offsets, column.values.shape[0])
    sums = column.values.new_zeros(column.rows, *column.values.shape[1:]).index_add(0, row, column.values)
    return sums / column.lengths().clamp(min=1).to(sums.dtype)[:, None]


def weighted_mean_rows(column: Jagged, weights: Tensor) -> Tensor:
    """``sum w v / sum w`` of each row's values, zeros where a row's weights add up to 0: ``[total, dim]``, weights ``[total]`` -> ``[rows, dim]``."""
    row = row_of(column.offsets, column.values.shape[0])
    weights = weights.to(column.values.dtype)
    sums = column.values.new_zeros(column.rows, *column.values.shape[1:]).index_add(0, row, column.values * weights[:, None])
    total = weights.new_zeros(column.rows).index_add(0, row, weights)
    return sums / torch.where(total > 0, total, 1.0)[:, None]


def regular_offsets(rows: int, length: int, device: torch.device) -> Tensor:
    """Offsets of ``rows`` rows that all have ``length`` values."""
    return torch.arange(rows + 1, device=device) * length
