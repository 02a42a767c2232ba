"""The published shapes: row lengths by name. Imports no torch."""

import random
from dataclasses import dataclass

BATCH, HEADS, DIM = 1152, 4, 128
BLOCK = 64
SEEDS = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows of one to ``longest`` tokens.

    Args:
        shortest: shortest row of queries; lengths are uniform up to ``longest``.
        longest: longest row of queries.
        keys: keys of every row, None for as many as queries.
        width: columns of a matmul, for shapes of plain rows.
    """

    shortest: int
    longest: int
    keys: int | None = None
    width: int = HEADS * DIM

    def lengths(self, batch: int) -> list[int]:
        """Lengths of ``batch`` rows of queries, the same for every call."""
        draw = random.Random(0)
        return [draw.randint(self.shortest, self.longest) for _ in range(batch)]


SHAPES = {
    "self-L256": Shape(256, 256),
    "self-L1024": Shape(1024, 1024),
    "self-L2048": Shape(2048, 2048),
    "self-u1024": Shape(1, 1024),
    "cross-q1024-kv256": Shape(1024, 1024, keys=256),
    "block-u2000": Shape(801, 2000),
    "rows-1M-w256": Shape(910, 911, width=256),
    "rows-1M-w512": Shape(910, 911, width=512),
}
"""``block-u2000`` is uniform around 0.7 x 2000; the last two are about 2^20 plain rows."""
SELF = ("self-L256", "self-L1024", "self-L2048", "self-u1024")
SHAPES_OF = {
    "jagged_attention": (*SELF, "cross-q1024-kv256"),
    "gdpa": (*SELF, "cross-q1024-kv256"),
    "hstu_attention": SELF,
    "block_attention": ("block-u2000",),
    "pooled_attention": ("self-L2048", "self-u1024"),
    "norm_linear": ("rows-1M-w256", "rows-1M-w512"),
    "add_norm": ("rows-1M-w256", "rows-1M-w512"),
    "gated_residual": ("rows-1M-w256",),
    "pffn": ("cross-q1024-kv256",),
    "jagged_concat": ("self-u1024",),
    "jagged_split": ("self-u1024",),
    "jagged_pad": ("self-u1024",),
    "jagged_unpad": ("self-u1024",),
    "jagged_dense_bmm_add": ("self-u1024",),
}
"""Shapes that each op is timed on."""
ACTIVATION_OF = {
    "jagged_attention": "softmax",
    "gdpa": "gelu",
    "hstu_attention": "silu",
    "block_attention": "softmax",
    "pooled_attention": "softmax",
    "norm_linear": "rms",
    "add_norm": "layer",
    "pffn": "gelu",
}
"""Activation that each op is timed with, or its norm; none where it has none."""
VARIANTS_OF = {
    "block_attention": ("", "rope", "rope qk_norm"),
    "norm_linear": ("after", "before"),
    "add_norm": ("residual", "gate"),
    "hstu_attention": ("causal",),
}
"""Variants of an op that are timed apart; they join the activation's column."""
