"""Evaluation over a whole split on all ranks."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gem_core.spec import DataSchema, Embeddings, Precision, Shard, Source
from gem_core.train.feed import Feed, Work
from gem_core.train.metrics import Predictions, TaskMetrics
from gem_core.train.step import forward, weights_changed
from gem_core.train.world import World

log = logging.getLogger("gem_core.train")


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Metrics by task and scored rows by task (``Predictions.compute``), both None on every rank but the first, and wall seconds."""

    tasks: dict[str, TaskMetrics] | None
    rows: dict[str, Tensor] | None
    seconds: float

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Plain values for JSON; empty on every rank but the first."""
        return {name: metrics.as_dict() for name, metrics in (self.tasks or {}).items()}


@torch.no_grad()
def evaluate(
    dense: nn.Module,
    embeddings: Embeddings,
    precision: Precision,
    source: Source,
    world: World,
    *,
    batch_size: int,
    split: str = "test",
    weights: Callable[[], AbstractContextManager[Any]] = nullcontext,
    prepare: Callable[[Work], Work] = lambda work: work,
) -> Evaluation:
    """Score every row of a split once and compute exact metrics over all of them. Collective.

    Args:
        batch_size: rows of a global batch.
        weights: a context that puts other dense weights in place (averaged ones).
        prepare: as in ``Feed``.

    Raises:
        RequestError: a label is wrong (see ``check_batch``).
    """
    begun, schema = time.perf_counter(), source.schema()
    collected = Predictions(schema.tasks)
    with weights(), _scoring(dense):
        weights_changed(precision)
        for batch in _batches(source, schema, world, split=split, batch_size=batch_size, prepare=prepare):
            moved = batch.to(world.device, non_blocking=True)
            with precision.forward_context(world.device.type):
                logits = forward(dense, embeddings, moved, schema.tasks)
            collected.add(logits, batch)
    weights_changed(precision)
    tasks, rows = collected.compute(world) or (None, None)
    _report_gaps(tasks, source.rows(split), split)
    return Evaluation(tasks=tasks, rows=rows, seconds=time.perf_counter() - begun)


def _batches(source: Source, schema: DataSchema, world: World, *, split: str, batch_size: int, prepare: Callable[[Work], Work]) -> Iterator[Any]:
    own = source.batches(split, batch_size=batch_size, shard=Shard(rank=world.rank, world=world.size))
    for work in Feed(own, world, schema, flops=lambda batch: 0, prepare=prepare):
        yield from work.batches


@contextmanager
def _scoring(dense: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while: dropout off."""
    was_training = dense.training
    dense.eval()
    try:
        yield
    finally:
        dense.train(was_training)


def _report_gaps(tasks: dict[str, TaskMetrics] | None, expected: int, split: str) -> None:
    for name, m in (tasks or {}).items():
        if m.bad_predictions:
            log.warning("%s: %d predictions of task %s are not finite; they are left out of its metrics", split, m.bad_predictions, name)
    scored = {m.rows + m.unobserved + m.zero_weight + m.bad_predictions for m in (tasks or {}).values()}
    if scored - {expected}:
        log.warning("%s: the source says it has %d rows and gave %d", split, expected, max(scored))
