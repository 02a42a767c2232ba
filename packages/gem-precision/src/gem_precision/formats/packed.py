"""Elements and scales as the bytes that a format takes: what is stored or sent.

Eight-bit elements are torch's, four-bit ones lie two in a byte, the first in the lower half. Scales that are powers of two are E8M0 (the exponent
plus 127, 255 for NaN); others are float32.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from gem_precision.formats.elements import E2M1, E5M2, code_points
from gem_precision.formats.scaled import Format

_NAN = 255


def element_bytes(form: Format, count: int) -> int:
    """Bytes of ``count`` elements."""
    return -(-count // 2) if form.element == E2M1 else count


def scale_bytes(form: Format, count: int) -> int:
    """Bytes of ``count`` scales."""
    return 4 * count if form.scale == "float" else count


def pack_elements(elements: Tensor, form: Format) -> Tensor:
    """Values of the format, float32 of any shape, as ``[element_bytes]`` uint8."""
    flat = elements.flatten()
    if form.element != E2M1:
        return flat.to(_dtype(form)).view(torch.uint8)
    magnitudes = code_points(E2M1)[:8].to(flat.device)
    codes = torch.searchsorted(magnitudes, flat.abs().nan_to_num().contiguous()).to(torch.uint8) + 8 * torch.signbit(flat).to(torch.uint8)
    low, high = pad(codes, (0, flat.numel() % 2)).view(-1, 2).unbind(1)
    return low + 16 * high


def unpack_elements(packed: Tensor, form: Format, count: int) -> Tensor:
    """``[..., element_bytes]`` uint8 to ``[..., count]`` float32."""
    if form.element != E2M1:
        return packed.contiguous().view(_dtype(form)).float()
    codes = torch.stack([packed % 16, packed // 16], dim=-1).flatten(-2)[..., :count]
    return code_points(E2M1).to(packed.device)[codes.long()]


def pack_scales(scales: Tensor, form: Format) -> Tensor:
    """Float32 scales of any shape as ``[scale_bytes]`` uint8."""
    flat = scales.flatten()
    if form.scale == "float":
        return flat.contiguous().view(torch.uint8)
    exponent = torch.frexp(flat.nan_to_num(nan=1.0)).exponent - 1
    return torch.where(flat.isnan(), _NAN, exponent + 127).to(torch.uint8)


def unpack_scales(packed: Tensor, form: Format) -> Tensor:
    """``[..., scale_bytes]`` uint8 to ``[..., count]`` float32."""
    if form.scale == "float":
        return packed.clone(memory_format=torch.contiguous_format).view(torch.float32)  # wherever the bytes lie
    scales = torch.ldexp(torch.ones(packed.shape, device=packed.device), packed.int() - 127)
    return scales.masked_fill(packed == _NAN, torch.nan)


def _dtype(form: Format) -> torch.dtype:
    return torch.float8_e5m2 if form.element == E5M2 else torch.float8_e4m3fn
