"""One optimiser step: loss, backward, clipping, updates."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from gem_core.batch import Batch
from gem_core.spec import Embeddings, PluginError, Precision, Task
from gem_core.train.diagnose import non_finite
from gem_core.train.feed import Work
from gem_core.train.labels import observed, row_weights
from gem_core.train.metrics import StreamMetrics, stream_sums
from gem_core.train.optim import AveragedWeights, clip_gradients
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


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """This rank's part of the global loss (the parts add up), and the norm of the dense gradients before clipping."""

    loss: float
    grad_norm: float


def train_step(learner: Learner, work: Work, *, step: int, lr_factor: float) -> StepResult:
    """Take one optimiser step on the rows of all ranks.

    The gradient is that of ``batch_loss`` over all rows of all ranks and micro-batches: a rank scales its part by the number of ranks because the
    ranks' gradients are averaged.

    Raises:
        RunFailed: the loss or a gradient is not finite; raised before the optimisers move, and for the loss before backward.
    """
    world, device = learner.world, learner.world.device
    for group in learner.optimizer.param_groups:
        group["lr"] = learner.dense_lr * lr_factor
    learner.embeddings.set_lr(learner.sparse_lr * lr_factor)
    learner.optimizer.zero_grad()
    learner.embeddings.zero_grad()
    total = 0.0
    for host_batch in work.batches:
        batch = host_batch.to(device, non_blocking=True)
        with learner.precision.forward_context(device.type):
            logits = forward(learner.dense, learner.embeddings, batch, learner.tasks)
            loss, sums = batch_loss(logits, batch, learner.tasks, work.weights)
        value = float(loss.detach())
        finite = world.all_gather(torch.tensor([math.isfinite(value)]))
        if not bool(finite.all()):  # every rank takes part in the search: a forward may hold collectives
            raise non_finite(world, learner.model, learner.dense, learner.embeddings, learner.precision, batch, step=step)
        (loss * world.size).backward()  # type: ignore[no-untyped-call]
        learner.stream.add(sums)
        total += value
    norm = clip_gradients(learner.model, learner.clip_norm)
    learner.optimizer.step()
    learner.embeddings.step()
    if learner.average is not None:
        learner.average.update()
    return StepResult(loss=total, grad_norm=norm)


def forward(dense: nn.Module, embeddings: Embeddings, batch: Batch, tasks: Sequence[Task]) -> dict[str, Tensor]:
    """``{task: logits [rows]}``, float32 at least.

    Raises:
        PluginError: the model leaves a task out or answers in another shape.
    """
    answer: Mapping[str, Any] = dense(batch, embeddings(batch.ids))
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
    masks = observed(batch, tasks)
    parts, sums = [], []
    for task, denominator in zip(tasks, weights.tolist(), strict=True):
        x, mask = logits[task.name], masks[task.name]
        weight = torch.where(mask, row_weights(batch, task.name), 0.0).to(x.dtype)
        label = torch.where(mask, batch.labels[task.name], 0.0).to(x.dtype)  # a label means nothing where it is masked out
        scale = task.weight / denominator if denominator > 0 else 0.0
        parts.append(scale * (weight * binary_cross_entropy_with_logits(x, label, reduction="none")).sum())
        sums.append(stream_sums(x, label, weight))
    return torch.stack(parts).sum(), torch.stack(sums)
