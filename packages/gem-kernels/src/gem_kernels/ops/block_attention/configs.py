"""Launch configurations of block attention: a table over bucketed facts, and what a search may try."""

from collections.abc import Iterator
from dataclasses import dataclass

DIRECTIONS = ("forward", "backward")
TILE = 64
"""Tokens of a tile, for blocks up to it: smaller blocks share one."""


@dataclass(frozen=True, slots=True)
class Config:
    """Tokens of a program in tiles, warps, stages of the load pipeline, and registers a thread (None: as many as it wants)."""

    tiles: int
    warps: int
    stages: int
    registers: int | None


@dataclass(frozen=True, slots=True)
class Key:
    """What a configuration depends on.

    Args:
        direction: one of ``DIRECTIONS``.
        tile: tokens of a tile.
        width: larger head size of key and value, rounded up to a power of two of at least 16.
        wide_dtype: float32 inputs.
        turned: q and k are turned.
        normed: q and k are normed, which takes shared memory and registers of its own.
        roomy: an SM has the shared memory of data-centre GPUs from Hopper on.
    """

    direction: str
    tile: int
    width: int
    wide_dtype: bool
    turned: bool
    normed: bool
    roomy: bool


FORWARD = Config(8, 4, 2, None)
BACKWARD = Config(32, 4, 3, None)
CHANGED_BACKWARD = Config(8, 4, 1, None)
SMALL = Config(8, 4, 1, 168)
"""Where shared memory is short."""
SMALL_BACKWARD = Config(1, 4, 1, None)
WIDE = Config(1, 8, 1, None)
"""Float32 inputs, and blocks above ``TILE``."""
INTERPRETER = Config(2, 1, 1, None)


def choose(key: Key) -> Config:
    """The configuration of a CUDA launch, measured on an H200 with heads of 128 in bf16."""
    if key.wide_dtype or key.tile > TILE:
        return WIDE
    if key.direction == "backward":
        roomy = CHANGED_BACKWARD if key.turned or key.normed else BACKWARD
        return roomy if key.roomy else SMALL_BACKWARD
    return FORWARD if key.roomy else SMALL


def space(key: Key) -> Iterator[Config]:
    """Configurations worth timing, without those whose tiles do not fit an SM."""
    tensors, limit = (3 if key.direction == "forward" else 4), (227 if key.roomy else 99) * 1024
    size = key.tile * key.width * (4 if key.wide_dtype else 2)
    for tiles in (1, 4, 8, 16, 32):
        for warps in (4, 8):
            for stages in (1, 2, 3):
                if stages * tensors * size <= limit:
                    yield from (Config(tiles, warps, stages, registers) for registers in ((None, 168) if stages == 1 else (None,)))
