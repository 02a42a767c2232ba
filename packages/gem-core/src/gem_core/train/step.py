"""One optimiser step: loss, backward, clipping, updates."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from gem_core.batch import Batch
from gem_core.spec import ChangingPrecision, DelaysReduction, Embeddings, HoldsWeights, PluginError, Precision, Task
from gem_core.train.ahead import Ahead
from gem_core.train.diagnose import non_finite
from gem_core.train.feed import Work
from gem_core.train.graphs import GraphedLoss
from gem_core.train.labels import observed, row_weights
from gem_core.train.ledger.clock import BACKWARD, COPY, FORWARD, OPTIMISER, TABLES
from gem_core.train.metrics import StreamMetrics, stream_sums
from gem_core.train.optim import AveragedWeights, LateNorm, clip_gradients, skips_spoilt
from gem_core.train.told import Told
from gem_core.train.world import World


@dataclass(kw_only=True)
class Learner:
    """Everything that one step changes or needs.

    Args:
        model: the dense model itself; its parameters are clipped and averaged.
        dense: what is called in its place (the model, or a strategy's wrapping of it).
        embeddings: the tables.
        precision: the context of forward and loss.
        optimizer: of the dense parameters.
        dense_lr: learning rate of the dense parameters before the schedule.
        sparse_lr: learning rate of the tables before the schedule.
        clip_norm: largest global norm of the dense gradients; 0 leaves them.
        average: averaged weights, or None.
        stream: training metrics.
        delaying: strategies that are told which micro-batch of a step is the last.
    """

    world: World
    tasks: Sequence[Task]
    model: nn.Module
    dense: nn.Module
    embeddings: Embeddings
    precision: Precision
    optimizer: torch.optim.Optimizer
    dense_lr: float
    sparse_lr: float
    clip_norm: float
    average: AveragedWeights | None
    stream: StreamMetrics
    delaying: Sequence[DelaysReduction] = ()
    graphs: GraphedLoss | None = None
    """Computes forward, loss and backward by CUDA graphs, where ``compile.graphs`` asks for it."""
    unread: Callable[[], float] | None = None
    """Gives the last step's norm of gradients, which nobody has looked at; see ``settle``."""
    ahead: Ahead = field(init=False)
    changing: ChangingPrecision | None = field(init=False)

    def __post_init__(self) -> None:
        self.ahead = Ahead(self.embeddings, self.world.device)
        self.changing = self.precision if isinstance(self.precision, ChangingPrecision) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """This rank's part of the global loss (the parts add up), and what gives the norm of the dense gradients before clipping.

    ``pairs`` ``[2, tasks, 4]`` are this rank's ``StreamMetrics`` sums of a paired step, computed high and as it was trained; None for another step.
    """

    loss: float
    norm: Callable[[], float] = field(compare=False)
    pairs: Tensor | None = None

    @property
    def grad_norm(self) -> float:
        """Waits for the step's backward pass. RunFailed if it is not finite."""
        return self.norm()


def train_step(
    learner: Learner, work: Work, *, step: int, lr_factor: float, following: Callable[[], Work | None] | None = None, paired: bool = False
) -> StepResult:
    """Take one optimiser step on the rows of all ranks.

    The gradient is that of ``batch_loss`` over all rows of all ranks and micro-batches: a rank scales its part by the number of ranks because the
    ranks' gradients are averaged.

    Between forward and backward, while a GPU is still busy with the former, the host prepares the batch that comes next, and looks at the gradients
    of the step before, if it has not. It looks at the loss before anything changes: where the tables change in ``step`` alone after backward, once
    for all micro-batches; in a single process when backward comes to the tables, so that the GPU has work meanwhile; else before backward.

    Args:
        following: gives the next step, whose first batch is then prepared; None when nothing should be read or sent before this step is over.
        paired: score each batch high as well, for the precision recipe.

    Raises:
        RunFailed: the loss or a gradient is not finite; raised before the optimisers move, those of tables that change in backward included.
            Of gradients on a GPU it may be the next call or ``settle`` that raises; no dense weight has changed by then.
    """
    world, phase = learner.world, learner.world.clock.phase
    for group in learner.optimizer.param_groups:
        group["lr"] = learner.dense_lr * lr_factor
    learner.embeddings.set_lr(learner.sparse_lr * lr_factor)
    learner.optimizer.zero_grad()
    learner.embeddings.zero_grad()
    look_late = getattr(learner.embeddings, "updates_in_step", False)
    told: list[Told] = []
    pairs: list[Tensor] = []
    for number, host_batch in enumerate(work.batches):
        with _micro_batch(learner, number, len(work.batches)):
            with phase(COPY):
                ready = learner.ahead.take(host_batch)
            with phase(FORWARD), learner.precision.forward_context(world.device.type):
                embedded = learner.embeddings(ready.batch.ids if ready.ids is None else ready.ids)
            high = _high_sums(learner, ready.batch, embedded, work.weights) if paired else None
            with phase(FORWARD):
                loss, sums = _loss(learner, ready.batch, embedded, work.weights)
            if high is not None:
                pairs.append(torch.stack([high, sums]))
            told.append(Told(loss))
            with phase(COPY):
                _prepare_next(learner.ahead, work.batches[number + 1 :], following)
            settle(learner)
            with phase(BACKWARD), ExitStack() if look_late else _looking(learner, embedded, told[number], work.batches[number], step):
                (loss * world.size).backward()  # type: ignore[no-untyped-call]
            learner.stream.add(sums)
    if look_late:
        _refuse_non_finite(learner, told, work.batches, step)
    with phase(OPTIMISER):
        norm = _clip(learner)
        learner.optimizer.step()
        weights_changed(learner.precision)
    with phase(TABLES):
        learner.embeddings.step()
    if learner.average is not None:
        with phase(OPTIMISER):
            learner.average.update()
    return StepResult(loss=sum(float(loss.value()) for loss in told), norm=norm, pairs=torch.stack(pairs).sum(0).cpu() if pairs else None)


def _loss(learner: Learner, batch: Batch, embedded: Mapping[str, Tensor], weights: Tensor) -> tuple[Tensor, Tensor]:
    """``batch_loss`` of a batch that is scored now."""
    scales = loss_scales(learner.tasks, weights)
    if learner.graphs is not None:
        return learner.graphs(batch, embedded, scales)
    with learner.precision.forward_context(learner.world.device.type):
        return scored_loss(learner.dense, learner.tasks, batch, embedded, scales)


def settle(learner: Learner) -> None:
    """Look at the last step's gradients, if that has not been done. To be called before weights are evaluated or saved.

    Raises:
        RunFailed: they were not finite; that step has changed no dense weight.
    """
    unread, learner.unread = learner.unread, None
    if unread is not None:
        unread()


def _clip(learner: Learner) -> Callable[[], float]:
    """Clip the dense gradients, and return what gives their norm."""
    if skips_spoilt(learner.optimizer):
        learner.unread = LateNorm(learner.model, learner.clip_norm, learner.optimizer).value
        return learner.unread
    norm = clip_gradients(learner.model, learner.clip_norm)
    return lambda: norm


class _NotFinite(Exception):
    """Ends a backward pass before it comes to the tables."""


@contextmanager
def _looking(learner: Learner, embedded: Mapping[str, Tensor], told: Told, batch: Batch, step: int) -> Iterator[None]:
    """A context of backward in which the loss is looked at before the tables change. Collective.

    One process looks when the first gradient of a looked-up vector arrives: the GPU then has backward to do while the host waits for the loss.
    Several look at once, as their backward passes hold collectives of their own.
    """
    vectors = [tensor for tensor in embedded.values() if tensor.requires_grad]
    if learner.world.size > 1 or not vectors:
        _refuse_non_finite(learner, [told], [batch], step)
        yield
        return

    def look(gradient: Tensor) -> None:
        if not math.isfinite(told.value()):
            raise _NotFinite

    handle = torch.autograd.graph.register_multi_grad_hook(vectors, look, mode="any")
    try:
        with suppress(_NotFinite):
            yield
    finally:
        handle.remove()
    _refuse_non_finite(learner, [told], [batch], step)


def _micro_batch(learner: Learner, number: int, count: int) -> ExitStack:
    """The context of forward and backward of a micro-batch: strategies may put reductions off until the last of several."""
    stack = ExitStack()
    if count > 1:
        for strategy in learner.delaying:
            stack.enter_context(strategy.micro_batch(last=number + 1 == count))
    return stack


@torch.no_grad()
def _high_sums(learner: Learner, batch: Batch, embedded: Mapping[str, Tensor], weights: Tensor) -> Tensor:
    """``[tasks, 4]`` sums of a batch whose forward pass computes high. Random state and buffers are put back: the run does not notice.

    A context of its own: what autocast keeps of a pass without gradients must not reach the step's own pass.
    """
    world, changing = learner.world, learner.changing
    assert changing is not None
    kept = [(buffer, buffer.clone()) for buffer in learner.model.buffers()]
    random_state = torch.random.fork_rng([world.device] if world.device.type == "cuda" else [])
    with world.clock.phase(FORWARD), random_state, changing.high(), learner.precision.forward_context(world.device.type):
        sums = batch_loss(score(learner.dense, batch, embedded, learner.tasks), batch, learner.tasks, weights)[1]
    for buffer, before in kept:
        buffer.copy_(before)
    return sums


def weights_changed(precision: Precision) -> None:
    """Tell a recipe that holds things made of the dense weights that these have other values now."""
    if isinstance(precision, HoldsWeights):
        precision.weights_changed()


def _prepare_next(ahead: Ahead, left: Sequence[Batch], following: Callable[[], Work | None] | None) -> None:
    if not left and following is not None and (work := following()) is not None:
        left = work.batches
    if left:
        ahead.prepare(left[0])


def _refuse_non_finite(learner: Learner, told: Sequence[Told], batches: Sequence[Batch], step: int) -> None:
    """Raise RunFailed unless these micro-batches' losses are finite on all ranks. Collective."""
    world = learner.world
    finite = world.all_gather(torch.tensor([math.isfinite(loss.value()) for loss in told])).all(0)
    if not bool(finite.all()):  # every rank takes part in the search: a forward may hold collectives
        batch = batches[int(finite.logical_not().nonzero()[0])].to(world.device)
        raise non_finite(world, learner.model, learner.dense, learner.embeddings, learner.precision, batch, step=step)


def forward(dense: nn.Module, embeddings: Embeddings, batch: Batch, tasks: Sequence[Task]) -> dict[str, Tensor]:
    """``score`` of a batch whose ids are looked up first."""
    return score(dense, batch, embeddings(batch.ids), tasks)


def score(dense: nn.Module, batch: Batch, embedded: Mapping[str, Tensor], tasks: Sequence[Task]) -> dict[str, Tensor]:
    """``{task: logits [rows]}`` of a batch and its looked-up vectors, float32 at least.

    Raises:
        PluginError: the model leaves a task out or answers in another shape.
    """
    answer: Mapping[str, Any] = dense(batch, embedded)
    logits = {}
    for task in tasks:
        got = answer.get(task.name)
        if got is None or got.shape != (batch.rows,):
            so = "they are missing" if got is None else f"their shape is {list(got.shape)} for {batch.rows} rows"
            raise PluginError(f"the model's logits of task {task.name!r}", so, "A model returns {task: logits [rows]} for every task of the schema.")
        logits[task.name] = got if got.dtype == torch.float64 else got.float()
    return logits


def batch_loss(logits: Mapping[str, Tensor], batch: Batch, tasks: Sequence[Task], weights: Tensor) -> tuple[Tensor, Tensor]:
    """This batch's part of the loss.

    ``loss = sum over tasks of task.weight * sum(w * mask * log_loss) / weights[task]``; a task whose weights sum to 0 adds 0.

    Args:
        logits: ``{task: [rows]}``.
        weights: ``[tasks]`` on the CPU, the sums of ``w * mask`` over all rows of the step on all ranks.

    Returns:
        The loss (0-d, with gradient), and ``[tasks, 4]`` sums for ``StreamMetrics``.
    """
    return _scaled_loss(logits, batch, tasks, loss_scales(tasks, weights))


def loss_scales(tasks: Sequence[Task], weights: Tensor) -> list[float]:
    """The factor of each task's sum of weighted losses: ``task.weight / weights[task]``, 0 for a task whose weights sum to 0."""
    return [task.weight / denominator if denominator > 0 else 0.0 for task, denominator in zip(tasks, weights.tolist(), strict=True)]


def scored_loss(
    dense: nn.Module, tasks: Sequence[Task], batch: Batch, embedded: Mapping[str, Tensor], scales: Sequence[float] | Tensor
) -> tuple[Tensor, Tensor]:
    """What ``batch_loss`` gives for the ``score`` of a batch, by factors ``[tasks]`` of the tasks, which may lie on the device."""
    return _scaled_loss(score(dense, batch, embedded, tasks), batch, tasks, scales)


def _scaled_loss(logits: Mapping[str, Tensor], batch: Batch, tasks: Sequence[Task], scales: Sequence[float] | Tensor) -> tuple[Tensor, Tensor]:
    masks = observed(batch, tasks)
    parts, sums = [], []
    for task, scale in zip(tasks, scales, strict=True):
        x, mask = logits[task.name], masks[task.name]
        weight = torch.where(mask, row_weights(batch, task.name), 0.0).to(x.dtype)
        label = torch.where(mask, batch.labels[task.name], 0.0).to(x.dtype)  # a label means nothing where it is masked out
        parts.append(scale * (weight * binary_cross_entropy_with_logits(x, label, reduction="none")).sum())
        sums.append(stream_sums(x, label, weight))
    return torch.stack(parts).sum(), torch.stack(sums)
