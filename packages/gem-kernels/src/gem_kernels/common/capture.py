"""Which capture of a CUDA graph the work on a device goes to; torch only tells whether there is one."""

import ctypes
import sys
from functools import cache
from typing import Any

import torch

IDLE, ACTIVE = 0, 1
"""Of CUstreamCaptureStatus; a capture that has failed and has not ended yet is neither."""


def current(device: torch.device) -> tuple[int | None, int | None]:
    """The current stream of a device, None on a CPU, and the number of the capture that it takes part in: no other capture of this process has it.

    The number is 0 where there is no capture, and None where nothing may be kept from call to call: in a capture without a number, because the driver
    cannot be asked or the capture has failed, and while torch's compiler warms up or records graphs of its own.
    """
    if device.type != "cuda":
        return None, 0
    stream = torch.cuda.current_stream(device).cuda_stream
    return stream, None if _compiler_records(device) else _number(stream)


def _compiler_records(device: torch.device) -> bool:
    """Whether a call may use the memory of graphs of ``torch.compile(mode="reduce-overhead")``, which fails where some of it is still held when a
    graph is through. Where there are such graphs, any capture may be one of theirs."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    manager = trees.get_manager(torch.cuda.current_device() if device.index is None else device.index, create_if_none_exists=False)
    return manager is not None and (manager.in_warmup or torch.cuda.is_current_stream_capturing())


def _number(stream: int) -> int | None:
    ask = _driver()
    if ask is None:
        return None if torch.cuda.is_current_stream_capturing() else 0
    status, number = ctypes.c_int(), ctypes.c_uint64()
    if ask(stream, ctypes.byref(status), ctypes.byref(number), None, None, None) != 0:
        return None
    if status.value == IDLE:
        return 0
    return number.value or None if status.value == ACTIVE else None


@cache
def _driver() -> Any:
    """The driver's function, None where there is no such library or function."""
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):
        return None
    ask.argtypes = [ctypes.c_void_p] * 6  # stream, status, number, graph, dependencies, how many
    return ask
