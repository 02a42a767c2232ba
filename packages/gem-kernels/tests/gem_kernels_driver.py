"""A stand-in for the NVIDIA driver: kernels are compiled for Hopper, launches are written down. For programs without the interpreter."""

from typing import ClassVar

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class OnGpu(torch.Tensor):
    """A CPU tensor that says that it is on a GPU."""

    is_cuda = True


def on_gpu(*shape, dtype=torch.float32, shift=0):
    """Zeros that start ``shift`` elements past a multiple of 16 bytes."""
    size = torch.Size(shape).numel()
    return torch.zeros(size + 32, dtype=dtype)[shift : shift + size].view(shape).as_subclass(OnGpu)


class Recorder:
    """What a compiled kernel's launcher was handed, tensors as addresses."""

    seen: ClassVar = []

    def __init__(self, src, metadata):
        pass

    def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *values):
        for hook in (enter, leave):
            if hook is not None:
                hook(metadata)
        values = tuple(value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values)
        self.seen.append(((x, y, z), stream, function, packed, values))


class Utils:
    """Loads nothing: the function of a kernel is a number of its own."""

    loaded = 0

    def load_binary(self, name, kernel, shared, device):
        self.loaded += 1
        return object(), self.loaded, 32, 0, 1024

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}


class Driver:
    """Device 0 with stream 7, device 1 with stream 8; both Hopper."""

    launcher_cls, device = Recorder, 0

    def __init__(self):
        self.utils = Utils()

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return 7 + device

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def install():
    """Put the stand-in in the place of the driver; returns it."""
    found = Driver()
    driver.set_active(found)
    knobs.runtime.interpret = False
    return found


def launches(call):
    """What is handed to the launchers while ``call`` runs."""
    before = len(Recorder.seen)
    call()
    return Recorder.seen[before:]
