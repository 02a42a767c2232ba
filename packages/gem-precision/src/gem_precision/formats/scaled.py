"""Tensors as blocks of low-precision elements with a scale a block.

Blocks lie along the contraction axis of a matrix product, the last axis here. Microscaling formats (OCP MX specification 1.0) have a power of two for
each 32 elements, stored as E8M0; FP8 as it is used on Hopper has a float32 scale, or a power of two, for a tensor, a row, 128 elements or 128 x 128.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from gem_core.spec import RequestError
from gem_precision.formats.elements import E2M1, E4M3, E5M2, Element, Rounding, round_to

ScaleRule = Literal["floor", "rceil", "even", "float", "power"]
LEAST, MOST = -127, 127
"""Exponents that E8M0 holds; its 256th code is NaN."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """Elements, blocks and scales.

    Args:
        name: the format's name in recipes.
        element: format of the elements.
        block: rows and columns of a block; None for all of that axis.
        scale: with ``amax`` the largest magnitude of a block, the scale is

            - ``floor``: ``2 ^ (floor(log2 amax) - emax)``, the MX specification's; up to an eighth of the range saturates;
            - ``rceil``: the smallest power of two that keeps ``amax / scale`` within the largest element (arXiv 2506.08027); nothing saturates;
            - ``even``: as ``floor``, of ``amax`` rounded to the element's precision;
            - ``float``: ``amax / largest``;
            - ``power``: as ``rceil``, held as float32: Hopper's kernels take those, and a power of two changes no bit of an element.
    """

    name: str
    element: Element
    block: tuple[int | None, int | None]
    scale: ScaleRule

    @property
    def e8m0(self) -> bool:
        """Whether scales are stored in eight bits."""
        return self.scale in ("floor", "rceil", "even")

    @property
    def symmetric(self) -> bool:
        """Whether a matrix and its transpose have the same blocks, so that one quantised copy serves both."""
        return self.block[0] == self.block[1]


def _formats() -> dict[str, Format]:
    mx = [
        Format(name=f"mx{name}{suffix}", element=element, block=block, scale="rceil")
        for name, element in (("fp8_e4m3", E4M3), ("fp8_e5m2", E5M2), ("fp4_e2m1", E2M1))
        for suffix, block in (("", (1, 32)), ("_32x32", (32, 32)))
    ]
    blocks: dict[str, tuple[int | None, int | None]] = {"tensor": (None, None), "row": (1, None), "1x128": (1, 128), "128x128": (128, 128)}
    fp8 = [
        Format(name=f"fp8_{element.name}_{name}", element=element, block=block, scale="power" if "128" in name else "float")
        for element in (E4M3, E5M2)
        for name, block in blocks.items()
    ]
    return {f.name: f for f in (*mx, *fp8)}


FORMATS = _formats()
"""By name: ``mxfp8_e4m3``, ``mxfp8_e5m2``, ``mxfp4_e2m1``, also with ``_32x32``; ``fp8_ELEMENT_BLOCK`` with blocks tensor, row, 1x128, 128x128."""


def find_format(name: str) -> Format:
    """The format of that name.

    Raises:
        RequestError: there is none.
    """
    if name not in FORMATS:
        raise RequestError(f"number format {name!r}", "there is no such format", f"Choose one of {', '.join(FORMATS)}.")
    return FORMATS[name]


@dataclass(frozen=True, slots=True)
class Quantized:
    """A tensor in a format.

    Args:
        elements: ``[..., rows, columns]`` float32 values of the element format.
        scales: ``[..., blocks of rows, blocks of columns]`` float32; NaN for a block that held a NaN or an infinity.
        format: the format.
    """

    elements: Tensor
    scales: Tensor
    format: Format

    def dequantize(self) -> Tensor:
        """``element * scale``, float32; exact for scales that are powers of two."""
        rows, columns = self.elements.shape[-2:]
        height, width = _sizes(self.format.block, rows, columns)
        scales = self.scales.repeat_interleave(height, -2)[..., :rows, :].repeat_interleave(width, -1)[..., :columns]
        return self.elements * scales

    def transposed(self) -> "Quantized":
        """The transposed tensor in the same format, whose blocks are ``symmetric``: views."""
        return Quantized(self.elements.transpose(-2, -1), self.scales.transpose(-2, -1), self.format)

    def saturated(self) -> float:
        """Share of the elements that are as large as the format allows."""
        return float((self.elements.abs() == self.format.element.largest).float().mean()) if self.elements.numel() else 0.0


def quantize(
    x: Tensor, form: Format, *, rounding: Rounding = "nearest", generator: torch.Generator | None = None, amax: Tensor | None = None
) -> Quantized:
    """``x`` in a format.

    Args:
        x: ``[..., rows, columns]``; columns are the contraction axis.
        form: the format.
        rounding: of the elements.
        generator: of stochastic rounding.
        amax: what the scales are made of, if not ``x`` alone says it; as ``block_amax`` gives.

    A block of zeros gets the smallest scale. A NaN or an infinity makes its block's scale NaN, so that it is never lost.
    """
    blocks, (height, width) = _blocks(x, form)
    scales = scale_of(_amax(blocks) if amax is None else amax, form)
    elements = round_to(blocks / scales[..., None], form.element, rounding=rounding, generator=generator)
    whole = elements.view(*elements.shape[:-1], height, width).transpose(-3, -2).flatten(-4, -3).flatten(-2)
    rows, columns = x.shape[-2:]
    return Quantized(whole[..., :rows, :columns], scales, form)


def block_amax(x: Tensor, form: Format) -> Tensor:
    """The largest magnitude of each block of ``[..., rows, columns]``: ``[..., blocks of rows, blocks of columns]``, NaN where one is not finite."""
    return _amax(_blocks(x, form)[0])


def _blocks(x: Tensor, form: Format) -> tuple[Tensor, tuple[int, int]]:
    """``[..., blocks of rows, blocks of columns, values of a block]`` float32, zeros beyond the edges; and height and width of a block."""
    if x.dim() < 2:
        raise RequestError(f"quantising to {form.name}", f"the tensor has {x.dim()} axes", "Give [..., rows, columns].")
    rows, columns = x.shape[-2:]
    height, width = _sizes(form.block, rows, columns)
    full = pad(x.to(torch.float32), (0, -columns % width, 0, -rows % height))
    grid = (full.shape[-2] // height, full.shape[-1] // width)
    return full.reshape(*x.shape[:-2], grid[0], height, grid[1], width).transpose(-3, -2).flatten(-2), (height, width)


def _amax(blocks: Tensor) -> Tensor:
    return torch.where(blocks.isfinite().all(-1), blocks.abs().amax(-1), math.nan)


def fake_quantize(x: Tensor, form: Format, *, rounding: Rounding = "nearest", generator: torch.Generator | None = None) -> Tensor:
    """``x`` rounded to what the format can hold, in float32: what a kernel for the format would read."""
    return quantize(x, form, rounding=rounding, generator=generator).dequantize()


def scale_of(amax: Tensor, form: Format) -> Tensor:
    """Scales of blocks by their largest magnitudes: float32, NaN for NaN."""
    element = form.element
    if form.scale == "float":
        scales = amax / element.largest
        return torch.where(scales > 0, scales, torch.where(amax.isnan(), amax, 1.0))
    known = torch.nan_to_num(amax)
    mantissa, exponent = torch.frexp(known)  # in [0.5, 1)
    exponent = exponent - 1 - element.largest_exponent
    if form.scale in ("rceil", "power"):
        exponent = exponent + (mantissa > math.frexp(element.largest)[0]).int()
    elif form.scale == "even":
        # the significand that rounds up to the next power of two at the element's precision; ties are even there
        exponent = exponent + (mantissa >= 1 - 2.0 ** -(element.mantissa_bits + 2)).int()
    exponent = torch.where(known > 0, exponent, LEAST).clamp(LEAST, MOST)
    return torch.where(amax.isnan(), amax, torch.ldexp(torch.ones_like(known), exponent))


def _sizes(block: tuple[int | None, int | None], rows: int, columns: int) -> tuple[int, int]:
    height, width = (size or max(1, whole) for size, whole in zip(block, (rows, columns)))
    return height, width
