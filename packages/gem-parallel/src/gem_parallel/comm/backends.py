"""What carries the collectives of the dense part, by name, and why a backend does not work here. Imports no torch."""

import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Literal, get_args

from gem_core.spec import MachineError, RequestError

BackendName = Literal["default", "low_cta", "copy_engine"]
PayloadName = Literal["fp32", "bf16", "fp8"]
"""Formats of weights on the wire (``gem_parallel.comm.payload``)."""
NAMES: tuple[BackendName, ...] = get_args(BackendName)
LOW_CTAS = 4
"""Thread blocks, each on an SM, that the low-CTA setting leaves to an NCCL collective; by itself NCCL takes up to 32."""
MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""What keeps NCCL and torch from NVLink multicast."""
RESERVED = "GEM_RESERVED_SMS"


@dataclass(frozen=True, kw_only=True, slots=True)
class Here:
    """What a backend may depend on: the kind of device, ranks of the group on this host, ranks of the group, and what the GPUs reach."""

    device: str
    ranks: int
    local: int
    peer_access: bool = False


def why_not(name: str, here: Here) -> list[str]:
    """Reasons why a backend does not work here; none if it does.

    Raises:
        RequestError: no such backend.
    """
    if name not in NAMES:
        raise RequestError(f"communication by {name!r}", "there is no such backend", f"Choose one of {', '.join(NAMES)}.")
    if name == "default":
        return []
    reasons = [] if here.device == "cuda" else [f"it needs CUDA, this is {here.device}"]
    if name == "copy_engine" and not reasons:
        if here.local < here.ranks:
            reasons.append(f"a group of {here.ranks} ranks spans hosts of {here.local}, and copy engines reach the GPUs of one")
        if not here.peer_access:
            reasons.append("the GPUs cannot read each other's memory")
    return reasons


def require(name: str, here: Here) -> None:
    """Raise MachineError with the reasons unless the backend works here."""
    if reasons := why_not(name, here):
        raise MachineError(f"communication by {name!r}", "; ".join(reasons), "Choose comm = 'default', or another machine.")


def set_environment(device: str, *, multicast: bool = False, reserved_sms: int | None = None, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what NCCL, torch and the kernels read from the environment on CUDA, before the first communicator is made.

    Args:
        device: nothing is set for the CPU.
        multicast: whether NVLink multicast may be used. If not, it is off unless the environment itself asks for it.
        reserved_sms: SMs that persistent kernels leave free; None leaves that alone.

    Raises:
        RequestError: the environment asks for another number of SMs.
    """
    if not device.startswith("cuda"):
        return
    if not multicast:
        for name, off in MULTICAST.items():
            environ.setdefault(name, off)
    if reserved_sms is not None:
        before = environ.setdefault(RESERVED, str(reserved_sms))
        if before != str(reserved_sms):
            raise RequestError(f"reserved_sms = {reserved_sms}", f"the environment says {RESERVED}={before}", "Unset the one or drop the other.")
