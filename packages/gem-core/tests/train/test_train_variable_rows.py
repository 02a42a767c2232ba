"""Batches of different numbers of rows on each rank, as balancing by cost makes them: the gradient is that of one batch of all rows."""

import torch
from gem_train_fakes import FakeSource, Probe, ProbeOptions
from torch import Tensor

from gem_core.train.labels import weight_sums
from gem_core.train.step import batch_loss

SHARES = [1, 20, 0, 9]
"""Rows of four ranks in one step."""


def gradient(source: FakeSource, rows: Tensor, denominators: Tensor) -> Tensor:
    """The gradient of one rank's part of the loss by all weights."""
    torch.manual_seed(0)
    model = Probe(source.schema(), ProbeOptions()).double()
    table = torch.randn(20, 4, dtype=torch.float64, requires_grad=True)
    batch = source.batch(rows)
    batch.dense["x"] = batch.dense["x"].double()
    logits = model(batch, {"item": table[batch.ids.ids("item")]})
    loss, _ = batch_loss(logits, batch, source.schema().tasks, denominators)
    found = torch.autograd.grad(loss, [*model.parameters(), table])
    return torch.cat([part.flatten() for part in found])


def test_ranks_with_different_numbers_of_rows_add_up_to_the_gradient_of_all_rows(source: FakeSource) -> None:
    tasks, rows = source.schema().tasks, torch.arange(sum(SHARES))
    everything = weight_sums(source.batch(rows), tasks)
    whole = gradient(source, rows, everything)
    parts = [gradient(source, share, everything) for share in rows.split(SHARES)]
    torch.testing.assert_close(torch.stack(parts).sum(0), whole)
    # Planted fault: each rank divides by its own rows, and ranks are averaged.
    biased = [gradient(source, share, weight_sums(source.batch(share), tasks)) for share in rows.split(SHARES)]
    assert not torch.allclose(torch.stack(biased).mean(0), whole, rtol=1e-2)


def test_the_mean_over_dealings_is_the_gradient_of_the_epoch(source: FakeSource) -> None:
    """Rows dealt to two steps of different size: the row-weighted mean of the steps' gradients is the gradient of all rows."""
    tasks, rows = source.schema().tasks[:1], torch.arange(30)
    whole = gradient_of_ctr(source, rows)
    steps = [(weight_sums(source.batch(part), tasks), gradient_of_ctr(source, part)) for part in rows.split([7, 23])]
    total = sum(float(weight) for weight, _ in steps)
    torch.testing.assert_close(sum(float(weight) / total * step for weight, step in steps), whole)


def gradient_of_ctr(source: FakeSource, rows: Tensor) -> Tensor:
    weights = weight_sums(source.batch(rows), source.schema().tasks)
    return gradient(source, rows, torch.stack([weights[0], weights[1] * torch.inf]))
