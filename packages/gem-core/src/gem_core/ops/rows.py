"""Rows of embedding tables: summing gradients that meet in one row, and the update rules of ``gem_core.spec.SparseOptimizer``.

Engines in plain torch share these, so that they agree bit for bit where they sum in the same order.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from gem_core.spec import ADAM_BETAS, SparseOptimizer


def sum_rows(ids: Tensor, rows: Tensor, limit: int, source: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sum ``rows[i]``, or ``rows[source[i]]``, over equal ``ids[i]``, in the order of ``i``; ids are below ``limit``.

    A stable sort and a bag sum are several times faster on the CPU than ``index_add``, and have one order of summation on every device. The sort
    takes a pass for each byte of its keys, so they are narrowed where they fit.

    Returns:
        ``[unique]`` ids, ascending, and ``[unique, dim]`` sums.
    """
    ordered, order = torch.sort(ids.to(torch.int32) if limit <= 2**31 else ids, stable=True)
    unique, counts = torch.unique_consecutive(ordered, return_counts=True)
    if not unique.numel():
        return ids, rows.new_zeros(0, rows.shape[1])
    return unique.to(torch.int64), embedding_bag(order if source is None else source[order], rows.contiguous(), counts.cumsum(0) - counts, mode="sum")


@torch.no_grad()
def update_rows(
    optimizer: SparseOptimizer, weight: Tensor, slots: Mapping[str, Tensor], rows: Tensor, grad: Tensor, *, lr: float, updates: int
) -> None:
    """Apply one summed gradient a row, in place.

    Args:
        optimizer: the rule.
        weight: ``[table rows, dim]``.
        slots: the optimiser's state by the names of ``gem_core.spec.table_state``.
        rows: ``[n]`` distinct row numbers.
        grad: ``[n, dim]``.
        lr: learning rate.
        updates: number of this update, from 1, which corrects Adam's bias.
    """
    if optimizer.name == "sgd":
        change = grad * -lr
    elif optimizer.name == "rowwise_adagrad":
        state = slots["state"].index_select(0, rows) + grad.square().mean(1)
        slots["state"].index_copy_(0, rows, state)
        change = grad * (-lr / (state.sqrt() + optimizer.eps))[:, None]
    else:
        beta1, beta2 = ADAM_BETAS
        first = slots["exp_avg"].index_select(0, rows).lerp_(grad, 1 - beta1)
        second = slots["exp_avg_sq"].index_select(0, rows).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        slots["exp_avg"].index_copy_(0, rows, first)
        slots["exp_avg_sq"].index_copy_(0, rows, second)
        denominator = (second / (1 - beta2**updates)).sqrt_().add_(optimizer.eps)
        change = (first / denominator).mul_(-lr / (1 - beta1**updates))
    weight.index_add_(0, rows, change)  # its alpha argument would leave the fast path
