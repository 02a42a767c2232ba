"""The ops of the contract: the functions users call. Each op's module also holds its check, its reference and its FLOP count."""

from gem_core.ops.add_norm import add_norm
from gem_core.ops.block_attention import block_attention
from gem_core.ops.gated_residual import gated_residual
from gem_core.ops.gdpa import gdpa
from gem_core.ops.hstu_attention import hstu_attention
from gem_core.ops.jagged import jagged_concat, jagged_dense_bmm_add, jagged_pad, jagged_split, jagged_unpad
from gem_core.ops.jagged_attention import jagged_attention
from gem_core.ops.norm_linear import norm_linear
from gem_core.ops.pffn import pffn
from gem_core.ops.pooled_attention import pooled_attention

__all__ = [
    "add_norm",
    "block_attention",
    "gated_residual",
    "gdpa",
    "hstu_attention",
    "jagged_attention",
    "jagged_concat",
    "jagged_dense_bmm_add",
    "jagged_pad",
    "jagged_split",
    "jagged_unpad",
    "norm_linear",
    "pffn",
    "pooled_attention",
]
