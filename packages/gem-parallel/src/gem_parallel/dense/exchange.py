"""How the ranks of an expert group exchange rows, forward and backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import pad

from gem_core.spec import PluginError
from gem_parallel.comm.collectives import Collectives


class Rows:
    """How many rows each rank of a group has in this forward pass; ranks tell each other once."""

    def __init__(self, ranks: Collectives) -> None:
        self._ranks = ranks
        self._counts: list[int] | None = None

    def forget(self) -> None:
        """A new forward pass begins."""
        self._counts = None

    def counts(self, own: int) -> list[int]:
        """``[ranks]``, on the host: the exchange goes through host memory, so that no GPU waits for it.

        Raises:
            PluginError: this rank has another number of rows than it told the others.
        """
        if self._counts is None:
            self._counts = self._ranks.all_gather("experts: row counts", torch.tensor([own])).wait()[:, 0].tolist()
        told = self._counts[self._ranks.rank]
        if told != own:
            so = f"it is called with {own} rows, after another of the same forward pass with {told}"
            raise PluginError("an ensemble of experts", so, "Give all ensembles of a model the rows of its batch, and call the model as a whole.")
        return self._counts


class Exchange:
    """The exchange of one ensemble (``gem_core.model.experts.ExpertExchange``).

    Args:
        ranks: the expert group.
        rows: the counts, shared by the ensembles of a model.
        absent: the experts that other ranks hold.
    """

    def __init__(self, ranks: Collectives, rows: Rows, absent: Sequence[nn.Module]) -> None:
        self._ranks, self._rows, self._absent = ranks, rows, absent
        self._counts: list[int] = []

    def join(self, z: Tensor) -> Tensor:
        """``[rows, tokens, dim]`` of this rank to ``[rows of all ranks, tokens, dim]``."""
        self._counts = self._rows.counts(z.shape[0])
        joined: Tensor = _Join.apply(z, self._ranks, self._counts)  # type: ignore[no-untyped-call]
        return joined

    def give_back(self, mixed: Tensor, widths: Sequence[int] | None) -> Tensor:
        """The sum over ranks of this rank's rows, or all ranks' tokens side by side."""
        counts = self._counts
        own: Tensor
        if widths is None:
            own = _Sum.apply(mixed, self._ranks, counts)  # type: ignore[no-untyped-call]
        else:
            share = len(widths) // self._ranks.size
            tokens = [sum(widths[i * share : (i + 1) * share]) for i in range(self._ranks.size)]
            own = _SideBySide.apply(mixed, self._ranks, counts, tokens)  # type: ignore[no-untyped-call]
        if own.requires_grad:
            own.register_hook(self._touch)  # type: ignore[no-untyped-call]
        return own

    def _touch(self, own: Tensor) -> None:
        """Give the absent parameters a gradient without elements: the first rank's optimiser then counts their steps, and the first rank saves it.

        Its local part lies where this rank computes, as those of all gradients: norms and clipping take them together. Left to torch it would lie on
        the CPU.
        """
        for parameter in (parameter for expert in self._absent for parameter in expert.parameters()):
            if parameter.requires_grad and parameter.grad is None:
                nothing: Any = torch.zeros_like(parameter)
                nothing._local_tensor = own.new_empty(0, dtype=parameter.dtype)
                parameter.grad = nothing


class _Join(Function):
    """Rows of all ranks; backward sums what the ranks' experts say about this rank's rows, and undoes the division that ``_Sum`` began."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, ranks: Collectives, counts: list[int]) -> Tensor:
        ctx.ranks, ctx.counts = ranks, counts
        return _gather_rows(z, "experts: activations", ranks, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_rows(grad, "experts: input gradients", ctx.ranks, ctx.counts) * ctx.ranks.size, None, None


class _Sum(Function):
    """This rank's rows of the sum over ranks. Its gradient is divided by the number of ranks (see ``ExpertParallel``)."""

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, ranks: Collectives, counts: list[int]) -> Tensor:
        ctx.ranks, ctx.counts = ranks, counts
        return _reduce_rows(mixed, "experts: outputs", ranks, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather_rows(grad / ctx.ranks.size, "experts: output gradients", ctx.ranks, ctx.counts), None, None


class _SideBySide(Function):
    """All ranks' tokens for this rank's rows, in the order of the ranks: an all-to-all, as nothing is summed."""

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, ranks: Collectives, counts: list[int], tokens: list[int]) -> Tensor:
        ctx.ranks, ctx.counts, ctx.tokens = ranks, counts, tokens
        rows, dim = counts[ranks.rank], mixed.shape[2]
        send = [n * tokens[ranks.rank] * dim for n in counts]
        receive = [rows * n * dim for n in tokens]
        flat = ranks.all_to_all("experts: outputs", mixed.reshape(-1), send, receive)
        return torch.cat([part.view(rows, n, dim) for part, n in zip(torch.split(flat, receive), tokens, strict=True)], dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ranks, counts, tokens = ctx.ranks, ctx.counts, ctx.tokens
        dim, own = grad.shape[2], tokens[ranks.rank]
        send = [grad.shape[0] * n * dim for n in tokens]
        receive = [n * own * dim for n in counts]
        parts = torch.cat([part.reshape(-1) for part in torch.split(grad / ranks.size, tokens, dim=1)])
        flat = ranks.all_to_all("experts: output gradients", parts, send, receive)
        return flat.view(sum(counts), own, dim), None, None, None


def _gather_rows(own: Tensor, name: str, ranks: Collectives, counts: Sequence[int]) -> Tensor:
    """``[counts[rank], ...]`` to ``[sum(counts), ...]``; the ranks send as many rows as the longest of them has."""
    longest = max(counts)
    if longest == 0:
        return own
    parts = ranks.all_gather(name, _lengthen(own, longest)).wait()
    if min(counts) == longest:
        return parts.flatten(0, 1)
    return torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])


def _reduce_rows(whole: Tensor, name: str, ranks: Collectives, counts: Sequence[int]) -> Tensor:
    """``[sum(counts), ...]`` to the sum over ranks of this rank's ``[counts[rank], ...]``."""
    longest = max(counts)
    if longest == 0:
        return whole
    if min(counts) == longest:
        parts = whole.reshape(ranks.size, longest, *whole.shape[1:])
    else:
        parts = torch.stack([_lengthen(part, longest) for part in torch.split(whole, list(counts))])
    return ranks.reduce_scatter(name, parts)[: counts[ranks.rank]]


def _lengthen(rows: Tensor, longest: int) -> Tensor:
    """``[longest, ...]``, the new rows zero."""
    return pad(rows, (0, 0) * (rows.dim() - 1) + (0, longest - rows.shape[0])) if rows.shape[0] < longest else rows.contiguous()
