"""Tile shapes of the GDPA kernels.

The choice is a table over bucketed facts, not a run-time search: results do not depend on timings, and the number of compiled variants does not grow
with the shapes that a training run meets. ``space`` lists what a search may try; ``gem kernels tune`` runs it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from gem_kernels.ops.host import block_width

DIRECTIONS = ("forward", "query_grad", "key_grad")
SHORT_ROW = 512
"""Rows up to here count as short: small tiles then keep more programs on an SM while their rows run out."""


@dataclass(frozen=True, slots=True)
class Config:
    """``block_m`` queries and ``block_n`` keys a tile, warps of a program, and stages of the load pipeline."""

    block_m: int
    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Key:
    """What a configuration depends on.

    Args:
        direction: one of ``DIRECTIONS``.
        width: larger head size of key and value, rounded up to a power of two of at least 16.
        wide_dtype: float32 inputs.
        long_rows: rows of more than ``SHORT_ROW`` tokens, on the axis that is tiled over programs.
        hopper: compute capability 9.0, whose SMs hold 227 KiB of shared memory.
    """

    direction: str
    width: int
    wide_dtype: bool
    long_rows: bool
    hopper: bool


def config_key(direction: str, *, dim: int, v_dim: int, itemsize: int, max_length: int, arch: int | None) -> Key:
    """Bucket the facts of one call. ``max_length`` belongs to the axis that is tiled over programs: keys for ``key_grad``, else queries."""
    return Key(direction, max(block_width(dim), block_width(v_dim)), itemsize > 2, max_length > SHORT_ROW, arch == 90)


INTERPRETER = Config(64, 32, 1, 1)
"""The only configuration under the interpreter, whose time goes with the number of tiles; unequal, so that mixing up the two sizes shows."""


def choose(key: Key) -> Config:
    """The configuration of a CUDA launch."""
    if key.wide_dtype:
        # float32 products run on the ordinary cores, exactly: tiles are small to stay in registers.
        return Config(32, 32, 8, 1) if key.width <= 128 else Config(16, 16, 4, 1)
    if key.width > 128:
        stages = 2 if key.hopper else 1
        wide = {"forward": Config(64, 32, 8, 2), "query_grad": Config(64, 32, 8, stages), "key_grad": Config(32, 64, 8, stages)}
        return wide[key.direction]
    if key.direction == "forward":
        stages = 3 if key.hopper else 2
        return Config(128, 64, 8, stages) if key.long_rows else Config(64, 64, 4, stages)
    if key.hopper and key.long_rows:
        return Config(64, 128, 8, 2) if key.direction == "key_grad" else Config(128, 64, 8, 2)
    return Config(64, 64, 4, 2) if key.width <= 64 or key.hopper else Config(32, 64, 4, 1)


def shared_memory(config: Config, key: Key) -> int:
    """Bytes of shared memory that the tiles of one program need: the resident ones once, the streamed ones once a stage."""
    itemsize = 4 if key.wide_dtype else 2
    resident, streamed = (config.block_n, config.block_m) if key.direction == "key_grad" else (config.block_m, config.block_n)
    tensors = 1 if key.direction == "forward" else 2
    return key.width * itemsize * (tensors * resident + 2 * config.stages * streamed)


def space(key: Key) -> Iterator[Config]:
    """Configurations worth timing, without those that cannot fit an SM or spill for certain."""
    limit = 227 * 1024 if key.hopper else 99 * 1024
    for block_m in (32, 64, 128):
        for block_n in (32, 64, 128):
            for warps in (4, 8):
                # Accumulators live in registers: at most 128 floats of them a thread.
                outer = block_n if key.direction == "key_grad" else block_m
                accumulators = outer * key.width * (2 if key.direction == "key_grad" else 1)
                if accumulators > 128 * 32 * warps or outer < 16 * warps:
                    continue
                for stages in (1, 2, 3, 4):
                    config = Config(block_m, block_n, warps, stages)
                    if shared_memory(config, key) <= limit:
                        yield config
