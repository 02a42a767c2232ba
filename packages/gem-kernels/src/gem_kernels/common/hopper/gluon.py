"""Gluon, Triton's language of explicit layouts, or an error that says how to get it."""

# isort: off
from typing import Any

from gem_kernels.common.language import triton  # first: it says what to do where triton is missing

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "TensorDescriptor",
    "async_copy",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "thread_barrier",
    "tma",
    "tma_add",
    "triton",
    "warpgroup_mma",
    "warpgroup_mma_init",
    "warpgroup_mma_wait",
]

thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
"""The warps of a warpgroup wait for each other; Triton 3.7 calls it ``barrier``."""


@builtin  # type: ignore[untyped-decorator]
def tma_add(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    """Have the copy engine add a block of shared memory to global memory, float32; complete as its stores are. Gluon has no function for it yet."""
    coordinates = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coordinates, src.handle)
