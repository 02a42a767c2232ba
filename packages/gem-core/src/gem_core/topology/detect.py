"""The machine at hand: device by the CUDA driver, NVLink by nvidia-ml, ranks a host by torchrun or SLURM. Imports no torch.

What can be asked is asked; bandwidths of the network and peaks are those of the shipped description whose device this is. A device that no
description knows gets what the driver and nvidia-ml say, and no peak.
"""

import ctypes
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from gem_core.select.device import cuda_devices, current_device
from gem_core.spec import RequestError, Tier, Topology
from gem_core.topology.describe import Description, recognised

LINK = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}
"""Bytes a second each way of one NVLink, by version."""
_MOST_LINKS = 18


def detect(world: int) -> Topology:
    """The machine of this process for ``world`` ranks."""
    device = current_device()
    if device.device != "cuda":
        return Topology(world=world, device="cpu", source="gem-core: a CPU, nothing measured")
    local = min(ranks_a_host(os.environ, len(cuda_devices())), world)
    known = recognised(device.name)
    if known is None:
        return _unknown(world, device.name, local)
    return _known(known, world, device.name, local)


def ranks_a_host(environment: Mapping[str, str], devices: int) -> int:
    """Ranks of this host: what torchrun says, else SLURM, else one a device.

    Raises:
        RequestError: a variable is there and no number.
    """
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name not in environment:
            continue
        said = environment[name]
        match = re.match(r"([1-9]\d*)(\(x\d+\))?(,|$)", said)  # SLURM writes "8(x4),4" for four nodes of 8 and one of 4
        if match is None:
            raise RequestError(f"{name}={said}", "it is no number of ranks", "Start with torchrun or srun, or unset it.")
        return int(match[1])
    return max(1, devices)


def _known(known: Description, world: int, name: str, local: int) -> Topology:
    """The description, with this host's number of ranks and its NVLink."""
    topology = known.topology(world, f"{name}: data sheet")
    link = nvlink_bandwidth()
    inside = topology.tiers[0]
    host = replace(inside, size=max(local, 1), bandwidth=inside.bandwidth if link is None else link)
    beyond = tuple(tier for tier in topology.tiers[1:] if tier.size > local) if world > local else ()
    said = "" if link is None else ", NVLink as nvidia-ml counts it"
    network = ", a described network between hosts" if beyond else ""
    return replace(topology, tiers=(host, *beyond), source=f"{name}: data sheet{said}{network}")


def _unknown(world: int, name: str, local: int) -> Topology:
    link = nvlink_bandwidth()
    tiers = () if link is None or world > local else (Tier(name="host", size=local, bandwidth=link),)
    said = "NVLink as nvidia-ml counts it" if tiers else "no links known"
    return Topology(world=world, device="cuda", tiers=tiers, source=f"{name}: memory as the driver says, {said}", memory=device_memory())


def device_memory() -> int | None:
    """Bytes of the first visible device, or None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    handle, count = ctypes.c_int(), ctypes.c_size_t()
    status = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(handle), 0) or driver.cuDeviceTotalMem_v2(ctypes.byref(count), handle)
    return int(count.value) if status == 0 else None


@cache
def nvlink_bandwidth() -> float | None:
    """Bytes a second each way over all active NVLinks of the first device; None without nvidia-ml or without a link."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle = ctypes.c_void_p()
    if library.nvmlInit_v2() != 0:
        return None
    try:
        if library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)) != 0:
            return None
        return sum(_link(library, handle, index) for index in range(_MOST_LINKS)) or None
    finally:
        library.nvmlShutdown()


def _link(library: ctypes.CDLL, handle: ctypes.c_void_p, index: int) -> float:
    """Bytes a second each way of one link; 0 where it is off or not there."""
    active, version = ctypes.c_uint(), ctypes.c_uint()
    if library.nvmlDeviceGetNvLinkState(handle, index, ctypes.byref(active)) != 0 or not active.value:
        return 0.0
    if library.nvmlDeviceGetNvLinkVersion(handle, index, ctypes.byref(version)) != 0:
        return 0.0
    return LINK.get(version.value, 0.0)
