"""The passes of one call of ``gdpa``."""

from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from gem_kernels.ops.attention import AttentionCall
from gem_kernels.ops.gdpa.configs import choose


@cache
def _kernels() -> Any:
    return import_module("gem_kernels.ops.gdpa.triton")


@cache
def _hopper() -> Any:
    return import_module("gem_kernels.common.hopper.launch")


@cache
def _fp8() -> Any:
    return import_module("gem_kernels.common.hopper.fp8.launch")


def kernel_activation(activation: str, dtype: torch.dtype) -> str:
    """The form of an activation that is as exact as its inputs need, and no dearer."""
    if dtype is torch.bfloat16 and activation in ("gelu", "gelu_tanh", "silu"):
        return f"{activation}_bf16"
    return "gelu_16bit" if activation == "gelu" and dtype is torch.float16 else activation


@dataclass(slots=True, kw_only=True)
class Call(AttentionCall):
    """``backend`` is ``triton``, ``gluon`` or ``gluon_fp8``; every pass is deterministic."""

    backend: str
    k_shape: torch.Size = field(init=False)
    v_shape: torch.Size = field(init=False)

    def __post_init__(self) -> None:
        self.k_shape, self.v_shape = self.k.shape, self.v.shape
        AttentionCall.__post_init__(self)
        self.activation = kernel_activation(self.activation, self.q.dtype)

    def forward(self) -> Tensor:
        """Output ``[out_tokens, heads, v_dim]``."""
        shape = (self.out_tokens, self.heads, self.v_dim)
        if self.nothing_to_do():
            return self.q.new_zeros(shape)
        out = self.q.new_empty(shape)
        if self.backend == "gluon":
            _hopper().forward(self, out, None)
        elif self.backend == "gluon_fp8":
            _fp8().forward(self, out)
        else:
            self._over_tiles("forward", out=out)
        return out

    def query_grad(self, dout: Tensor) -> Tensor:
        """Gradient of q. A shared query gets one gradient a row, added in float32."""
        if self.nothing_to_do():
            return self.q.new_zeros(self.q.shape)
        dq = self.q.new_empty((self.out_tokens, *self.q.shape[1:]), dtype=torch.float32 if self.shared else self.q.dtype)
        if self.backend != "triton" and not self.shared:
            _hopper().query_grad(self, dout.contiguous(), dq)
        else:
            self._over_tiles("query_grad", dout=dout.contiguous(), dq=dq)
        return dq.view(self.rows, *self.q.shape).sum(0).to(self.q.dtype) if self.shared else dq

    def key_grad(self, dout: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of k and v, in the shapes they were given in."""
        if self.nothing_to_do():
            return self.k.new_zeros(self.k_shape), self.v.new_zeros(self.v_shape)
        dk, dv = self.k.new_empty(self.k.shape), self.v.new_empty(self.v.shape)
        if self.backend != "triton":
            _hopper().key_grad(self, dout.contiguous(), dk, dv)
        else:
            self._over_tiles("key_grad", dout=dout.contiguous(), dk=dk, dv=dv)
        return dk.view(self.k_shape), dv.view(self.v_shape)

    def _over_tiles(self, direction: str, **arguments: Any) -> None:
        kernel = getattr(_kernels(), f"{direction}_kernel")
        self.over_tiles(kernel, direction, choose, ACTIVATION=self.activation, SCALE_AFTER=self.scale_after, **arguments)
