"""What the launchers of the portable Triton kernels share: limits, checks inside custom ops, layouts, launches. No triton until a kernel runs."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from gem_core.ops.dispatch import cuda_arch
from gem_core.spec import KernelUnavailable, MachineError
from gem_kernels.common import launcher
from gem_kernels.common.schedule import programs as programs_on
from gem_kernels.ops.limits import NO_BF16

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_GRID = 2**31 - 1
RESIDENT = 2
"""Programs that an SM holds, about; it only sizes the grid when SMs are reserved."""
MAX_TOKEN_STRIDE = 2**24 - 1
"""In elements: 128 rows of a tile stay below 2^31."""


@cache
def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter. Imports triton."""
    shared = import_module("gem_kernels.common.offsets")
    return not isinstance(shared.load_rows, shared.triton.JITFunction)


def check_call(op: str, lead: Tensor, others: Sequence[Tensor | None] = (), *, width: int = 1, limit: int = 1) -> None:
    """Refuse what a portable kernel does not take, or gives no right result for; called inside the custom op, where a compiler does not look.

    Args:
        op: name of the op, for messages.
        lead: its first input.
        others: the other inputs of its dtype.
        width: larger head size of the call.
        limit: largest head size of the kernel.
    """
    dtypes = [t.dtype for t in (lead, *others) if t is not None]
    if lead.dtype not in DTYPES or len(set(dtypes)) > 1:
        named = ", ".join(str(dtype) for dtype in dict.fromkeys(dtypes))
        raise KernelUnavailable(_asked(op), f"the inputs are {named}", "Give all the same dtype: float32, bfloat16 or float16.")
    if width > limit:
        raise KernelUnavailable(_asked(op), f"head size {width} is above {limit}", "Use more heads, or backend='reference'.")
    if interpreted():
        if lead.dtype is torch.bfloat16:
            raise KernelUnavailable(_asked(op), NO_BF16, "Use float32 or float16, or a GPU.")
    elif not lead.is_cuda:
        do = "Move them to a GPU, or set TRITON_INTERPRET=1 before triton is imported."
        raise MachineError(_asked(op), f"the tensors lie on {lead.device}", do)


def _asked(op: str) -> str:
    return f"{op} with backend 'triton'"


def readable(*tensors: Tensor) -> list[Tensor]:
    """Kernels step over the last axis one element at a time and keep offsets inside a tile in 32 bits; any other layout of ``[tokens, ..., dim]``
    is copied."""
    strides = [t.stride() for t in tensors]
    return [t if step[-1] == 1 and step[0] <= MAX_TOKEN_STRIDE else t.contiguous() for t, step in zip(tensors, strides, strict=True)]


def block_width(size: int) -> int:
    """Columns of a tile that holds ``size`` of them: the next power of two, at least 16 (the smallest matrix product)."""
    return max(16, 1 << (size - 1).bit_length())


def precision(lead: Tensor) -> str:
    """How float32 products are computed: exactly. 16-bit products do not ask."""
    return "ieee" if lead.dtype is torch.float32 else "tf32"


def approximate(lead: Tensor) -> bool:
    """Whether the special function unit is exact enough: for 16-bit inputs on NVIDIA GPUs."""
    return lead.is_cuda and torch.version.hip is None and lead.element_size() == 2


@cache
def _device(index: int) -> Any:
    return torch.cuda.get_device_properties(index)


def roomy(like: Tensor) -> bool:
    """Whether an SM has the shared memory of data-centre GPUs from Hopper on, 227 KiB a program; kernels take smaller tiles elsewhere."""
    return like.is_cuda and int(_device(like.device.index or 0).shared_memory_per_block_optin) >= 227 * 1024


def hopper(like: Tensor) -> bool:
    """Whether the device has Hopper's copy engine, compute capability 9.0."""
    return like.is_cuda and not interpreted() and cuda_arch(like.device.index or 0) == 90


def multiprocessors(like: Tensor) -> int:
    """How many programs a persistent kernel launches, one for each SM that is not reserved; a few under the interpreter, so that each takes several
    tiles."""
    return programs_on(MAX_GRID, 1, like.device, persistent=True) if like.is_cuda else 2


def launch(kernel: Any, like: Tensor, tiles: int, *, programs: int = MAX_GRID, **arguments: Any) -> None:
    """Launch at most ``programs`` on the device of ``like``, fewer where SMs are reserved; the grid has one axis, and programs stride over what it
    cannot hold."""
    programs = min(programs_on(tiles, RESIDENT, like.device), programs, MAX_GRID)
    launcher.launch(kernel, min(tiles, programs), like.device, {"tiles": tiles, **arguments})


def launch_persistent(kernel: Any, like: Tensor, tiles: int, programs: int, **arguments: Any) -> None:
    """As ``launch``; ``programs`` are of ``multiprocessors``, and leave reserved SMs already."""
    launcher.launch(kernel, min(tiles, programs), like.device, {"tiles": tiles, **arguments})


def no_autocast(like: Tensor) -> AbstractContextManager[None]:
    """Torch's own products inside a custom op keep the dtype of the call, whatever autocast surrounds it."""
    return torch.autocast(like.device.type, enabled=False)


def row_lengths(offsets: Tensor, longest: int) -> list[int]:
    """True lengths, cut at ``longest``; fake offsets hold no values, so there every row counts as the longest: an upper bound."""
    if isinstance(offsets, FakeTensor):
        return [longest] * (int(offsets.shape[0]) - 1)
    lengths: list[int] = offsets.diff().clamp(0, longest).tolist()
    return lengths
