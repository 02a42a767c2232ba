"""Which rows count for which task: masks, conditions and weights, the same for the loss and for the metrics."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gem_core.batch import Batch
from gem_core.spec import RequestError, Task


def check_tasks(tasks: Sequence[Task]) -> None:
    """Raise RequestError unless names are unique, conditions exist without a circle, and weights are finite and not negative."""
    names = [task.name for task in tasks]
    by_name = {task.name: task for task in tasks}
    if not names or len(by_name) < len(names):
        raise RequestError("the tasks of the data source", f"their names are {names}", "Declare at least one task, each with its own name.")
    for task in tasks:
        if not 0 <= task.weight < float("inf"):
            raise RequestError(f"task {task.name!r}", f"its weight is {task.weight}", "Weights are finite and not negative.")
        seen, here = {task.name}, task
        while here.condition is not None:
            if here.condition not in by_name or here.condition in seen:
                raise RequestError(f"task {here.name!r}", f"its condition {here.condition!r} is no earlier task of {names}", "Name another task.")
            seen.add(here.condition)
            here = by_name[here.condition]


def observed(batch: Batch, tasks: Sequence[Task]) -> dict[str, Tensor]:
    """Where each task's label counts: its own mask, and under a condition also where that task is observed and positive.

    Returns:
        ``{task: [rows] bool}`` on the batch's device.
    """
    by_name = {task.name: task for task in tasks}

    def own(name: str) -> Tensor:
        if name in batch.masks:
            return batch.masks[name]
        return torch.ones(batch.rows, dtype=torch.bool, device=batch.labels[name].device)

    def whole(task: Task) -> Tensor:
        if task.condition is None:
            return own(task.name)
        return own(task.name) & whole(by_name[task.condition]) & (batch.labels[task.condition] == 1)

    return {task.name: whole(task) for task in tasks}


def row_weights(batch: Batch, task: str) -> Tensor:
    """``[rows]`` float32 weights of a task: ones where the batch carries none."""
    weight = batch.weights.get(task)
    return torch.ones_like(batch.labels[task]) if weight is None else weight


def weight_sums(batch: Batch, tasks: Sequence[Task]) -> Tensor:
    """The loss denominators of one batch, ``[tasks]`` float64: the sum of weights over the rows that count."""
    masks = observed(batch, tasks)
    return torch.stack([(row_weights(batch, t.name).double() * masks[t.name]).sum() for t in tasks])


def check_batch(batch: Batch, tasks: Sequence[Task]) -> None:
    """Raise RequestError unless a CPU batch has every task's labels, one a row, each observed one 0 or 1."""
    for task in tasks:
        label = batch.labels.get(task.name)
        if label is None or label.shape != (batch.rows,):
            so = "it is missing" if label is None else f"its shape is {list(label.shape)} in a batch of {batch.rows} rows"
            raise RequestError(f"label {task.name!r}", so, "A source gives one label a row for every task of its schema.")
    batch.check_labels()
