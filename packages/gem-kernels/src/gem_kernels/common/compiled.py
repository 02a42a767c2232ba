"""Descriptors of the copy engine that cost little to hand over, and compiled kernels that are launched with them.

A ``Block`` is a tensor and a ``Described``, a descriptor but for its address. Triton takes an object of its own in its place, checks it at each
launch and fills a map from it field by field; here it is checked once, and a launch fills in the address.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

Sizes = tuple[int, ...] | None


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """A descriptor without its tensor, the same in many launches: they are told apart by identity.

    Args:
        block: sizes of the block that is copied.
        layout: of the block in shared memory, for Gluon; None for the Triton language.
        shape: sizes that the descriptor gives the tensor; None for its own shape and strides.
        strides: in elements.
    """

    block: tuple[int, ...]
    layout: Any = None
    shape: Sizes = None
    strides: Sizes = None

    def of(self, x: Tensor) -> Any:
        """Triton's descriptor of ``x``, which Triton checks."""
        given = x, list(self.shape or x.shape), list(self.strides or x.stride()), list(self.block)
        if self.layout is None:
            return import_module("triton.tools.tensor_descriptor").TensorDescriptor(*given)
        return import_module("triton.experimental.gluon.nvidia.hopper").TensorDescriptor(*given, self.layout)


class Block(tuple[Tensor, Described]):
    """An argument: a tensor, and how it is described."""

    __slots__ = ()


def whole(value: Any) -> Any:
    """An argument as Triton takes it."""
    return value[1].of(value[0]) if type(value) is Block else value


class Compiled:
    """A kernel that Triton has compiled, and how it is launched.

    Args:
        kernel: what Triton's launch gave.
        values: what it was launched with, in the order of its parameters.
    """

    def __init__(self, kernel: Any, values: tuple[Any, ...]) -> None:
        self.kernel = kernel
        described = [(i, value[1]) for i, value in enumerate(values) if type(value) is Block]
        self.maps = _maps(kernel, described)
        self.flat = self.maps is not None and _known(kernel.run)
        if self.flat:
            self._flatten(bool(described))

    def _flatten(self, wrapped: bool) -> None:
        from triton.runtime import driver

        run, packed, utils = self.kernel.run, self.kernel.packed_metadata, driver.active.utils
        head: tuple[Any, ...] = (self.kernel.function, run.launch_cooperative_grid, run.launch_pdl)
        self.nested = hasattr(run, "arg_annotations")
        """Whether the launcher takes the values as one argument: from Triton 3.7 on."""
        if self.nested:
            self.head = (*head, packed, None, None, None, None, None, run.arg_annotations, run.kernel_signature)
            self.fill = utils.fill_tma_descriptor_tiled
        else:
            self.head = (*head, None, None, packed, None, None, None)
            self.fill = utils.fill_tma_descriptor
        self.send: Callable[..., None] = inspect.getclosurevars(run.launch).nonlocals["launcher"] if wrapped else run.launch

    def launch(self, grid: int, stream: int, values: tuple[Any, ...], passed: list[Any]) -> None:
        """Launch on a grid of one axis.

        Args:
            grid: number of programs.
            stream: where.
            values: arguments in the order of the parameters.
            passed: the same, tensors and those of descriptors as addresses; overwritten.
        """
        if not self.flat:
            given = [whole(value) if type(value) is Block else address for value, address in zip(values, passed, strict=True)]
            self.kernel.run(grid, 1, 1, stream, self.kernel.function, self.kernel.packed_metadata, None, None, None, *given)
            return
        for i, meta, shape, strides in self.maps or ():
            if shape is None or strides is None:
                x = values[i][0]
                shape, strides = x.shape, x.stride()
            passed[i : i + 1] = self.fill(passed[i], *meta, shape, strides, 0), *shape, *strides
        if self.nested:
            self.send(grid, 1, 1, stream, *self.head, passed)
        else:
            self.send(grid, 1, 1, stream, *self.head, *passed)


def _known(run: Any) -> bool:
    """Whether Triton's launcher of a kernel is of the known kind and wants no memory of its own."""
    return hasattr(run, "launch_cooperative_grid") and not run.global_scratch_size and not run.profile_scratch_size


def _maps(kernel: Any, described: list[tuple[int, Described]]) -> list[tuple[int, tuple[Any, ...], Sizes, Sizes]] | None:
    """Of each descriptor, the last first: its place, what its map is filled with between the address and the sizes, and the sizes that are not the
    tensor's own; None where the kernel has no maps."""
    if not described:
        return []
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST as TYPES

    metas = getattr(kernel.metadata, "tensordesc_meta", None) or []
    if len(metas) != len(described) or any(meta["fp4_padded"] for meta in metas):
        return None
    fields = [(meta["swizzle"], meta["elem_size"], TYPES[meta["elem_type"]], meta["block_size"]) for meta in metas]
    return [(i, meta, one.shape, one.strides) for (i, one), meta in zip(described, fields, strict=True)][::-1]
