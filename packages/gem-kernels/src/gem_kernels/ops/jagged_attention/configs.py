"""Tile shapes of the softmax attention kernels: a table over bucketed facts, as in ``ops.gdpa.configs``, whose search applies here too."""

from gem_kernels.ops.gdpa.configs import INTERPRETER, Config, Key, config_key

__all__ = ["INTERPRETER", "Config", "choose", "config_key"]


def choose(key: Key, *, bias: bool) -> Config:
    """The configuration of a CUDA launch. A bias tile takes registers beside the scores: its calls get small tiles."""
    if key.wide_dtype:
        return Config(32, 32, 8, 1) if key.width <= 128 else Config(16, 16, 4, 1)
    if key.width > 128:
        stages = 2 if key.hopper else 1
        return Config(32, 64, 8, stages) if key.direction == "key_grad" else Config(64, 32, 8, stages)
    if bias:
        return Config(64, 32, 4, 2) if key.direction == "forward" else Config(32, 32, 4, 2)
    if key.direction == "forward":
        stages = 3 if key.hopper else 2
        return Config(128, 64, 8, stages) if key.long_rows else Config(64, 64, 4, stages)
    if key.direction == "key_grad":
        return Config(64, 64, 8 if key.width > 64 else 4, 2 if key.hopper else 1)
    if key.hopper and key.long_rows:
        return Config(128, 64, 8, 2)
    return Config(64, 64, 4, 2) if key.width <= 64 or key.hopper else Config(32, 64, 4, 1)
