"""Other ways to hold what autograd saves for backward: in host memory, or in eight bits. Only activations are touched.

An activation is a floating-point tensor with a gradient into which more than one leaf went. So these stay as they are: weights and what is computed
from one weight alone (a transposed view, its cast under autocast, looked-up vectors), ids, offsets, masks, and statistics that fused kernels keep.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

SMALLEST = 4096
"""Bytes below which a tensor is not worth a copy."""
LARGEST_E4M3 = 448.0


def is_activation(tensor: Tensor) -> bool:
    """Whether a saved tensor may be held in another way."""
    if not (tensor.requires_grad and tensor.is_floating_point() and not tensor.is_leaf):
        return False
    return tensor.layout == torch.strided and tensor.dim() > 1 and tensor.nbytes >= SMALLEST and not _from_leaf(tensor)


def bytes_in_eight_bits(tensor: Tensor) -> int:
    """What an activation takes as ``Eighths``; its own size where rows are so short that their scales would outweigh the gain."""
    return min(tensor.nbytes, tensor.numel() + 4 * (tensor.numel() // tensor.shape[-1]))


def _from_leaf(tensor: Tensor) -> bool:
    """Whether it was computed from one leaf alone, step by step."""
    node: Any = tensor.grad_fn
    while True:
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        if not parents:
            return True
        if len(parents) > 1:
            return False
        node = parents[0]


class Offloaded:
    """A storage in host memory; all tensors that view it share it. On the CPU it is a plain copy."""

    def __init__(self, tensor: Tensor, scope: "Scope") -> None:
        self._scope, self._device = scope, tensor.device
        whole = _bytes_of(tensor)
        self._back: Tensor | None = None
        self._arrived: Any = None
        if tensor.device.type != "cuda":
            self._host = whole.clone()
            return
        stream = side_stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._host = torch.empty(whole.shape, dtype=torch.uint8, pin_memory=True)
            self._host.copy_(whole, non_blocking=True)
        whole.record_stream(stream)  # the allocator must not hand the memory out before the copy is done

    def fetch(self) -> None:
        """Start to copy it back."""
        if self._back is not None:
            return
        if self._device.type != "cuda":
            self._back = self._host
            return
        here, stream = torch.cuda.current_stream(self._device), side_stream(self._device)
        self._back = torch.empty(self._host.shape, dtype=torch.uint8, device=self._device)
        stream.wait_stream(here)  # the memory may have been in use until now
        with torch.cuda.stream(stream):
            self._back.copy_(self._host, non_blocking=True)
            self._arrived = stream.record_event()
        self._back.record_stream(stream)

    def storage(self) -> Any:
        """The bytes on the device, for the stream that computes; what else the block holds is fetched behind them."""
        self.fetch()
        self._scope.fetch_all()
        if self._arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrived)
        assert self._back is not None
        return self._back.untyped_storage()


class Viewed:
    """One tensor of an offloaded storage."""

    def __init__(self, tensor: Tensor, whole: Offloaded) -> None:
        self._whole, self._dtype, self._device = whole, tensor.dtype, tensor.device
        self._place = (tensor.storage_offset(), tensor.shape, tensor.stride())

    def unpack(self) -> Tensor:
        return torch.empty(0, dtype=self._dtype, device=self._device).set_(self._whole.storage(), *self._place)


class Eighths:
    """A tensor in e4m3 with a float32 scale for each row of its last dimension: the row's largest magnitude becomes 448."""

    def __init__(self, tensor: Tensor) -> None:
        self._dtype, values = tensor.dtype, tensor.detach()
        wide = torch.promote_types(tensor.dtype, torch.float32)
        smallest = torch.finfo(torch.float32).tiny
        # one pass each: a wide copy and its magnitudes would be written and read again, and memory is all that this takes
        largest = torch.linalg.vector_norm(values, float("inf"), dim=-1, keepdim=True).to(wide)
        self._scale = (largest / LARGEST_E4M3).clamp_min(smallest).float()
        self._values = (values / self._scale).to(torch.float8_e4m3fn)

    def unpack(self) -> Tensor:
        values: Tensor = self._values.to(self._dtype)  # exact
        return values.mul_(self._scale)


class Scope:
    """What one block holds in one forward pass; tensors that are saved twice are held once.

    Args:
        policy: ``offload`` or ``fp8``.
    """

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._known: dict[Hashable, Any] = {}
        self._fetched = False

    def pack(self, tensor: Tensor) -> Any:
        """For ``saved_tensors_hooks``."""
        if not is_activation(tensor):
            return tensor
        storage = storage_of(tensor)
        if self._policy == "offload":
            whole = self._once((storage, tensor._version), lambda: Offloaded(tensor, self))
            return Viewed(tensor, whole)
        if bytes_in_eight_bits(tensor) == tensor.nbytes:
            return tensor
        key = (storage, tensor._version, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
        return self._once(key, lambda: Eighths(tensor))

    @staticmethod
    def unpack(held: Any) -> Tensor:
        """For ``saved_tensors_hooks``."""
        tensor: Tensor = held if isinstance(held, Tensor) else held.unpack()
        return tensor

    def fetch_all(self) -> None:
        """Copy back what the block holds in host memory: the first use of any of it is the beginning of the block's backward."""
        if not self._fetched:
            self._fetched = True
            for whole in list(self._known.values())[::-1]:
                whole.fetch()
        self._known.clear()

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


_streams: dict[torch.device, torch.cuda.Stream] = {}


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that copies to host memory and back, one a device."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]


def storage_of(tensor: Tensor) -> StorageWeakRef:
    """A key for a tensor's storage; held, it keeps the storage's address from being given to another one."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _bytes_of(tensor: Tensor) -> Tensor:
    """``[bytes]`` uint8: the whole storage of a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.detach().untyped_storage())
