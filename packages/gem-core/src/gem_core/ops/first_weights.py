"""First weights of embedding tables, addressed by row and column: whoever keeps a part of a table computes that part alone, on its own device."""

import torch
from torch import Tensor

BLOCK = 1 << 19
"""Words drawn at once, two numbers each: 4 MB in each of three temporary tensors."""

_GOLDEN, _FIRST, _SECOND = (word - 2**64 for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@torch.no_grad()
def draw_rows(out: Tensor, *, seed: int, scale: float, row: int = 0, column: int = 0) -> None:
    """Fill a part of a table with its first weights, uniform in ``[-scale, scale)``.

    The number at row ``r`` and column ``c`` is ``(k / 2**23 - 1) * scale`` in float32, where ``k`` is 24 bits of the word ``m(m(seed + (r + 1) g) +
    (c // 2 + 1) g)``: bits 40 to 63 for an even column, 16 to 39 for an odd one. ``m`` is the finaliser and ``g`` the increment of SplitMix64
    (Steele, Lea and Flood 2014), all modulo ``2**64``. So it depends on seed, row and column alone, and has the same bits on every device.

    Args:
        out: ``[rows, columns]`` of any float dtype, strides and device; other dtypes than float32 are rounded to.
        seed: of the whole table (``gem_core.spec.table_seed``), below ``2**63``.
        scale: half the width of the interval.
        row: the table's row that ``out`` begins with.
        column: likewise its column.
    """
    begin, end = column // 2, (column + out.shape[1] + 1) // 2
    steps = torch.arange(begin + 1, end + 1, device=out.device) * _GOLDEN
    at_once = max(1, BLOCK // max(1, end - begin))
    for first in range(0, out.shape[0], at_once):
        part = out[first : first + at_once]
        numbers = torch.arange(row + first + 1, row + first + part.shape[0] + 1, device=out.device)
        words = _mix((_mix(numbers * _GOLDEN + seed)[:, None] + steps).flatten())
        drawn = torch.empty(words.numel(), 2, device=out.device)
        for place, shift in enumerate((40, 16)):
            drawn[:, place] = (words >> shift).bitwise_and_(2**24 - 1)
        drawn.mul_(2.0**-23).sub_(1.0).mul_(scale)
        part.copy_(drawn.view(part.shape[0], -1)[:, column % 2 : column % 2 + part.shape[1]])


def _mix(words: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place, on ``[n]`` int64; a right shift of those copies the sign, which the masks take away."""
    high = torch.empty_like(words)
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        torch.bitwise_right_shift(words, shift, out=high)
        words.bitwise_xor_(high.bitwise_and_(2 ** (64 - shift) - 1)).mul_(factor)
    return words
