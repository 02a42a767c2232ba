"""A model of the part of Gluon that kernels of one warpgroup use: they run without a GPU, program by program, and fail where they rely on luck.

Copies and products take effect as late as they may: a copy when its barrier is waited for, its memory holding NaN until then, a product when it is
waited for. What threads wrote has to be fenced before the copy engine or a product reads it; what these read has to be waited for, and all warps have
to meet, before it is written again.
"""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import torch

import gem_kernels
from gem_kernels.common.compiled import whole

MODULES = ("gem_kernels.common.hopper.gluon", "gem_kernels.common.language", "gem_kernels.common.hopper.language")


class Wrong(AssertionError):
    """A kernel that a GPU may run wrongly."""


def need(condition, what):
    if not condition:
        raise Wrong(what)


class Tile:
    """Shared memory; views have the state of the whole."""

    def __init__(self, machine, data, state=None):
        self.machine, self.data, self.dtype = machine, data, data.dtype
        self.state = state or SimpleNamespace(unfenced=False, leaving=0, in_use=0, unmet=False, arriving=False)
        if state is None:
            machine.tiles.append(self)

    def reshape(self, shape):
        return Tile(self.machine, self.data.view(shape), self.state)

    def permute(self, order):
        return Tile(self.machine, self.data.permute(order), self.state)

    def load(self, layout):
        need(not self.state.arriving, "memory is read before its copy was waited for")
        return self.data.clone()

    def store(self, value):
        self.writable()
        need(not self.state.arriving, "memory is written while a copy arrives")
        need(value.dtype == self.dtype and value.shape == self.data.shape, f"{value.dtype} {tuple(value.shape)} is stored in {self.dtype} memory")
        self.data.copy_(value)
        self.state.unfenced = True

    def writable(self):
        need(not self.state.leaving, "memory is written while it is copied to the device's")
        need(not self.state.in_use, "memory is written while a product reads it")
        need(not self.state.unmet, "memory is written before all warps are through with it")

    def readable(self):
        need(not self.state.unfenced, "memory is read without a fence after it was written")
        need(not self.state.arriving, "memory is read before its copy was waited for")


class Pointer:
    def __init__(self, memory, at=0):
        self.memory, self.at = memory, at

    def __add__(self, more):
        return Pointer(self.memory, self.at + more)


class Barrier:
    def __init__(self):
        self.phase, self.expected, self.arrivals, self.copies = 0, 0, 0, []


class Product:
    def __init__(self, a, b):
        self.a, self.b = a, b
        for tile in self.operands():
            tile.readable()
            tile.state.in_use += 1

    def operands(self):
        return [x for x in (self.a, self.b) if isinstance(x, Tile)]

    def finish(self):
        value = (self.a.data if isinstance(self.a, Tile) else self.a).float() @ self.b.data.float()
        for tile in self.operands():
            tile.state.in_use -= 1
            tile.state.unmet = True
        self.value = value


class Machine:
    """One SM, and the functions of Gluon on it."""

    def __init__(self):
        self.tiles, self.leaving, self.products, self.program, self.programs = [], [], [], 0, 1

    def start(self, program, programs):
        self.tiles, self.leaving, self.products, self.program, self.programs = [], [], [], program, programs

    def allocate(self, dtype, shape, layout):
        if dtype is torch.int64:
            return SimpleNamespace(index=[Barrier() for _ in range(shape[0])].__getitem__)
        return Tile(self, torch.full(shape, float("nan"), dtype=dtype))

    def fence(self):
        for tile in self.tiles:
            tile.state.unfenced = False

    def meet(self):
        for tile in self.tiles:
            tile.state.unmet = False

    def expect(self, barrier, size, pred=True):
        if pred:
            need(not barrier.expected, "a barrier expects two times")
            barrier.expected = size

    def wait(self, barrier, phase):
        need(phase == barrier.phase & 1, "a barrier is waited for in the wrong phase: this hangs")
        need(barrier.expected and barrier.expected == barrier.arrivals, f"{barrier.arrivals} of {barrier.expected} bytes come: this hangs")
        for desc, at, tile in barrier.copies:
            tile.data.copy_(desc.read(at))
            tile.state.arriving = False
        barrier.phase, barrier.expected, barrier.arrivals, barrier.copies = barrier.phase + 1, 0, 0, []

    def fetch(self, desc, at, barrier, tile, pred=True):
        if pred:
            tile.writable()
            need(not tile.state.arriving, "two copies arrive in the same memory")
            tile.data.fill_(float("nan"))
            tile.state.arriving = True
            barrier.copies.append((desc, at, tile))
            barrier.arrivals += tile.data.nbytes

    def send(self, desc, at, tile):
        tile.readable()
        tile.state.leaving += 1
        self.leaving.append((desc, at, tile))

    def sent(self, pendings):
        while len(self.leaving) > pendings:
            desc, at, tile = self.leaving.pop(0)
            desc.write(at, tile.data)
            tile.state.leaving -= 1
            tile.state.unmet = True

    def multiply(self, a, b, acc, use_acc, is_async):
        need(not use_acc and is_async and b.data.shape[1:] == acc.shape[1:], "the model knows fresh products in flight")
        self.products.append(Product(a, b))
        return self.products[-1]

    def multiplied(self, pendings, deps):
        while len(self.products) > pendings:
            self.products.pop(0).finish()
        (product,) = deps
        need(product not in self.products, "a product is used while it is in flight")
        return product.value


def _memory(x, start=0):
    """All elements of the storage of ``x`` from one on."""
    return torch.as_strided(x, (x.untyped_storage().size() // x.element_size() - start,), (1,), start)


class Descriptor:
    """What the copy engine makes of a tensor descriptor: coordinates outside its shape are zeros, and nothing is written there."""

    def __init__(self, desc):
        base = desc.base
        self.memory = _memory(base)
        self.start, self.size = base.storage_offset(), base.element_size()
        self.shape, self.strides, self.dtype, self.block, self.layout = desc.shape, desc.strides, base.dtype, desc.block_shape, None
        self.block_type = SimpleNamespace(nbytes=self.size * self.block[-2] * self.block[-1])

    def places(self, at):
        """Element of each item of the block, and whether it is inside the shape."""
        need(all(0 <= i < 2**31 for i in at), f"coordinates {at} leave 32 bits")
        rows, columns = torch.arange(self.block[-2]), torch.arange(self.block[-1])
        base = sum(i * stride for i, stride in zip(at, self.strides, strict=True)) * self.size % 2**64 // self.size
        turn = 2**64 // self.size
        base = base - turn if base > turn // 2 else base
        inside = ((at[2] + rows < self.shape[2])[:, None] & (at[3] + columns < self.shape[3])[None, :]).view(self.block)
        return (self.start + base + rows[:, None] * self.strides[2] + columns[None, :]).view(self.block), inside

    def read(self, at):
        places, inside = self.places(at)
        return torch.where(inside, self.memory[torch.where(inside, places, 0)], 0)

    def write(self, at, data):
        places, inside = self.places(at)
        self.memory[places[inside]] = data[inside]


def _load(pointer, mask=None, other=None):
    if not isinstance(pointer.at, torch.Tensor):
        return int(pointer.memory[pointer.at])
    mask = torch.ones_like(pointer.at, dtype=torch.bool) if mask is None else mask.expand(pointer.at.shape)
    return torch.where(mask, pointer.memory[torch.where(mask, pointer.at, 0)], 0.0 if other is None else other)


def _language(machine):
    def nothing(*args, **kwargs):
        return None

    gl = SimpleNamespace(
        constexpr=lambda x: x, float32=torch.float32, int64=torch.int64, DistributedLinearLayout=nothing, SwizzledSharedLayout=nothing,
        SliceLayout=nothing, DotOperandLayout=nothing, NVMMADistributedLayout=nothing, NVMMASharedLayout=SimpleNamespace(get_default_for=nothing),
        arange=lambda low, high, layout: torch.arange(low, high), zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        convert_layout=lambda x, layout, assert_trivial=False: x, minimum=min, maximum=max, where=torch.where, exp2=torch.exp2, sqrt=torch.sqrt,
        floor=torch.floor, sum=lambda x, axis: x.sum(axis), max=lambda x, axis: x.amax(axis), join=lambda a, b: torch.stack((a, b), -1),
        split=lambda x: x.unbind(-1), load=_load, program_id=lambda axis: machine.program, num_programs=lambda axis: machine.programs,
        allocate_shared_memory=machine.allocate, static_range=range,
        inline_asm_elementwise=lambda asm, *args, **kwargs: {"cos": torch.cos, "sin": torch.sin}[asm[:3]](args[1][0]),
    )  # fmt: skip
    tma = SimpleNamespace(async_copy_global_to_shared=machine.fetch, async_copy_shared_to_global=machine.send, store_wait=machine.sent)
    jit = SimpleNamespace(jit=lambda fn=None, **options: fn or (lambda f: f), constexpr_function=lambda fn: fn)
    mbarrier = SimpleNamespace(
        MBarrierLayout=nothing, init=nothing, expect=machine.expect, wait=machine.wait, arrive=nothing, invalidate=nothing
    )  # fmt: skip
    return {
        "gl": gl, "gluon": jit, "tma": tma, "mbarrier": mbarrier, "fence_async_shared": machine.fence, "warpgroup_mma_init": nothing,
        "warpgroup_mma": machine.multiply, "warpgroup_mma_wait": lambda pendings, deps: machine.multiplied(pendings, deps),
    }, {"tl": SimpleNamespace(debug_barrier=machine.meet), "triton": None}  # fmt: skip


def _loaded(name, change):
    path = Path(gem_kernels.__file__).parent.joinpath(*name.split(".")[1:]).with_suffix(".py")
    module = ModuleType(name)
    exec(compile(change(path.read_text()), str(path), "exec"), module.__dict__)
    return module


class Model:
    """The module of kernels ``name``, its source through ``change``, on a machine of its own."""

    def __init__(self, name, change=lambda text: text):
        self.machine = Machine()
        stubs = [ModuleType(module) for module in MODULES[:2]]
        for stub, content in zip(stubs, _language(self.machine), strict=True):
            stub.__dict__.update(content)
        with patch.dict(sys.modules, dict(zip(MODULES[:2], stubs, strict=True))):
            sys.modules[MODULES[2]] = _loaded(MODULES[2], str)
            self.module = _loaded(name, change)

    def launch(self, kernel, grid, device, arguments):
        """In the place of ``launcher.launch``; ``kernel`` by name."""
        given = {name: self._given(x) for name, x in arguments.items() if name != "num_warps"}
        for program in range(grid):
            self.machine.start(program, grid)
            getattr(self.module, kernel)(**given)
            need(not self.machine.leaving and not self.machine.products, "a program ends with something in flight")

    @staticmethod
    def _given(x):
        x = whole(x)
        if hasattr(x, "block_shape"):
            return Descriptor(x)
        return Pointer(_memory(x, x.storage_offset())) if isinstance(x, torch.Tensor) else x
