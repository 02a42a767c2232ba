"""From non-sequence tokens to the weights that personalise sequences (InterFormer arXiv 2411.09852, Kunlun arXiv 2602.10016)."""

from typing import Any

import torch
from torch import Tensor, nn

from gem_core.model.layers import ALIGNED, AddNorm, Mlp, TokenMix, compact, compute_dtype, pair_width
from gem_core.ops.products import own_flops


class WeightGen(nn.Module):
    """Summary tokens: ``X_sum = N(C X + MLP(C X))`` with C a map of tokens: ``[rows, tokens, dim] -> [rows, summary, dim]``."""

    def __init__(self, tokens: int, summary: int, dim: int) -> None:
        super().__init__()
        self.compress = TokenMix(tokens, summary)
        self.mlp = Mlp(dim, (2 * dim,), dim)
        self.norm = AddNorm(dim, residual=True)
        self.summary, self.dim = summary, dim

    def forward(self, x: Tensor) -> Tensor:
        z = self.compress(x)
        out: Tensor = self.norm(z, self.mlp(z))
        return out

    def flops(self, rows: int) -> int:
        return self.compress.flops(rows, self.dim) + self.mlp.flops(rows * self.summary)


class TwoProducts(torch.autograd.Function):
    """``[x || place] [W || shared]^T`` for two matrices, of one dtype; the place of a source is a one in a column of its own.

    ``[rows, sources, dim], [2, out, dim], [2, out, columns] -> two of [rows, sources, out]``

    In backward the second product adds to the gradient of x, which has no columns of places, and the gradients of both matrices are written side by
    side: sums, parts and joins are passes of their own, and many.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        rows, count, _ = x.shape
        # contiguous parts: torch joins others element by element on a GPU
        place = torch.eye(count, shared.shape[2], dtype=x.dtype, device=x.device).expand(rows, -1, -1).contiguous()
        joined, matrices = torch.cat([x, place], dim=-1), torch.cat([weight, shared], dim=-1)
        ctx.save_for_backward(joined, matrices)
        ctx.dim = x.shape[2]
        return nn.functional.linear(joined, matrices[0]), nn.functional.linear(joined, matrices[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        joined, matrices = ctx.saved_tensors
        flat = [grad.flatten(0, 1) for grad in grads]
        of_x = of_weight = of_shared = None
        if ctx.needs_input_grad[0]:
            of_x = torch.mm(flat[0], matrices[0, :, : ctx.dim])
            torch.addmm(of_x, flat[1], matrices[1, :, : ctx.dim], out=of_x)
            of_x = of_x.view(*joined.shape[:2], ctx.dim)
        if any(ctx.needs_input_grad[1:]):
            made = torch.empty_like(matrices)
            for grad, part in zip(flat, made):
                torch.mm(grad.t(), joined.flatten(0, 1), out=part)
            of_weight, of_shared = compact(made[..., : ctx.dim]), made[..., ctx.dim :]
        return of_x, of_weight, of_shared


class KeyValues(nn.Module):
    """Keys ``K = W1(sources)`` and values ``V = W2(sources)`` of one sequence group, generated for each row.

    Every source token gives ``per_token`` pairs, so a row has ``sources * per_token`` of them: the hidden units of its own feed-forward network. A
    learned part that all rows share is added, so the network is an ordinary one plus what the row changes. The matmul adds it, as further columns of
    its matrix that the place of a source picks: pairs are the largest tensors of a row, and an addition would read and write them once more.

    ``[rows, sources, dim] -> two of [rows, keys, heads, head_dim]``.
    """

    def __init__(self, sources: int, per_token: int, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.shape = (sources, per_token, heads, head_dim)
        self.weight = nn.Parameter(torch.empty(2, per_token * heads * head_dim, dim))
        self.shared = nn.Parameter(torch.empty(2, sources * per_token, heads, head_dim))
        self.reset_parameters()

    @property
    def keys(self) -> int:
        """Pairs of one row."""
        return self.shape[0] * self.shape[1]

    @property
    def added(self) -> int:
        """Columns of a matrix that add the shared part: as many as keep its rows multiples of 16 bytes."""
        return -(-self.shape[0] // ALIGNED) * ALIGNED

    def reset_parameters(self) -> None:
        width = self.weight.shape[2] ** -0.5
        for i, scale in enumerate((1.0, self.keys**-0.5)):
            nn.init.normal_(self.weight[i], std=width * scale)
            nn.init.normal_(self.shared[i], std=scale)

    def forward(self, sources: Tensor) -> tuple[Tensor, Tensor]:
        count, _, heads, head_dim = self.shape
        dtype = compute_dtype(sources)
        weight, shared = self.weight.to(dtype), _columns(self.shared.to(dtype), count, self.added)
        key, value = TwoProducts.apply(sources.to(dtype), weight, shared)  # type: ignore[no-untyped-call]
        return key.view(-1, self.keys, heads, head_dim), value.view(-1, self.keys, heads, head_dim)

    def flops(self, rows: int) -> int:
        """Those of the generated part; the columns that add the shared one are no work of the model."""
        _, width, dim = self.weight.shape
        return own_flops(self, rows * self.shape[0] * 2 * pair_width(width, dim))


def _columns(shared: Tensor, sources: int, width: int) -> Tensor:
    """A column a source, of what it adds to its pairs, then zeros: ``[2, pairs, heads, head_dim] -> [2, own pairs * heads * head_dim, width]``."""
    return nn.functional.pad(shared.view(2, sources, -1), (0, 0, 0, width - sources)).transpose(1, 2).contiguous()
