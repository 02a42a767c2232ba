"""Hopper kernels of warpgroups on a CPU: their functions as ordinary Python over torch, one thread for each warpgroup.

What is emulated: barriers with their phases, the copy engine's ragged blocks, shared memory (which starts as NaN), products at once. So wrong
indices, phases that do not match and warpgroups that wait for each other show; how registers are laid out does not. With ``Late`` asynchronous
products and copies read shared memory as late as they may, and so does what fills the registers of a product's operand.
"""

import threading
import time
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

END = 2**30
LIMIT = 20.0
OPERAND = object()
"""The layout of a product's operand in registers."""


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.dtype, self.shape = data, data.dtype, data.shape

    def index(self, i: Any) -> "Shared":
        return Shared(self.data[int(i)])

    def reshape(self, shape: list[int]) -> "Shared":
        return Shared(self.data.view(shape))

    def permute(self, order: list[int]) -> "Shared":
        return Shared(self.data.permute(order))

    def slice(self, start: int, length: int, dim: int) -> "Shared":
        return Shared(self.data.narrow(dim, start, length))

    def store(self, x: torch.Tensor) -> None:
        assert self.data.shape == x.shape
        self.data.copy_(x)

    def load(self, layout: Any) -> Any:
        return Registers(self) if layout is OPERAND else self.data.clone()


class Registers:
    """A product's operand. The load into them is done when the first product has read them, and nothing before that waits for it."""

    def __init__(self, source: Shared) -> None:
        self.source = source
        self.held: torch.Tensor | None = None

    @property
    def data(self) -> torch.Tensor:
        if self.held is None:
            self.held = self.source.data.clone()
        return self.held


class Barrier:
    """An mbarrier: a phase ends when so many have arrived and all bytes that were expected are there."""

    def __init__(self, count: int) -> None:
        self.changed = threading.Condition()
        self.count = self.left = count
        self.bytes = self.phase = 0

    def step(self, arrivals: int, expected: int) -> None:
        with self.changed:
            self.left -= arrivals
            self.bytes += expected
            assert self.left >= 0, "more arrivals than the barrier counts"
            if self.left == 0 and self.bytes == 0:
                self.left = self.count
                self.phase ^= 1
                self.changed.notify_all()

    def wait(self, phase: Any) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.phase != int(phase), LIMIT):
                raise TimeoutError("a warpgroup waits for ever")


class Barriers:
    def __init__(self, count: int, arrivals: int) -> None:
        self.all = [Barrier(arrivals) for _ in range(count)]

    def index(self, i: Any) -> Barrier:
        return self.all[int(i)]


class Blocks:
    """A descriptor: ragged blocks ``[1, 1, rows, columns]`` of ``x`` ``[tokens, heads, width]``."""

    def __init__(self, x: torch.Tensor, block: list[int]) -> None:
        self.x, self.block, self.dtype, self.layout = x, block, x.dtype, None
        self.block_type = SimpleNamespace(nbytes=x.element_size() * torch.Size(block).numel())

    def at(self, coordinates: list[Any]) -> torch.Tensor:
        """The part of ``x`` that a block covers."""
        _, end, past, column = (int(c) for c in coordinates)
        first = end + past - END
        if first < 0 or end > len(self.x):
            raise IndexError("a copy leaves its tensor")
        rows = max(min(self.block[2], end - first), 0)
        return self.x.flatten(1)[first : first + rows, column : column + self.block[3]]


def _copy_in(desc: Blocks, coordinates: list[Any], barrier: Barrier, buffer: Shared) -> None:
    found = desc.at(coordinates)
    buffer.data.zero_()
    buffer.data[0, 0, : len(found)] = found
    barrier.step(0, -desc.block_type.nbytes)


def _copy_out(desc: Blocks, coordinates: list[Any], buffer: Shared) -> None:
    found = desc.at(coordinates)
    found.copy_(buffer.data[0, 0, : len(found)])


def _product(a: Any, b: Any, acc: torch.Tensor, use_acc: bool = True, is_async: bool = False) -> torch.Tensor:
    left, right = (x if isinstance(x, torch.Tensor) else x.data for x in (a, b))
    product = left.float() @ right.float()
    return acc + product if use_acc else product


def _wait(pending: int, deps: list[Any]) -> Any:
    return deps[0] if len(deps) == 1 else tuple(deps)


class Late:
    """Names for ``emulate``: products and copies out of shared memory read it where they are waited for.

    Args:
        pause: seconds that a wait gives the other warpgroups before anything is read.
    """

    def __init__(self, pause: float = 0.0) -> None:
        self.here, self.pause = threading.local(), pause
        self.names = {
            "warpgroup_mma": self.multiply, "warpgroup_mma_wait": self.wait,
            "tma": SimpleNamespace(
                async_copy_global_to_shared=_copy_in, store_wait=lambda pending: self.read("copies", pending),
                async_copy_shared_to_global=lambda *given: self.start("copies", lambda: _copy_out(*given)),
            ),
        }  # fmt: skip

    def start(self, kind: str, work: Callable[[], None]) -> None:
        self.here.__dict__.setdefault(kind, []).append(work)

    def read(self, kind: str, pending: int) -> None:
        queue = self.here.__dict__.get(kind, [])
        if len(queue) > pending:
            time.sleep(self.pause)
        while len(queue) > pending:
            queue.pop(0)()

    def multiply(self, a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        before = acc if use_acc else None
        self.start("products", lambda: found.append(_product(a, b, before[0] if isinstance(before, list) else before, use_acc)))
        return found

    def wait(self, pending: int, deps: list[list[torch.Tensor]]) -> Any:
        self.read("products", pending)
        return _wait(pending, [found[0] for found in deps])


class Pointer:
    """Memory from some element on."""

    def __init__(self, data: torch.Tensor, offset: Any = 0) -> None:
        self.data, self.offset = data, offset

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.data, self.offset + offset)

    def load(self) -> torch.Tensor:
        return self.data.view(-1)[torch.as_tensor(self.offset, dtype=torch.int64)].clone()

    def store(self, x: torch.Tensor, mask: torch.Tensor | None) -> None:
        kept = torch.ones_like(x, dtype=torch.bool) if mask is None else mask.expand(x.shape)
        self.data.view(-1)[self.offset[kept]] = x[kept]


def _copy_numbers(buffer: Shared, pointer: Pointer, mask: torch.Tensor) -> None:
    """Of the asynchronous copies of single numbers, which the barrier that they arrive at need not count here."""
    buffer.data.zero_()
    buffer.data[mask] = pointer.data.view(-1)[pointer.offset[mask]]


def _specialise(parts: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    errors: list[BaseException] = []

    def guarded(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _scalar(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))


def _gl(program: int, programs: int) -> SimpleNamespace:
    layouts = ("SliceLayout", "BlockedLayout", "SwizzledSharedLayout")
    nothing = dict.fromkeys(layouts, lambda *_, **__: None)
    return SimpleNamespace(
        **nothing, DotOperandLayout=lambda *_: OPERAND, NVMMASharedLayout=SimpleNamespace(get_default_for=lambda *_: None),
        constexpr=object, exp2=torch.exp2,
        sum=lambda x, axis: x.sum(axis),
        float32=torch.float32, int64=torch.int64, warp_specialize=_specialise,
        allocate_shared_memory=lambda dtype, shape, layout=None: Shared(torch.full(shape, float("nan"), dtype=dtype)),
        arange=lambda a, b, layout: torch.arange(a, b), zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        where=lambda c, a, b: torch.where(torch.as_tensor(c), torch.as_tensor(a), torch.as_tensor(b)), minimum=_scalar(torch.minimum),
        maximum=_scalar(torch.maximum), convert_layout=lambda x, layout: x, load=lambda p: p.load(),
        store=lambda p, x, mask=None: p.store(x, mask), static_range=range, program_id=lambda axis: program, num_programs=lambda axis: programs,
    )  # fmt: skip


def emulate(kernel: Any, modules: list[Any], programs: int, replaced: dict[str, Any], **arguments: Any) -> None:
    """Run ``kernel`` for ``programs`` programs, one after the other.

    Args:
        kernel: what ``gluon.jit`` made of a function.
        modules: what holds the functions that it calls, and itself; of two of a name the first one's counts.
        programs: the size of the grid.
        replaced: what stands, by name, for functions that look at registers.
        arguments: of the kernel; ``Blocks`` for descriptors, ``Pointer`` for tensors.
    """
    for program in range(programs):
        names: dict[str, Any] = {
            "gl": _gl(program, programs), "barriers": Barriers, "accumulator": lambda n: None, "fast_tanh": torch.tanh,
            "fence_async_shared": lambda: None, "warpgroup_mma": _product, "warpgroup_mma_init": lambda x: x, "warpgroup_mma_wait": _wait,
            "mbarrier": SimpleNamespace(
                wait=lambda b, phase: b.wait(phase), arrive=lambda b, count=1, pred=True: b.step(count, 0) if bool(pred) else None,
                expect=lambda b, n: b.step(1, n),
            ),
            "tma": SimpleNamespace(async_copy_global_to_shared=_copy_in, async_copy_shared_to_global=_copy_out, store_wait=lambda n: None),
            "async_copy": SimpleNamespace(async_copy_global_to_shared=_copy_numbers, mbarrier_arrive=lambda barrier: None),
        }  # fmt: skip
        names |= replaced
        for module in modules:
            for name, value in vars(module).items():
                found = getattr(value, "fn", None) if name not in names else None
                if found is not None:
                    names[name] = types.FunctionType(found.__code__, names, name, found.__defaults__)
                elif type(value).__name__ == "constexpr" and name not in names:
                    names[name] = value.value
        names[kernel.fn.__name__](**arguments)
