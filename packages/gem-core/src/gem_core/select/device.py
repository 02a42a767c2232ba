"""Facts about the machine without importing torch: the CUDA driver by ctypes, versions from installed metadata."""

import ctypes
import os
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute of the driver API


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceInfo:
    """One device: ``device`` is a word of ``gem_core.spec.DEVICES``, ``arch`` the compute capability as an integer (90 for sm90) or None."""

    device: str
    name: str
    arch: int | None = None


def current_device() -> DeviceInfo:
    """The first CUDA device that the driver shows (``CUDA_VISIBLE_DEVICES`` counts), else the CPU: ``interpreter`` with ``TRITON_INTERPRET=1``."""
    cuda = cuda_devices()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return cuda[0] if cuda else DeviceInfo(device="interpreter" if interpreted else "cpu", name="CPU")


@cache
def cuda_devices() -> tuple[DeviceInfo, ...]:
    """Every visible CUDA device; empty where the driver or a device is missing. Asked once a process: the driver takes a while to start."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    return tuple(info for index in range(count.value) if (info := _device(driver, index)) is not None)


def _device(driver: ctypes.CDLL, index: int) -> DeviceInfo | None:
    handle, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    major, minor = ctypes.c_int(), ctypes.c_int()
    status = (
        driver.cuDeviceGet(ctypes.byref(handle), index)
        or driver.cuDeviceGetName(name, len(name), handle)
        or driver.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, handle)
        or driver.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, handle)
    )
    if status != 0:
        return None
    return DeviceInfo(device="cuda", name=name.value.decode(errors="replace"), arch=10 * major.value + minor.value)


@cache
def installed(distribution: str) -> str | None:
    """Version of an installed distribution, None when absent. Reads metadata only."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def release(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``2.13.0+cpu`` gives ``(2, 13, 0)``."""
    parts = []
    for part in text.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
        if digits != part:
            break
    return tuple(parts)
