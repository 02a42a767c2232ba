"""Low-precision number formats: elements, scales, and their exact emulation."""

from gem_precision.formats.elements import E2M1, E4M3, E5M2, Element, Rounding, code_points, round_to
from gem_precision.formats.scaled import FORMATS, Format, Quantized, block_amax, fake_quantize, find_format, quantize

__all__ = [
    "E2M1",
    "E4M3",
    "E5M2",
    "FORMATS",
    "Element",
    "Format",
    "Quantized",
    "Rounding",
    "block_amax",
    "code_points",
    "fake_quantize",
    "find_format",
    "quantize",
    "round_to",
]
