"""The passes of one call of ``jagged_attention``. Statistics are kept as ``[heads, tokens]``, which the kernels read along rows."""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from gem_kernels.ops.attention import AttentionCall
from gem_kernels.ops.gdpa.configs import INTERPRETER, Config, Key
from gem_kernels.ops.host import interpreted
from gem_kernels.ops.jagged_attention.configs import choose
from gem_kernels.ops.places import NOWHERE, Edge, grad_memory, parts_in


@cache
def _kernels() -> Any:
    return import_module("gem_kernels.ops.jagged_attention.triton")


@dataclass(slots=True, kw_only=True)
class Call(AttentionCall):
    """``backend`` is ``triton``, ``gluon`` or ``gluon_fp8``; every pass is deterministic. ``edges``: where the gradients of q, k and v go, for
    ``grad_memory``."""

    backend: str
    edges: tuple[Edge, ...] = NOWHERE

    def forward(self) -> tuple[Tensor, Tensor]:
        """Output ``[out_tokens, heads, v_dim]``, and log2 of the denominators ``[heads, out_tokens]`` float32, infinity where there is no key."""
        shape = (self.out_tokens, self.heads, self.v_dim)
        if self.nothing_to_do():
            return self.q.new_zeros(shape), torch.full((self.heads, self.out_tokens), torch.inf, device=self.q.device)
        out = self.q.new_empty(shape)
        lse = self.q.new_empty((self.heads, self.out_tokens), dtype=torch.float32)
        if self.backend == "gluon":
            _hopper().forward(self, out, lse)
        elif self.backend == "gluon_fp8":
            _fp8().forward(self, out, lse)
        else:
            self._over_tiles("forward", out=out, lse=lse)
        return out, lse

    def query_grad(self, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient of q, and delta ``[heads, out_tokens]`` float32, the sum of ``dout * out`` over a head.

        A shared query gets one gradient a row, added in float32.
        """
        if self.nothing_to_do():
            return self.q.new_zeros(self.q.shape), torch.zeros_like(lse)
        delta = torch.empty_like(lse)
        if self.shared:
            dqs = self.q.new_empty((self.rows, *self.q.shape), dtype=torch.float32)
            self._over_tiles("query_grad", out=out, lse=lse, dout=dout.contiguous(), dq=dqs, DQ_PARTS=1, delta=delta)
            return dqs.sum(0).to(self.q.dtype), delta
        (dq,) = grad_memory(self.edges[:1], [self.q])
        if self.backend != "triton":
            _hopper().query_grad(self, dout.contiguous(), dq, out=out, lse=lse, delta=delta)
        else:
            self._over_tiles("query_grad", out=out, lse=lse, dout=dout.contiguous(), dq=dq, DQ_PARTS=parts_in(dq), delta=delta)
        return dq, delta

    def key_grad(self, dout: Tensor, delta: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of k and v."""
        if self.nothing_to_do():
            return self.k.new_zeros(self.k.shape), self.v.new_zeros(self.v.shape)
        dk, dv = grad_memory(self.edges[1:3], [self.k, self.v])
        if self.backend != "triton":
            _hopper().key_grad(self, dout.contiguous(), dk, dv, lse=lse, delta=delta)
        else:
            parts = {"DK_PARTS": parts_in(dk), "DV_PARTS": parts_in(dv)}
            self._over_tiles("key_grad", lse=lse, dout=dout.contiguous(), delta=delta, dk=dk, dv=dv, **parts)
        return dk, dv

    def bias_grad(self, dout: Tensor, delta: Tensor, lse: Tensor) -> Tensor:
        """Gradient of the bias, in its shape."""
        assert self.bias is not None
        if self.nothing_to_do():
            return self.bias.new_zeros(self.bias.shape)
        dbias = self.bias.new_empty(self.bias.shape)
        config = INTERPRETER if interpreted() else self._choose(self.key("bias_grad"))
        bias_rows, bias_heads = self.bias.shape[:2]
        count = bias_rows * bias_heads * -(-self.max_q // config.block_m) * -(-self.max_k // config.block_n)
        kernel = _kernels().bias_grad_kernel
        self.launch(
            kernel, config, count, lse=lse, dout=dout.contiguous(), delta=delta, dbias=dbias, q_offsets=self.q_offsets, k_offsets=self.k_offsets,
            q_tokens=self.q_tokens, k_tokens=self.k_tokens, max_q=self.max_q, max_k=self.max_k, tiles=count,
            PER_ROW=bias_rows == self.rows, PER_HEAD=bias_heads == self.heads, **self._bias(),
        )  # fmt: skip
        return dbias

    def _over_tiles(self, direction: str, **arguments: Any) -> None:
        kernel = getattr(_kernels(), f"{direction}_kernel")
        self.over_tiles(kernel, direction, self._choose, BIAS=self.bias is not None, **arguments, **self._bias())

    def _choose(self, key: Key) -> Config:
        return choose(key, bias=self.bias is not None)

    def _bias(self) -> dict[str, Any]:
        strides = (0, 0, 0, 0) if self.bias is None else self.bias.expand(self.rows, self.heads, -1, -1).stride()
        named = dict(zip(("bias_row", "bias_head", "bias_q", "bias_k"), strides, strict=True))
        return {"bias": self.bias, "rows": self.rows, "out_tokens": self.out_tokens, "CAUSAL": self.causal, **named}


@cache
def _hopper() -> Any:
    return import_module("gem_kernels.common.hopper.launch")


@cache
def _fp8() -> Any:
    return import_module("gem_kernels.common.hopper.fp8.launch")
