"""Element formats of 8 and 4 bits, and rounding to them.

E4M3 and E5M2 are those of the OCP 8-bit floating point specification (OFP8) 1.0, E2M1 that of the OCP Microscaling (MX) specification 1.0. Rounding
works on float32 values of any device, so results are the same bits everywhere.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Rounding = Literal["nearest", "stochastic"]


@dataclass(frozen=True, slots=True)
class Element:
    """A binary floating-point format with one sign bit.

    Args:
        name: such as ``e4m3``.
        exponent_bits: width of the exponent, whose bias is ``2 ** (exponent_bits - 1) - 1``.
        mantissa_bits: stored bits of the significand.
        largest: the largest finite value.
        infinities: whether it has them; without, E4M3 keeps one NaN of each sign at the top of its range and E2M1 has neither.
        nans: whether it has a NaN.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    largest: float
    infinities: bool
    nans: bool

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def least_exponent(self) -> int:
        """Exponent of the smallest normal value; subnormal values have the same spacing."""
        return 1 - self.bias

    @property
    def largest_exponent(self) -> int:
        """``floor(log2(largest))``, which the MX specification calls emax."""
        return math.frexp(self.largest)[1] - 1

    @property
    def smallest(self) -> float:
        """The smallest positive value."""
        return 2.0 ** (self.least_exponent - self.mantissa_bits)


E4M3 = Element("e4m3", 4, 3, 448.0, infinities=False, nans=True)
E5M2 = Element("e5m2", 5, 2, 57344.0, infinities=True, nans=True)
E2M1 = Element("e2m1", 2, 1, 6.0, infinities=False, nans=False)


def round_to(
    x: Tensor, element: Element, *, rounding: Rounding = "nearest", saturate: bool = True, generator: torch.Generator | None = None
) -> Tensor:
    """The values of a format that stand for ``x``.

    Args:
        x: any shape; computed in float32.
        element: the format.
        rounding: ``nearest`` takes the even significand on a tie; ``stochastic`` rounds up or down with the probabilities that keep the mean.
        saturate: values beyond ``largest``, infinities included, become ``largest``. Otherwise they become infinite, or NaN in a format without
            infinities; a format that has neither always saturates.
        generator: of the stochastic rounding.

    Returns:
        float32 of the shape of ``x``. NaN stays NaN, zeros keep their sign.
    """
    x = x.to(torch.float32)
    finite = torch.nan_to_num(x, nan=0.0)
    exponent = torch.frexp(finite).exponent - 1
    # A step is the distance between neighbours around x: a power of two, so that dividing by it is exact.
    step = torch.ldexp(torch.ones_like(finite), exponent.clamp(min=element.least_exponent) - element.mantissa_bits)
    steps = finite / step
    if rounding == "stochastic":
        steps = (steps + torch.rand(steps.shape, generator=generator, device=steps.device)).floor()
    steps = steps.round()  # ties to even
    rounded = torch.copysign(steps * step, x)
    beyond = rounded.abs() > element.largest
    limit = element.largest if saturate or not element.nans else math.inf if element.infinities else math.nan
    rounded = torch.where(beyond, torch.copysign(torch.full_like(rounded, limit), x), rounded)
    return torch.where(x.isnan(), x, rounded)


def code_points(element: Element) -> Tensor:
    """The value of every code of a format, by its bits read as a number: ``[2 ** bits]`` float32."""
    bits = 1 + element.exponent_bits + element.mantissa_bits
    codes = torch.arange(2**bits)
    sign = 1 - 2 * (codes >> (bits - 1)).float()
    exponent = (codes >> element.mantissa_bits) & (2**element.exponent_bits - 1)
    mantissa = (codes & (2**element.mantissa_bits - 1)).float() / 2**element.mantissa_bits
    normal = torch.ldexp(1 + mantissa, exponent - element.bias)
    values = sign * torch.where(exponent > 0, normal, torch.ldexp(mantissa, torch.tensor(element.least_exponent)))
    top = exponent == 2**element.exponent_bits - 1
    if element.infinities:
        values[top & (mantissa == 0)] *= math.inf
        values[top & (mantissa > 0)] = math.nan
    elif element.nans:
        values[top & (mantissa == mantissa.max())] = math.nan
    return values
