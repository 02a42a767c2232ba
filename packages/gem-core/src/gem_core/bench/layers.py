"""Local MFU: every layer of a composed run alone, forward and backward on the inputs that it gets from a real batch.

Layers that do the same work are measured once and count as often as they stand in the model. ``Local MFU = total FLOPs / total time / peak``: the
mean of the layers' MFUs weighted by their time, as one GPU would take it without anything between the layers.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from gem_core.batch import Batch
from gem_core.bench.flops import MODEL, LayerFlops, layer_flops
from gem_core.bench.roofline import Machine
from gem_core.model.dlrm import DlrmModel
from gem_core.model.experts import Ensemble, Expert
from gem_core.model.gem import GemLayer, GemModel, GroupStep
from gem_core.model.hstu import HstuModel
from gem_core.spec import RequestError
from gem_core.train.loop import epoch_feed

COMPOSED = (GemModel, GemLayer, GroupStep, HstuModel, DlrmModel, nn.ModuleList)
"""Modules that only pass tensors between layers: what stands in them is a layer. So is every child of a model of another kind."""
INSIDE = (Expert,)
"""Shown beside the layer that they are a part of, and not counted twice."""
REPEATS = {"cuda": 20, "cpu": 3}
_FLUSHED = 1 << 28
_CYCLES_A_SECOND = 2e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A layer alone, or ``count`` layers that do the same work.

    Args:
        layer: its class.
        module: the name of the first.
        count: how many there are.
        part_of: the class of the layer that it is inside of, and with which it is counted; empty for a layer of its own.
        forward: seconds, the median of the repetitions.
        backward: likewise.
        host: seconds until the host has queued both; as long as both together on a CPU.
        flops: model FLOPs of forward and backward.
        moved: bytes that must be moved at least: inputs, outputs, weights and the gradients of all three, each once.
        floor: the roofline's least seconds.
        bound: ``compute`` or ``bytes``.
    """

    layer: str
    module: str
    count: int
    part_of: str
    forward: float
    backward: float
    host: float
    flops: int
    moved: int
    floor: float
    bound: str

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    @property
    def intensity(self) -> float:
        """Model FLOPs a byte."""
        return self.flops / max(self.moved, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalMfu:
    """All layers of a run.

    Args:
        rows: layers in the order of the forward pass, parts behind their layers.
        flops: model FLOPs of the step's forward and backward, all of the model.
        machine: where they were measured.
        samples: rows of the batch.
    """

    rows: Sequence[Measured]
    flops: int
    machine: Machine
    samples: int

    @property
    def counted(self) -> list[Measured]:
        """Layers that add up."""
        return [row for row in self.rows if not row.part_of]

    @property
    def seconds(self) -> float:
        """Of all layers, one after the other."""
        return sum(row.count * row.seconds for row in self.counted)

    @property
    def covered(self) -> float:
        """Share of the model's FLOPs that are inside layers."""
        return sum(row.count * row.flops for row in self.counted) / max(self.flops, 1)

    @property
    def mfu(self) -> float:
        """FLOPs of all layers over their time and the peak."""
        return self.covered * self.flops / self.seconds / self.machine.peak.flops_per_second

    def mfu_of(self, row: Measured) -> float:
        """MFU of one layer."""
        return row.flops / row.seconds / self.machine.peak.flops_per_second


@dataclass(frozen=True, slots=True)
class _Call:
    """A layer's first call in a forward pass; its tensors are cut off from what made them, and still say whether they need a gradient."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def measure_layers(run: Any, where: Machine, *, repeats: int = 0) -> LocalMfu:
    """Measure every layer of a run that was composed for training (``gem_core.train.compose.Run``) on the first batch of its epoch.

    Args:
        repeats: repetitions; 0 takes 20 on a GPU and 3 on a CPU.

    Raises:
        RequestError: several ranks, sharded weights, compiled blocks, or a model whose FLOPs are not counted by layer.
    """
    _check_alone(run)
    work = epoch_feed(run, 0).peek()
    assert work is not None  # compose refuses an empty training split
    host_batch = work.batches[0]
    counted = layer_flops(run.model, host_batch, decisions=run.decisions, dtype=run.precision.compute_dtype())
    if all(flops.name == MODEL for flops in counted):
        raise RequestError("gem bench layers", "the model counts FLOPs as a whole", "Count them by layer, with gem_core.ops.products.")
    times = repeats or REPEATS[where.device.type]
    rows = []
    for calls in _alike(_captured(run, host_batch), counted):
        rows.append(_measure(run, calls, counted, where, times))
    return LocalMfu(rows=rows, flops=sum(flops.model for flops in counted), machine=where, samples=host_batch.rows)


def _check_alone(run: Any) -> None:
    """Raise RequestError unless every layer of the run can be called alone, as it is in a step."""
    if run.world.size > 1:
        raise RequestError(f"gem bench layers on {run.world.size} ranks", "a layer is measured on one device", "Start one process.")
    if any(type(p) is not nn.Parameter for p in run.model.parameters()):
        strategies = [name for name, _, _ in run.strategies]
        raise RequestError(f"gem bench layers with strategies {strategies}", "they shard the weights", "Set parallel.strategies to [].")
    if run.config.compile.blocks != "off":
        so = "blocks are compiled as wholes, and a layer of theirs alone is not"
        raise RequestError(f"gem bench layers with compile.blocks = {run.config.compile.blocks!r}", so, "Set compile.blocks to off.")


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Layers by name, and parts of layers (``INSIDE``) behind theirs."""
    found: dict[str, nn.Module] = {}

    def walk(name: str, module: nn.Module) -> None:
        for key, child in module.named_children():
            inner = f"{name}.{key}" if name else key
            if isinstance(child, COMPOSED):
                walk(inner, child)
                continue
            found[inner] = child
            if isinstance(child, Ensemble):
                found.update({f"{inner}.{at}": part for at, part in child.named_modules() if isinstance(part, INSIDE)})

    walk("", model)
    return found


def _captured(run: Any, host_batch: Batch) -> list[_Call]:
    """The call of each layer in a forward pass, in the order of the model.

    Raises:
        RequestError: a layer is called more than once: its FLOPs are those of all calls, its inputs those of one.
    """
    calls: dict[str, _Call] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name in calls:
                raise RequestError(f"layer {name!r} alone", "a forward pass calls it several times", "Give each call a module of its own.")
            calls[name] = _Call(name, module, *tree_map(_cut_off, (args, kwargs)))

        return hook

    named, batch = layers_of(run.model), host_batch.to(run.world.device)

    def forward() -> None:
        with run.precision.forward_context(run.world.device.type):
            run.dense(batch, run.embeddings(batch.ids))

    forward()  # strategies that measure do so in the first one, and call layers more than once
    handles = [module.register_forward_pre_hook(keep(name), with_kwargs=True) for name, module in named.items()]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return [calls[name] for name in named if name in calls]


def _alike(calls: Sequence[_Call], counted: Sequence[LayerFlops]) -> list[list[_Call]]:
    """Calls that do the same work together: one class, the same shapes of weights and inputs, the same FLOPs in the same formats."""
    groups: dict[Any, list[_Call]] = {}
    for call in calls:
        weights = tuple(tuple(p.shape) for p in call.module.parameters())
        inputs = tuple((tuple(t.shape), t.dtype) for t in _tensors((call.args, call.kwargs)))
        work = _flops_of(call.name, counted)
        groups.setdefault((type(call.module), weights, inputs, work[0], tuple(sorted(work[1].items()))), []).append(call)
    return list(groups.values())


def _flops_of(name: str, counted: Sequence[LayerFlops]) -> tuple[int, dict[str, int]]:
    """Model FLOPs of a module with all that is in it, in all and by format."""
    by_format: dict[str, int] = {}
    for flops in counted:
        if flops.name == name or flops.name.startswith(f"{name}."):
            for unit, count in flops.by_format.items():
                by_format[unit] = by_format.get(unit, 0) + count
    return sum(by_format.values()), by_format


def _measure(run: Any, calls: Sequence[_Call], counted: Sequence[LayerFlops], where: Machine, repeats: int) -> Measured:
    call = calls[0]
    alone = _Alone(call, lambda: run.precision.forward_context(where.device.type))
    forward, backward, host = (_timed_on_gpu if where.device.type == "cuda" else _timed)(alone, repeats)
    flops, by_format = _flops_of(call.name, counted)
    moved = alone.moved
    floor, bound = where.floor(by_format, moved)
    return Measured(
        layer=type(call.module).__name__,
        module=call.name,
        count=len(calls),
        part_of=Ensemble.__name__ if isinstance(call.module, INSIDE) else "",
        forward=forward,
        backward=backward,
        host=host,
        flops=flops,
        moved=moved,
        floor=floor,
        bound=bound,
    )


class _Alone:
    """A layer with its inputs, to be run again and again."""

    def __init__(self, call: _Call, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self._call, self._context = call, context
        outputs, given = self.forward(), _tensors((call.args, call.kwargs))
        wanted = [t for t in (*given, *call.module.parameters()) if t.requires_grad]
        self._grads = [torch.ones_like(out) for out in outputs]
        found = torch.autograd.grad(outputs, wanted, self._grads, allow_unused=True) if outputs else [None] * len(wanted)
        self._wanted = [tensor for tensor, grad in zip(wanted, found, strict=True) if grad is not None]
        """What the layer reads and has gradients: it may be handed more, such as the vectors of other layers' features."""
        fixed = [t for t in given if not t.requires_grad]
        self.moved = sum(t.nbytes for t in (*fixed, *outputs, *self._grads)) + 2 * sum(t.nbytes for t in self._wanted)

    def forward(self) -> list[Tensor]:
        """Its outputs that have a gradient."""
        with self._context():
            result = self._call.module(*self._call.args, **self._call.kwargs)
        return [t for t in _tensors(result) if t.requires_grad and t.grad_fn is not None]

    def backward(self, outputs: list[Tensor]) -> None:
        """Gradients of weights and inputs, if it has any; they are dropped."""
        if outputs:
            torch.autograd.grad(outputs, self._wanted, self._grads)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _cut_off(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _timed(alone: _Alone, repeats: int) -> tuple[float, float, float]:
    """Median seconds of forward, of backward, and of both on the host."""
    forward, backward = [], []
    for _ in range(repeats):
        begun = time.perf_counter()
        outputs = alone.forward()
        between = time.perf_counter()
        alone.backward(outputs)
        forward.append(between - begun)
        backward.append(time.perf_counter() - between)
    return median(forward), median(backward), median(f + b for f, b in zip(forward, backward, strict=True))


def _timed_on_gpu(alone: _Alone, repeats: int) -> tuple[float, float, float]:
    """As ``_timed``, by events; caches are flushed before each repetition. The GPU sleeps until the host has queued it, so it waits for no launch."""
    for _ in range(3):
        host = _timed(alone, 1)[2]  # compiles, tunes and allocates
        torch.cuda.synchronize()
    flushed = torch.empty(_FLUSHED, dtype=torch.uint8, device="cuda")
    marks, on_host = [], []
    for _ in range(repeats):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]  # type: ignore[no-untyped-call]
        flushed.zero_()
        torch.cuda._sleep(int(2 * host * _CYCLES_A_SECOND))  # type: ignore[no-untyped-call]
        begun = time.perf_counter()
        events[0].record()
        outputs = alone.forward()
        events[1].record()
        alone.backward(outputs)
        events[2].record()
        on_host.append(time.perf_counter() - begun)
        del outputs
        torch.cuda.synchronize()
        marks.append((events[0].elapsed_time(events[1]) / 1e3, events[1].elapsed_time(events[2]) / 1e3))
    return median(f for f, _ in marks), median(b for _, b in marks), median(on_host)
