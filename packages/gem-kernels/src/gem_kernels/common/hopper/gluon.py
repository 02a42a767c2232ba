"""Gluon, Triton's language of explicit layouts, or an error that says how to get it."""

# isort: off
from gem_kernels.common.language import triton  # first: it says what to do where triton is missing

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

__all__ = [
    "async_copy",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "tma",
    "triton",
    "warpgroup_mma",
    "warpgroup_mma_init",
    "warpgroup_mma_wait",
]
