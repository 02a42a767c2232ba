"""One call of ``jagged_attention``: what its passes share, and their launches."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from gem_core.ops.dispatch import cuda_arch
from gem_kernels.common.schedule import Layout, programs, tiles
from gem_kernels.ops.host import MAX_GRID, block_width, check_call, interpreted, precision, readable
from gem_kernels.ops.jagged_attention.configs import INTERPRETER, Config, choose, config_key
from gem_kernels.ops.limits import MAX_WIDTH


@cache
def _kernels() -> Any:
    return import_module("gem_kernels.ops.jagged_attention.triton")


@dataclass(slots=True)
class Call:
    """Arguments as in ``gem_core.ops.jagged_attention``; every pass is deterministic."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_offsets: Tensor | None
    k_offsets: Tensor
    bias: Tensor | None
    max_q: int
    max_k: int
    scale: float
    causal: bool
    window: int | None
    backend: str

    def __post_init__(self) -> None:
        width = max(self.q.shape[-1], self.v.shape[-1])
        check_call("jagged_attention", self.q, (self.k, self.v, self.bias), width=width, limit=MAX_WIDTH)
        self.q, self.k, self.v = readable(self.q, self.k, self.v)

    @property
    def rows(self) -> int:
        return self.k_offsets.shape[0] - 1

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def out_tokens(self) -> int:
        return self.q.shape[0] * (self.rows if self.q_offsets is None else 1)

    def nothing_to_do(self) -> bool:
        return self.rows == 0 or self.max_q == 0 or self.max_k == 0

    def forward(self) -> tuple[Tensor, Tensor]:
        """Output ``[out_tokens, heads, v_dim]`` and log-sum-exp ``[out_tokens, heads]`` float32."""
        shape = (self.out_tokens, self.heads, self.v.shape[-1])
        if self.nothing_to_do():
            return self.q.new_zeros(shape), torch.full(shape[:2], -torch.inf, device=self.q.device)
        out, lse = self.q.new_empty(shape), self.q.new_empty(shape[:2], dtype=torch.float32)
        self._over_tiles("forward", out=out, lse=lse)
        return out, lse

    def query_grad(self, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient of q, and delta. A shared query gets one gradient a row, added in float32."""
        if self.nothing_to_do():
            return self.q.new_zeros(self.q.shape), torch.zeros_like(lse)
        shared = self.q_offsets is None
        dq = self.q.new_empty((self.out_tokens, *self.q.shape[1:]), dtype=torch.float32 if shared else self.q.dtype)
        delta = torch.empty_like(lse)
        self._over_tiles("query_grad", out=out, lse=lse, dout=dout.contiguous(), dq=dq, delta=delta)
        return (dq.view(self.rows, *self.q.shape).sum(0).to(self.q.dtype) if shared else dq), delta

    def key_grad(self, dout: Tensor, delta: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of k and v."""
        if self.nothing_to_do():
            return self.k.new_zeros(self.k.shape), self.v.new_zeros(self.v.shape)
        dk, dv = self.k.new_empty(self.k.shape), self.v.new_empty(self.v.shape)
        self._over_tiles("key_grad", lse=lse, dout=dout.contiguous(), delta=delta, dk=dk, dv=dv)
        return dk, dv

    def bias_grad(self, dout: Tensor, delta: Tensor, lse: Tensor) -> Tensor:
        """Gradient of the bias, in its shape."""
        assert self.bias is not None
        if self.nothing_to_do():
            return self.bias.new_zeros(self.bias.shape)
        dbias = self.bias.new_empty(self.bias.shape)
        config = self._config("bias_grad")
        bias_rows, bias_heads = self.bias.shape[:2]
        count = bias_rows * bias_heads * -(-self.max_q // config.block_m) * -(-self.max_k // config.block_n)
        arguments = dict(lse=lse, dout=dout.contiguous(), delta=delta, dbias=dbias, q_offsets=self.q_offsets, k_offsets=self.k_offsets)
        sizes = dict(q_tokens=self.q.shape[0], k_tokens=self.k.shape[0], max_q=self.max_q, max_k=self.max_k, tiles=count)
        choices = dict(PER_ROW=bias_rows == self.rows, PER_HEAD=bias_heads == self.heads)
        self._run(_kernels().bias_grad_kernel, config, min(count, MAX_GRID), **arguments, **sizes, **choices)
        return dbias

    def layout(self) -> Layout:
        return Layout(self.q_offsets, self.k_offsets, self.rows, self.max_q, self.max_k, self.q.shape[0], self.k.shape[0], self.q.device)

    def _over_tiles(self, direction: str, **arguments: Any) -> None:
        config = self._config(direction)
        axis, block, heads = ("k", config.block_n, self.k.shape[1]) if direction == "key_grad" else ("q", config.block_m, self.heads)
        found = tiles(self.layout(), axis, block)
        grid = min(programs(found.bound * heads, 2, self.q.device), MAX_GRID)
        choices = dict(BIAS=self.bias is not None, SHARED=self.q_offsets is None)
        self._run(getattr(_kernels(), f"{direction}_kernel"), config, grid, records=found.records, count=found.count, **arguments, **choices)

    def _config(self, direction: str) -> Config:
        if interpreted():
            return INTERPRETER
        length = self.max_k if direction == "key_grad" else self.max_q
        arch = cuda_arch(self.q.device.index or 0)
        dim, v_dim = self.q.shape[-1], self.v.shape[-1]
        key = config_key(direction, dim=dim, v_dim=v_dim, itemsize=self.q.element_size(), max_length=length, arch=arch)
        return choose(key, bias=self.bias is not None)

    def _run(self, kernel: Any, config: Config, grid: int, **arguments: Any) -> None:
        dim, v_dim = self.q.shape[-1], self.v.shape[-1]
        bias_strides = (0, 0, 0, 0) if self.bias is None else self.bias.expand(self.rows, self.heads, -1, -1).stride()
        with nullcontext() if self.q.device.type == "cpu" else torch.cuda.device(self.q.device):
            kernel[(max(grid, 1),)](
                q=self.q, k=self.k, v=self.v, bias=self.bias, rows=self.rows, heads=self.heads, scale=self.scale, window=self.window or 0,
                q_token=self.q.stride(0), q_head=self.q.stride(1), k_token=self.k.stride(0), k_head=self.k.stride(1),
                v_token=self.v.stride(0), v_head=self.v.stride(1),
                **dict(zip(("bias_row", "bias_head", "bias_q", "bias_k"), bias_strides, strict=True)),
                GROUP=self.heads // self.k.shape[1], DIM=dim, V_DIM=v_dim, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
                BLOCK_D=block_width(dim), BLOCK_V=block_width(v_dim), CAUSAL=self.causal, WINDOW=self.window is not None,
                PRECISION=precision(self.q), num_warps=config.warps, num_stages=config.stages, **arguments,
            )  # fmt: skip
