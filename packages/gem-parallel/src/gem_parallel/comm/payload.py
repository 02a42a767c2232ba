"""Formats of weights on the wire: a part is packed before it is sent, and the parts of all ranks are unpacked on arrival."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128
"""Values that share a scale."""
LARGEST = 448.0
"""The largest finite E4M3 number."""


class Payload(Protocol):
    """A format."""

    def pack(self, own: Tensor) -> Tensor:
        """What is sent of float32 ``[n]``; its size depends on ``n`` alone."""
        ...

    def unpack(self, received: Tensor, output: Tensor, ranks: int) -> None:
        """Fill float32 ``[ranks * n]`` from what all ranks sent, one after the other."""
        ...


class Bf16:
    """Rounded to bf16."""

    def pack(self, own: Tensor) -> Tensor:
        return own.to(torch.bfloat16)

    def unpack(self, received: Tensor, output: Tensor, ranks: int) -> None:
        output.copy_(received)


class Fp8:
    """E4M3 with a power of two as the scale of each 128 values, the smallest that clips none: 129 bytes in place of 512."""

    def pack(self, own: Tensor) -> Tensor:
        blocks = pad(own, (0, -own.numel() % BLOCK)).view(-1, BLOCK)
        mantissa, exponent = torch.frexp(blocks.abs().amax(dim=1) / LARGEST)
        exponent = (exponent - (mantissa == 0.5).int()).clamp(-126, 126)
        scaled = torch.ldexp(blocks, -exponent[:, None]).masked_fill(~torch.isfinite(blocks), torch.nan)  # a cast would make 448 of infinity
        codes = scaled.to(torch.float8_e4m3fn)
        return torch.cat([codes.view(torch.uint8).flatten(), exponent.to(torch.int8).view(torch.uint8)])

    def unpack(self, received: Tensor, output: Tensor, ranks: int) -> None:
        parts = received.view(ranks, -1)
        blocks = parts.shape[1] // (BLOCK + 1)
        codes = parts[:, : blocks * BLOCK].contiguous().view(torch.float8_e4m3fn).float().view(ranks, blocks, BLOCK)
        exponent = parts[:, blocks * BLOCK :].contiguous().view(torch.int8).int()
        values = torch.ldexp(codes, exponent[:, :, None]).view(ranks, -1)
        output.view(ranks, -1).copy_(values[:, : output.numel() // ranks])


PAYLOADS: dict[str, Payload | None] = {"fp32": None, "bf16": Bf16(), "fp8": Fp8()}
"""By name; None sends weights as they are."""
