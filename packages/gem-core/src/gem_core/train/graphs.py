"""Forward, loss and backward of the dense part as CUDA graphs: the host then asks for two launches a step instead of thousands.

A graph computes on fixed addresses and sizes (``static_inputs``). The first ``SURVEYED`` batches are computed as ever, and tell how many events
batches have; then ``compile.graphs`` capacities are chosen and recorded. A batch takes the smallest one that it fits, and one that fits none is
computed as ever, which ``told`` counts; where memory cannot hold that beside the graphs, they go, and are recorded anew at the next batch. Look-ups,
updates, clipping and the optimiser stay outside.

Two graphs for each capacity, forward and backward, share one pool of memory with those of the others: at any time one step uses it.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gem_core.batch import Batch
from gem_core.config.schema import RunConfig
from gem_core.spec import ChangingPrecision, HoldsWeights, Precision, Recordable, RequestError, Task
from gem_core.train.capacities import Survey
from gem_core.train.static_inputs import Extents, StaticInputs
from gem_core.train.world import World

SURVEYED = 32
"""Batches whose sizes are looked at before capacities are chosen."""
T = TypeVar("T")
LossOf = Callable[[Batch, Mapping[str, Tensor], Any], tuple[Tensor, Tensor]]
"""``(batch, embedded, scales [tasks]) -> loss, sums [tasks, 4]``."""


def check_recordable(world: World, precision: Precision, config: RunConfig, model: nn.Module) -> None:
    """Raise RequestError unless a run like this can be recorded. That rows of a batch do not read each other is for the model to keep: statistics of
    a batch are refused, as the dummy rows would be in them.
    """
    asked = f"compile.graphs = {config.compile.graphs}"
    others = sorted(set(config.parallel.strategies) - {"single"})
    if world.device.type != "cuda":
        raise RequestError(asked, f"the run computes on {world.device.type}", "CUDA graphs need a GPU: leave it at 0.")
    if world.size > 1 or others:
        so = f"there are {world.size} processes, with strategies {others}"
        raise RequestError(asked, so, "What strategies exchange is not recorded: leave it at 0.")
    if why := not_recordable(precision):
        raise RequestError(
            asked, f"recipe {config.precision.recipe!r}: {why}", "A graph repeats what it has recorded: leave it at 0, or take bf16_islands."
        )
    if config.compile.blocks == "reduce-overhead":
        raise RequestError(asked, "compile.blocks = reduce-overhead records graphs of its own", "Choose one of the two.")
    if mixing := [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]:
        so = f"{', '.join(mixing[:3])} of the model take statistics over the rows of a batch, which is padded"
        raise RequestError(asked, so, "Leave it at 0, or norm each row by itself.")
    if os.environ.get("GEM_CHECK") == "full":
        raise RequestError(asked, "GEM_CHECK=full waits for the GPU in every call, which cannot be recorded", "Unset it, or leave graphs at 0.")


def not_recordable(precision: Precision) -> str | None:
    """Why a recipe may not compute the next step as it computed this one; None if it will."""
    if isinstance(precision, Recordable):
        return precision.not_recordable()
    return "it changes with the step, or rounds weights between steps" if isinstance(precision, ChangingPrecision | HoldsWeights) else None


class Recorder(Protocol):
    """Records functions without arguments that give tensors."""

    def __call__(self, function: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """What the function gives, and a call that computes these tensors anew, in their place."""
        ...


class CudaRecorder:
    """Records CUDA graphs that share a pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = function()
        return outputs, graph.replay


class Recorded:
    """The two graphs of one capacity.

    Args:
        inputs: what they compute on.
        embedded: looked-up vectors of any batch, whose widths and dtypes count.
        loss_of: what is recorded.
        parameters: those whose gradients are computed.
        context: of the forward pass.
    """

    def __init__(
        self,
        inputs: StaticInputs,
        embedded: Mapping[str, Tensor],
        loss_of: LossOf,
        parameters: Sequence[nn.Parameter],
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.inputs, self._loss_of, self._context = inputs, loss_of, context
        self.vectors = {key: tensor.requires_grad_() for key, tensor in inputs.room_for(embedded).items()}
        self._wanted = [*self.vectors.values(), *parameters]
        self._loss: Tensor | None = None
        """Holds the forward pass until backward has used it."""

    def warm_up(self) -> None:
        """Compute once, so that everything is compiled and loaded that a recording could not wait for."""
        self._forward()
        self._backward()

    def record(self, recorder: Recorder) -> None:
        """Record both passes. Nothing is computed."""
        self._told, self._replay_forward = recorder(self._forward)
        self._gradients, self._replay_backward = recorder(self._backward)

    def forward(self, batch: Batch, embedded: Sequence[Tensor], scales: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Loss and sums of a batch that fits; they last until the next call of any capacity."""
        self.inputs.fill(batch, scales)
        with torch.no_grad():
            for room, vectors in zip(self.vectors.values(), embedded, strict=True):
                room[: vectors.shape[0]].copy_(vectors)
        self._replay_forward()
        loss, sums = self._told
        return loss.detach(), sums.detach()

    def backward(self) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
        """Gradients of the vectors, dummy rows included, and of the parameters, likewise lasting."""
        self._replay_backward()
        count = len(self.vectors)
        return self._gradients[:count], self._gradients[count:]

    def _forward(self) -> tuple[Tensor, Tensor]:
        with self._context():
            self._loss, sums = self._loss_of(self.inputs.batch, self.vectors, self.inputs.scales)
        return self._loss.detach(), sums.detach()

    def _backward(self) -> tuple[Tensor | None, ...]:
        assert self._loss is not None
        loss, self._loss = self._loss, None
        found = torch.autograd.grad(loss, self._wanted, allow_unused=True)
        return tuple(None if grad is None else _laid_out(grad, of) for grad, of in zip(found, self._wanted, strict=True))


def _laid_out(grad: Tensor, of: Tensor) -> Tensor:
    """A gradient with the strides of what it is of, as autograd leaves one in ``grad``: fused optimisers want no others."""
    return grad if grad.stride() == of.stride() else torch.empty_like(of).copy_(grad)


class _Replay(torch.autograd.Function):
    """A recorded forward and backward pass as one operation on looked-up vectors. Gradients of parameters are left in ``grad``."""

    @staticmethod
    def forward(
        ctx: Any, owner: "GraphedLoss", recorded: Recorded, batch: Batch, scales: Sequence[float], *embedded: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.owner, ctx.recorded, ctx.sizes = owner, recorded, [vectors.shape[0] for vectors in embedded]
        loss, sums = recorded.forward(batch, embedded, scales)
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        vectors, weights = ctx.recorded.backward()
        ctx.owner.leave(weights)
        return (None, None, None, None, *(None if grad is None else grad[:size] for grad, size in zip(vectors, ctx.sizes, strict=True)))


class GraphedLoss:
    """``loss, sums`` of a batch, by graphs once there are some. Backward of the loss must be asked for as it is, not of a multiple.

    Args:
        loss_of: computes them; called inside ``context``.
        context: of the forward pass.
        parameters: of the dense part.
        extents: of the data set.
        tasks: of the data set.
        rows: of a batch; one with fewer is computed as ever.
        count: capacities at most.
        accumulates: whether several batches make a step: their gradients are then added up outside of the graphs.
        recorder: what records; CUDA graphs if None.
    """

    def __init__(
        self,
        *,
        loss_of: LossOf,
        context: Callable[[], AbstractContextManager[Any]],
        parameters: Sequence[nn.Parameter],
        extents: Extents,
        tasks: Sequence[Task],
        rows: int,
        count: int,
        accumulates: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        self._loss_of, self._context, self._parameters = loss_of, context, [p for p in parameters if p.requires_grad]
        self._extents, self._tasks, self._rows, self._count, self._accumulates = extents, tasks, rows, count, accumulates
        self._recorder = recorder
        self._survey = Survey(extents)
        self._graphs: list[Recorded] = []
        self._needs = 0
        """Bytes that a batch computed as ever takes."""
        self._told: Counter[str] = Counter(graphs=0, replayed=0, other=0, recorded=0)

    @property
    def recorded(self) -> bool:
        """Whether batches are surveyed no longer."""
        return bool(self._graphs)

    def told(self) -> dict[str, int]:
        """Capacities that are recorded, batches computed by graphs, those computed as ever, and how often capacities were recorded."""
        return dict(self._told)

    def __call__(self, batch: Batch, embedded: Mapping[str, Tensor], scales: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Args:
        batch: on the device.
        embedded: its looked-up vectors.
        scales: ``[tasks]`` factors of the tasks' sums of losses.
        """
        sizes = self._extents.sizes(batch)
        if not self.recorded and len(self._survey) >= SURVEYED and batch.rows == self._rows:
            self._record(batch, embedded)
        recorded = next((each for each in self._graphs if each.inputs.fits(sizes)), None)
        self._told["other" if recorded is None else "replayed"] += 1
        if recorded is None:
            if batch.rows == self._rows:
                self._survey.add(batch, sizes)
            if self.recorded and free_bytes() < self._needs:
                self._graphs = []
            return self._as_ever(batch, embedded, scales, sizes)
        loss, sums = _Replay.apply(self, recorded, batch, scales, *embedded.values())  # type: ignore[no-untyped-call]
        return loss, sums

    def leave(self, gradients: Sequence[Tensor | None]) -> None:
        """Give the parameters these gradients, which the next replay overwrites, or add them to those of earlier batches of the step."""
        for parameter, grad in zip(self._parameters, gradients, strict=True):
            if grad is None:
                continue
            if parameter.grad is None:
                parameter.grad = grad.clone() if self._accumulates else grad
            else:
                parameter.grad.add_(grad)

    def _as_ever(self, batch: Batch, embedded: Mapping[str, Tensor], scales: Sequence[float], sizes: Mapping[str, int]) -> tuple[Tensor, Tensor]:
        """With dummy rows if it has as many rows as others: what is compiled for a number of rows is then compiled once."""
        with self._context():
            if batch.rows != self._rows:
                return self._loss_of(batch, embedded, scales)
            inputs = StaticInputs(self._extents, self._tasks, self._rows, sizes, batch)
            inputs.fill(batch, scales)
            return self._loss_of(inputs.batch, inputs.padded(embedded), inputs.scales)

    def _record(self, batch: Batch, embedded: Mapping[str, Tensor]) -> None:
        """Record all capacities. All are warmed up before the first is recorded: the memory of the one is then free for the other."""
        self._needs = max(self._needs, used_bytes())
        inputs = [StaticInputs(self._extents, self._tasks, self._rows, size, batch) for size in self._survey.capacities(self._count)]
        found = [Recorded(each, embedded, self._loss_of, self._parameters, self._context) for each in inputs]
        for recorded in found:
            recorded.warm_up()
        recorder = self._recorder or CudaRecorder()
        for recorded in reversed(found):  # the largest first: the pool then has room for the others
            recorded.record(recorder)
        self._graphs = found
        self._told["graphs"] = len(found)
        self._told["recorded"] += 1


def used_bytes() -> int:
    """The most that was allocated on the GPU beyond what is now."""
    return torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def free_bytes() -> int:
    """What can be allocated on the GPU beside the memory of graphs."""
    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0
