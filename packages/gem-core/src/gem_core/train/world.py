"""This process among its ranks: process group, device and the small host-side exchanges of the trainer.

A single process needs no process group, so everything here works without one and then returns its input.
"""

import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gem_core.spec import MachineError, RequestError
from gem_core.train.ledger.clock import AGREE, Clock


@dataclass(frozen=True, slots=True)
class World:
    """Rank, number of ranks, the device of this process, and the clock of its steps."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    clock: Clock = field(default_factory=Clock, compare=False, repr=False)

    @property
    def leads(self) -> bool:
        """Whether this rank writes files."""
        return self.rank == 0

    def all_gather(self, values: Tensor) -> Tensor:
        """Stack a small CPU tensor of one shape over the ranks: ``[...] -> [size, ...]``."""
        if self.size == 1:
            return values[None]
        parts = [torch.empty_like(values) for _ in range(self.size)]
        with self.clock.phase(AGREE):
            dist.all_gather(parts, values.contiguous())
        return torch.stack(parts)

    def gather_rows(self, values: Tensor) -> Tensor:
        """Concatenate CPU tensors ``[rows, ...]`` of different lengths over the ranks, in rank order; ``[0, ...]`` on every rank but the first."""
        if self.size == 1:
            return values
        sizes = self.all_gather(torch.tensor([values.shape[0]]))[:, 0].tolist()
        padded = values.new_zeros((max(sizes), *values.shape[1:]))
        padded[: values.shape[0]] = values
        parts = [torch.empty_like(padded) for _ in sizes] if self.leads else None
        dist.gather(padded, parts)
        return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)]) if parts else values[:0]

    def gather_objects(self, value: Any) -> list[Any]:
        """The picklable values of all ranks, in rank order."""
        if self.size == 1:
            return [value]
        out: list[Any] = [None] * self.size
        with self.clock.phase(AGREE):
            dist.all_gather_object(out, value)
        return out

    def from_lead(self, value: Any) -> Any:
        """The first rank's value on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.all_gather(torch.zeros(1))


def torchrun_ranks() -> tuple[int, int, int]:
    """``(rank, world size, local rank)`` as torchrun exports them; ``(0, 1, 0)`` without torchrun.

    Raises:
        RequestError: the variables are incomplete or no numbers.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    found = {name: os.environ[name] for name in names if name in os.environ}
    if "WORLD_SIZE" not in found:
        return 0, 1, 0
    if len(found) < len(names) or not all(value.isdecimal() for value in found.values()):
        so = ", ".join(f"{name}={found.get(name, 'unset')}" for name in names)
        raise RequestError("several processes", so, "Start with `torchrun --nproc-per-node N $(which gem) train ...`, or unset WORLD_SIZE.")
    return int(found["RANK"]), int(found["WORLD_SIZE"]), int(found["LOCAL_RANK"])


def pick_device(asked: str, local_rank: int) -> torch.device:
    """The device for ``auto``, ``cpu`` or ``cuda``: ``auto`` takes a GPU where there is one.

    Raises:
        MachineError: ``cuda`` is asked for and this machine has no GPU for this local rank.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "cpu" or (asked == "auto" and gpus == 0):
        return torch.device("cpu")
    if local_rank >= gpus:
        so = f"torch sees {gpus} CUDA devices"
        raise MachineError(f"device {asked!r} for local rank {local_rank}", so, "Use --set run.device=cpu or fewer processes.")
    return torch.device("cuda", local_rank)


def open_world(asked_device: str) -> World:
    """Join the process group that torchrun describes: gloo for host tensors, nccl beside it on CUDA. None is made for a single process."""
    rank, size, local_rank = torchrun_ranks()
    device = pick_device(asked_device, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size > 1 and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return World(rank, size, device)


_kept: list[object] = []


def close_world(world: World, keep: object) -> None:
    """Leave the process group.

    Args:
        keep: whatever holds modules that use a group; it stays alive until the process ends. DDP frees its group under the interpreter's lock, and a
            thread of gloo may need that lock to let go of the last tensors it was given: now and then a deadlock, if DDP's reference is the last.
    """
    if world.size > 1 and dist.is_initialized():
        _kept.extend((dist.group.WORLD, keep))
        dist.destroy_process_group()
