"""Launches that are alike. What the calls of an op under one set of shapes, strides, dtypes and options share is worked out once, and so is its place
among the arguments of the compiled kernel; a launch then looks at what is new: addresses of tensors and a few numbers.

A plan asks ``launcher`` for a kernel whenever it meets a new kind of call: another dtype, alignment, device, or kind of number. What it keeps is that
kernel, with the maps of its descriptors all but filled, which Triton's own launcher does anew, field by field, in Python.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gem_kernels.common import launcher


class Described(NamedTuple):
    """A descriptor without its tensor.

    Args:
        block: sizes of the block that is copied.
        layout: of the block in shared memory, for Gluon; None for the Triton language.
        shape: sizes that the descriptor gives the tensor; None for its own shape and strides.
        strides: in elements.
    """

    block: tuple[int, ...]
    layout: Any
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None

    def of(self, x: Tensor) -> Any:
        """The descriptor of ``x``, all of it checked by Triton."""
        given = (x, x.shape if self.shape is None else self.shape, x.stride() if self.strides is None else self.strides, list(self.block))
        if self.layout is None:
            from triton.tools.tensor_descriptor import TensorDescriptor as Plain

            return Plain(*given)
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        return TensorDescriptor(*given, self.layout)


MOST = 1024
"""Plans that are kept; then all are forgotten."""
_plans: dict[Any, "Plan"] = {}


def planned(kernel: Any, forms: tuple[Any, ...], shared: dict[str, Any], describe: Callable[[], dict[str, Described]]) -> "Plan":
    """The plan of launches of ``kernel``, made or remembered.

    Args:
        kernel: as ``launcher.launch`` takes it.
        forms: what ``describe`` depends on.
        shared: arguments and options by name that are the same in each launch.
        describe: gives the descriptors, by name.
    """
    key = (id(kernel), forms, *shared, *shared.values())
    found = _plans.get(key)
    if found is None:
        if len(_plans) >= MOST:
            _plans.clear()
        found = _plans[key] = Plan(kernel, {**shared, **describe()})
    return found


class Plan:
    """Launches of one kernel, which it keeps alive.

    Args:
        kernel: as ``launcher.launch`` takes it.
        shared: arguments and options by name that are the same in each launch, and for each descriptor how it describes the tensor of its name.
    """

    def __init__(self, kernel: Any, shared: dict[str, Any]) -> None:
        self.kernel = kernel
        self.described = {name: value for name, value in shared.items() if isinstance(value, Described)}
        self.own = {name for name, value in self.described.items() if value.shape is None}
        self.shared = {name: value for name, value in shared.items() if name not in self.described}
        self.kept: dict[Any, _Ready | None] = {}

    def launch(self, grid: int, device: torch.device, **varying: Any) -> None:
        """Launch on a grid of one axis, on the current stream of ``device``.

        Args:
            grid: number of programs.
            device: where the tensors lie.
            varying: what is not shared: tensors, integers, None, floats, bools.

        Raises:
            RequestError: as ``launcher.launch``.
        """
        place = launcher.direct(self.kernel, device)
        known = None if place is None else self._key(place, varying)
        if place is None or known is None:
            launcher.launch(self.kernel, grid, device, self._whole(varying))
            return
        key, passed = known
        ready = self.kept.get(key)
        if ready is None:
            compiled = launcher.launch(self.kernel, grid, device, self._whole(varying))
            if compiled is not None and key not in self.kept:
                self.kept[key] = self._ready(compiled, varying)
            return
        if launcher.checked():
            whole = self._whole(varying)
            place[0].compare(ready.compiled, place, place[0].passed(whole), whole)
        ready.send(grid, 1, 1, place[0].stream(place), *ready.head, *ready.values(passed, varying))

    def _key(self, place: launcher.Place, varying: dict[str, Any]) -> tuple[Any, list[Any]] | None:
        """What tells kernels apart, and the values with tensors as addresses; None for a call that is left to ``launcher``."""
        passed = [*varying.values()]
        kinds: list[Any] = [*varying]
        for i, (name, value) in enumerate(varying.items()):
            kind = value.__class__
            if kind is int:
                kinds[i] = name, launcher.integer_kind(value, True)
            elif value is None or kind is float or kind is bool:
                kinds[i] = name, kind
            elif isinstance(value, Tensor) and value.is_cuda:
                passed[i] = address = value.data_ptr()
                kinds[i] = name, value.dtype, address % 16 == 0, value.stride() if name in self.own else None
            else:
                return None
        return (place, *kinds), passed

    def _whole(self, varying: dict[str, Any]) -> dict[str, Any]:
        """All arguments as Triton takes them."""
        return {**self.shared, **varying, **{name: described.of(varying[name]) for name, described in self.described.items()}}

    def _ready(self, compiled: Any, varying: dict[str, Any]) -> "_Ready | None":
        """The launch of a compiled kernel; None where its launcher is not of a known kind, or wants memory of its own."""
        run, params = compiled.run, self.kernel.params
        if not hasattr(run, "launch_cooperative_grid") or run.global_scratch_size or run.profile_scratch_size:
            return None
        maps = dict(
            zip([p.name for p in params if p.name in self.described], getattr(compiled.metadata, "tensordesc_meta", None) or (), strict=False)
        )
        if len(maps) < len(self.described) or any(found["fp4_padded"] for found in maps.values()):
            return None
        values: list[Any] = []
        places = {}
        for param in params:
            places[param.name] = len(values)
            described = self.described.get(param.name)
            if described is None:
                values.append(self.shared.get(param.name, param.default if param.has_default else None))
            else:
                values += [None, *_flat(described, varying[param.name])]
        return _Ready(compiled, values, [(places[name], _Map.of(self.described[name], maps[name]) if name in maps else None) for name in varying])


def _flat(described: Described, x: Tensor) -> tuple[int, ...]:
    """Sizes and strides of a descriptor, as its kernel takes them after the map."""
    return (*x.shape, *x.stride()) if described.shape is None or described.strides is None else (*described.shape, *described.strides)


class _Map(NamedTuple):
    """What the map of a descriptor is filled with after the address."""

    meta: tuple[Any, ...]
    shape: tuple[int, ...] | None
    strides: tuple[int, ...] | None

    @classmethod
    def of(cls, described: Described, meta: dict[str, Any]) -> "_Map":
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST as TYPES

        return cls((meta["swizzle"], meta["elem_size"], TYPES[meta["elem_type"]], meta["block_size"]), described.shape, described.strides)


class _Ready:
    """Launches of a compiled kernel whose launcher is handed every value as it takes it: descriptors as a map, sizes and strides.

    Args:
        compiled: the kernel.
        values: what the launcher gets, of the arguments that are shared.
        places: of each of the others, in the order of a launch: where it stands among them, and its map if it is a descriptor.
    """

    def __init__(self, compiled: Any, values: list[Any], places: list[tuple[int, _Map | None]]) -> None:
        from triton.runtime import driver

        self.compiled, self.template, self.places = compiled, values, places
        run, packed = compiled.run, compiled.packed_metadata
        head: tuple[Any, ...] = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
        self.nested = hasattr(run, "arg_annotations")
        """Whether the launcher takes the values as one argument: from Triton 3.7 on."""
        if self.nested:
            head = (*head, packed, None, None, None, None, None, run.arg_annotations, run.kernel_signature)
        else:
            head = (*head, None, None, packed, None, None, None)
        self.head = head
        wrapped = any(filled is not None for _, filled in places)
        self.send: Callable[..., None] = inspect.getclosurevars(run.launch).nonlocals["launcher"] if wrapped else run.launch
        utils = driver.active.utils
        self.fill = utils.fill_tma_descriptor_tiled if self.nested else utils.fill_tma_descriptor

    def values(self, passed: list[Any], varying: dict[str, Any]) -> list[Any]:
        """The last arguments of the launcher."""
        values = self.template.copy()
        for (at, filled), value, x in zip(self.places, passed, varying.values(), strict=True):
            if filled is None:
                values[at] = value
            elif filled.shape is not None:
                values[at] = self.fill(value, *filled.meta, filled.shape, filled.strides, 0)
            else:
                shape, strides = x.shape, x.stride()
                values[at] = self.fill(value, *filled.meta, shape, strides, 0)
                values[at + 1 : at + 1 + 2 * len(shape)] = *shape, *strides
        return [values] if self.nested else values
