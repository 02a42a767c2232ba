"""What the calls of ``jagged_attention`` and ``gdpa`` share: their rows and heads, tile lists, and the launch of a Triton kernel over one."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gem_core.ops.dispatch import cuda_arch
from gem_kernels.common import launcher
from gem_kernels.common.schedule import Layout, Tiles, programs, tiles
from gem_kernels.common.tuning import tuned
from gem_kernels.ops.gdpa.configs import INTERPRETER, Config, Key, config_key
from gem_kernels.ops.host import MAX_GRID, block_width, check_call, interpreted, precision, readable
from gem_kernels.ops.limits import MAX_WIDTH

TRITON_RESIDENT = 2
"""Programs of a portable kernel that an SM holds, about; it only sizes the grid when SMs are reserved."""


@dataclass(slots=True, kw_only=True)
class AttentionCall:
    """One call. Dense keys become packed ones; what a kernel cannot step over is copied.

    Args:
        op: name of the op, for messages.
        q: ``[q_tokens, heads, dim]``.
        k: ``[k_tokens, kv_heads, dim]`` or ``[rows, keys, kv_heads, dim]``.
        v: as ``k``, with its own last size.
        q_offsets: int64 ``[rows + 1]``, or None for a query that all rows share.
        k_offsets: int64 ``[rows + 1]``, or None for dense keys.
        max_q: longest row of queries.
        max_k: longest row of keys.
        scale: factor on the scores.
        window: largest distance between a query and a key it sees, or None.
        causal: whether a query sees keys up to its own position only.
        activation: ``softmax``, or the name of an activation of ``gem_kernels.common.activations``.
        scale_after: whether the factor comes after the activation.
    """

    op: str
    q: Tensor
    k: Tensor
    v: Tensor
    q_offsets: Tensor | None
    k_offsets: Tensor | None
    max_q: int
    max_k: int
    scale: float
    window: int | None
    causal: bool = False
    activation: str = "softmax"
    scale_after: bool = False
    bias: Tensor | None = None
    rows: int = field(init=False)
    q_tokens: int = field(init=False)
    k_tokens: int = field(init=False)
    heads: int = field(init=False)
    kv_heads: int = field(init=False)
    dim: int = field(init=False)
    v_dim: int = field(init=False)
    out_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.q_tokens, self.heads, self.dim = self.q.shape
        self.v_dim = self.v.shape[-1]
        check_call(self.op, self.q, (self.k, self.v, self.bias), width=max(self.dim, self.v_dim), limit=MAX_WIDTH)
        self.rows = self.k.shape[0] if self.k_offsets is None else self.k_offsets.shape[0] - 1
        if self.k_offsets is None:
            self.k, self.v = self.k.flatten(0, 1), self.v.flatten(0, 1)
        self.q, self.k, self.v = readable(self.q, self.k, self.v)
        self.k_tokens, self.kv_heads, _ = self.k.shape
        self.out_tokens = self.q_tokens * (self.rows if self.q_offsets is None else 1)

    @property
    def shared(self) -> bool:
        return self.q_offsets is None

    def nothing_to_do(self) -> bool:
        """No query finds a key: outputs and gradients are zeros."""
        return 0 in (self.rows, self.max_q, self.max_k, self.q_tokens, self.k_tokens)

    def tiles(self, axis: str, block: int) -> Tiles:
        layout = Layout(self.q_offsets, self.k_offsets, self.rows, self.max_q, self.max_k, self.q_tokens, self.k_tokens, self.q.device)
        return tiles(layout, axis, block)

    def key(self, direction: str) -> Key:
        """The bucketed facts that a configuration depends on."""
        length = self.max_k if direction == "key_grad" else self.max_q
        arch = None if interpreted() else cuda_arch(self.q.device.index or 0)
        return config_key(direction, dim=self.dim, v_dim=self.v_dim, itemsize=self.q.element_size(), max_length=length, arch=arch)

    def over_tiles(self, kernel: Any, direction: str, choose: Callable[[Key], Config], **arguments: Any) -> None:
        """Launch a kernel over the tiles of its direction, times the heads; as ``choose`` says unless this machine was tuned for the call."""
        if interpreted():
            config = INTERPRETER
        else:
            key = self.key(direction)
            config = choose(key) if self.bias is not None else tuned(self.op, key, choose(key))
        axis, block, heads = ("k", config.block_n, self.kv_heads) if direction == "key_grad" else ("q", config.block_m, self.heads)
        found = self.tiles(axis, block)
        grid = programs(found.bound * heads, TRITON_RESIDENT, self.q.device)
        self.launch(kernel, config, grid, records=found.records, count=found.count, SHARED=self.shared, **arguments)

    def launch(self, kernel: Any, config: Config, grid: int, **arguments: Any) -> None:
        """Launch a portable kernel. The grid has one axis; programs stride over what it cannot hold."""
        given = {
            "q": self.q, "k": self.k, "v": self.v, "heads": self.heads, "scale": self.scale, "window": self.window or 0,
            "q_token": self.q.stride(0), "q_head": self.q.stride(1), "k_token": self.k.stride(0), "k_head": self.k.stride(1),
            "v_token": self.v.stride(0), "v_head": self.v.stride(1), "GROUP": self.heads // self.kv_heads, "DIM": self.dim, "V_DIM": self.v_dim,
            "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_D": block_width(self.dim), "BLOCK_V": block_width(self.v_dim),
            "WINDOW": self.window is not None, "PRECISION": precision(self.q), "num_warps": config.warps, "num_stages": config.stages,
        }  # fmt: skip
        launcher.launch(kernel, max(min(grid, MAX_GRID), 1), self.q.device, {**given, **arguments})
