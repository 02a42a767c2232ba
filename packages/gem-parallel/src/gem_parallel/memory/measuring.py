"""What each block saves for backward and how long its forward takes, from one forward pass that keeps nothing; and what is alive after a real one."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gem_parallel.memory.storing import Eighths, Offloaded, Scope, bytes_in_eight_bits, is_activation, storage_of

_TRIAL = {"cuda": (1 << 28, torch.bfloat16), "cpu": (1 << 24, torch.float32)}
"""Bytes and dtype of the tensor whose copies are timed: more than a GPU's cache holds, in the dtype of most activations there."""


@dataclass(slots=True)
class Measured:
    """One block in one forward pass. A tensor between two blocks counts for the one that reads it; each is counted once.

    Args:
        name: the block's name.
        inputs: bytes of the activations that enter it.
        saved: bytes that it saves for backward, of its inputs and of what it makes.
        movable: those of them that can be offloaded or stored in eight bits.
        narrow: what the movable ones take in eight bits, with scales.
        seconds: of its forward.
    """

    name: str
    inputs: int = 0
    saved: int = 0
    movable: int = 0
    narrow: int = 0
    seconds: float = 0.0


class Gauge:
    """Measures the blocks of one forward pass, in its order."""

    def __init__(self) -> None:
        self._counted: set[StorageWeakRef] = set()

    def measure(self, name: str, block: nn.Module, forward: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, Measured]:
        """Run a block's forward; what it would save is counted and dropped, so its result cannot be differentiated."""
        given = tensors_in(arguments)
        device = given[0].device if given else next((p.device for p in block.parameters()), torch.device("cpu"))
        weights = {storage_of(p) for p in block.parameters()}
        entering = {storage_of(t): t.untyped_storage().nbytes() for t in given if t.requires_grad and not t.is_leaf}
        saved: dict[StorageWeakRef, int] = {}
        movable: set[StorageWeakRef] = set()
        narrow: dict[Any, int] = {}

        def pack(tensor: Tensor) -> None:
            storage = storage_of(tensor)
            if (tensor.is_leaf and tensor.requires_grad) or storage in weights or not tensors_in(tensor):
                return
            saved[storage] = tensor.untyped_storage().nbytes()
            if is_activation(tensor):
                movable.add(storage)
                key = (storage, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
                narrow[key] = bytes_in_eight_bits(tensor)

        begun = _now(device)
        with torch.autograd.graph.saved_tensors_hooks(pack, _never):
            result = forward(*arguments)
        seconds = _now(device) - begun
        elsewhere = self._counted | {storage_of(t) for t in tensors_in(result)}  # counted before, or by the block that reads it
        own = {storage: size for storage, size in saved.items() if storage not in elsewhere}
        fresh = {storage: size for storage, size in entering.items() if storage not in self._counted}
        self._counted |= own.keys()
        return result, Measured(
            name=name,
            inputs=sum(fresh.values()),
            saved=sum(own.values()),
            movable=sum(size for storage, size in own.items() if storage in movable),
            narrow=sum(size for key, size in narrow.items() if key[0] in own),
            seconds=seconds,
        )


def agreed(blocks: Sequence[Measured]) -> list[Measured]:
    """The largest figures over ranks, so that all ranks plan the same. Collective where there is a process group."""
    rows = _largest([[b.inputs, b.saved, b.movable, b.narrow, b.seconds] for b in blocks])
    return [Measured(b.name, int(i), int(s), int(m), int(n), seconds) for b, (i, s, m, n, seconds) in zip(blocks, rows, strict=True)]


def copy_speeds(device: torch.device) -> tuple[float, float]:
    """Bytes a second that can be stored in eight bits and read again, and that travel to host memory (one way), on the slowest rank.

    Measured on one tensor. Collective where there is a process group.
    """
    size, dtype = _TRIAL[device.type]
    sample = torch.ones(size // 1024 // dtype.itemsize, 1024, dtype=dtype, device=device)
    best = [float("inf"), float("inf")]
    for _ in range(3):
        begun = _now(device)
        Eighths(sample).unpack()
        best[0] = min(best[0], _now(device) - begun)
        begun = _now(device)
        Offloaded(sample, Scope("offload")).storage()
        best[1] = min(best[1], (_now(device) - begun) / 2)
    narrowing, copying = _largest([best])[0]
    return sample.nbytes / narrowing, sample.nbytes / copying


def _largest(rows: list[list[float]]) -> list[list[float]]:
    """Each figure's largest value over ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return rows
    table = torch.tensor(rows, dtype=torch.float64)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return table.tolist()


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers which block made each storage, to count later what is still alive.

    A storage counts for the block that is at work when it is made, and moves to the next block that it enters.

    Args:
        weights: storages that do not count.
        kind: of device whose memory counts.
    """

    def __init__(self, weights: set[StorageWeakRef], kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = kind
        self._owner: dict[StorageWeakRef, tuple[str, int]] = {}
        self._weights, self._entered = weights, set[StorageWeakRef]()
        self.block = ""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = storage_of(tensor)
            if tensor.device.type == self._kind and storage not in self._owner and storage not in self._weights:
                self._owner[storage] = (self.block, tensor.untyped_storage().nbytes())
        return result

    def at_work(self, block: str, arguments: tuple[Any, ...], compute: Callable[..., Any]) -> Any:
        """A block computes; what it returns is nobody's until another block reads it."""
        self._move(arguments, block)
        before, self.block = self.block, block
        result = compute(*arguments)
        self.block = before
        self._move(result, before)
        return result

    def _move(self, tensors: Any, block: str) -> None:
        for tensor in tensors_in(tensors):
            storage = storage_of(tensor)
            if tensor.requires_grad and storage not in self._entered and storage in self._owner:
                self._owner[storage] = (block, self._owner[storage][1])
                if block:
                    self._entered.add(storage)

    def held(self) -> dict[str, int]:
        """Bytes alive now by block."""
        sums: dict[str, int] = {}
        for storage, (block, size) in self._owner.items():
            if not storage.expired():  # type: ignore[no-untyped-call]
                sums[block] = sums.get(block, 0) + size
        return sums


def tensors_in(value: Any) -> list[Tensor]:
    """The plain tensors in nested tuples, lists and dicts; sharded parameters are none."""
    return [leaf for leaf in tree_leaves(value) if type(leaf) in (Tensor, nn.Parameter) and leaf.layout == torch.strided]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _never(_: Any) -> Tensor:
    raise AssertionError("a measured forward pass has no backward")
