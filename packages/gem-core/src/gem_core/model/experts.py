"""Interaction experts over all tokens of a row, and their ensemble (DHEN arXiv 2203.11014 of Wukong arXiv 2403.02545 experts).

Every expert maps ``[rows, tokens_in, dim] -> [rows, tokens_out, dim]`` and counts its FLOPs for a number of rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gem_core.model.layers import AddNorm, Mlp, TokenMix, compute_dtype, lay_out, pair_width, together, total, weight_gradient
from gem_core.model.options import CrossOptions, DeepOptions, LinearOptions, WukongOptions
from gem_core.ops.products import linear_flops, own_flops
from gem_core.ops.slot import KernelSlot
from gem_core.select.policy import named_backend
from gem_core.spec.errors import RequestError


class Expert(nn.Module):
    """Base of the experts: their sizes."""

    def __init__(self, tokens_in: int, tokens_out: int, dim: int) -> None:
        super().__init__()
        self.tokens_in, self.tokens_out, self.dim = tokens_in, tokens_out, dim

    def flops(self, rows: int) -> int:
        """Forward model FLOPs of ``rows`` rows."""
        raise NotImplementedError


class PairsAndMix(torch.autograd.Function):
    """``x (C x)^T`` and ``L x`` of each row, where the weight is C above L: ``[rank + linear, tokens], [rows, tokens, dim], rank ->
    [rows, tokens, rank], [rows, linear, dim]``.

    Both maps of tokens are one product, and so are all three summands of the gradient of x: x is the largest tensor of an expert, and each further
    product or sum would read it, or write its gradient, once more. See ``TokenProduct`` on what lies along rows.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        laid = lay_out(weight, x.dtype)
        mixed = torch.bmm(laid.expand(x.shape[0], -1, -1), x)
        ctx.save_for_backward(laid, x, mixed)
        ctx.rank, ctx.dtype = rank, weight.dtype
        # contiguous, here and in backward, as torch joins parts of other tensors number by number on a GPU
        return torch.bmm(x, mixed[:, :rank].transpose(1, 2)), mixed[:, rank:].contiguous()

    @staticmethod
    def backward(ctx: Any, of_pairs: Tensor, of_linear: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        laid, x, mixed = ctx.saved_tensors
        parts = [torch.bmm(of_pairs.transpose(1, 2), x), of_linear.contiguous(), mixed[:, : ctx.rank].contiguous()]
        # the gradient of mixed, and what the pairs multiply it by beside it: one product makes the gradient of x
        right = torch.cat(parts, dim=1)
        of_mixed = right[:, : laid.shape[0]]
        for_weight, for_x, _ = ctx.needs_input_grad
        of_x = None
        if for_x:
            of_x = torch.bmm(torch.cat([laid.t().expand(x.shape[0], -1, -1), of_pairs], dim=2), right)
        return weight_gradient(of_mixed, x, ctx.dtype) if for_weight else None, of_x, None


class WukongExpert(Expert):
    """``concat(FMB(X), LCB(X))``: ``FMB = MLP(LN(flatten(X (X^T Y))))`` with Y learned, ``LCB = W X``."""

    def __init__(self, tokens_in: int, tokens_out: int, dim: int, options: WukongOptions) -> None:
        super().__init__(tokens_in, tokens_out, dim)
        linear = tokens_out // 2 if options.linear_tokens is None else options.linear_tokens
        self.machine_tokens = tokens_out - linear
        if self.machine_tokens < 1:
            raise RequestError(
                f"wukong expert with linear_tokens = {linear}",
                f"it has {tokens_out} tokens in all",
                "Leave at least one to the factorisation machine.",
            )
        self.rank = tokens_in if options.rank is None else options.rank
        self.compress = None if options.rank is None else nn.Parameter(torch.empty(tokens_in, options.rank))
        self.norm = nn.LayerNorm(tokens_in * self.rank)
        self.mlp = Mlp(tokens_in * self.rank, options.hidden, self.machine_tokens * dim, options.dropout)
        self.linear = TokenMix(tokens_in, linear) if linear else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.compress is not None:
            nn.init.normal_(self.compress, std=self.tokens_in**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.compress is None:
            x = x.to(compute_dtype(x))
            pairs, linear = torch.matmul(x, x.transpose(1, 2)), x[:, :0] if self.linear is None else self.linear(x)
        else:
            weight = self.compress if self.linear is None else torch.cat([self.compress, self.linear.weight.t()], dim=1)
            pairs, linear = PairsAndMix.apply(weight.t(), x.to(compute_dtype(weight)), self.rank)  # type: ignore[no-untyped-call]
        machine: Tensor = self.mlp(self.norm(pairs.flatten(1))).view(-1, self.machine_tokens, self.dim)
        return torch.cat([machine, linear], dim=1)

    def flops(self, rows: int) -> int:
        pairs = (1 if self.compress is None else 2) * self.dim * pair_width(self.tokens_in, self.rank)
        linear = 0 if self.linear is None else self.linear.flops(rows, self.dim)
        return own_flops(self, rows * pairs) + self.mlp.flops(rows) + linear


class GatedResidual(KernelSlot):
    """The slot of ``gated_residual``, which a compiled block computes itself unless its backend is named.

    The op is element by element: a compiler fuses it with its neighbours, and sums its gradients as it makes them, where it would write what a kernel
    that it does not look into reads, and read what that one writes. With the kernel, forward and backward of an ensemble of ``gem-h200-512`` took
    3.0 ms on an H200, and without it 2.5; 5.2 and 4.8 at width 1,024.
    """

    def __init__(self) -> None:
        super().__init__("gated_residual")
        self.fuses = False

    def bind(self, kernel: Callable[..., Any], backend: str = "bound") -> None:
        super().bind(kernel, backend)
        self.fuses = self.asked is None and named_backend(self.op)[0] is None

    def __call__(self, x: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and self.fuses:
            return gate * x + residual  # in the dtype of x, which a compiler computes in float32 and rounds once
        out: Tensor = super().__call__(x, gate, residual)
        return out


class CrossExpert(Expert):
    """Low-rank DCN v2 (arXiv 2008.13535) on the flattened tokens, ``x_{l+1} = x_0 * (U V x_l + b) + x_l``, then a map of tokens."""

    def __init__(self, tokens_in: int, tokens_out: int, dim: int, options: CrossOptions) -> None:
        super().__init__(tokens_in, tokens_out, dim)
        width = tokens_in * dim
        self.down = nn.ModuleList(nn.Linear(width, options.rank, bias=False) for _ in range(options.depth))
        self.up = nn.ModuleList(nn.Linear(options.rank, width) for _ in range(options.depth))
        self.mix = TokenMix(tokens_in, tokens_out)
        self.dropout = nn.Dropout(options.dropout)
        self.cross = GatedResidual()

    def forward(self, x: Tensor) -> Tensor:
        first = crossed = x.flatten(1)
        for down, up in zip(self.down, self.up):
            crossed = self.cross(*together(up(down(crossed)), first, crossed))
        return self.dropout(self.mix(crossed.view(-1, self.tokens_in, self.dim)))  # type: ignore[no-any-return]

    def flops(self, rows: int) -> int:
        matrices: Sequence[Any] = [*self.down, *self.up]
        return total(linear_flops(m, rows) for m in matrices) + self.mix.flops(rows, self.dim)


class DeepExpert(Expert):
    """A multi-layer perceptron on the flattened tokens."""

    def __init__(self, tokens_in: int, tokens_out: int, dim: int, options: DeepOptions) -> None:
        super().__init__(tokens_in, tokens_out, dim)
        self.mlp = Mlp(tokens_in * dim, options.hidden, tokens_out * dim, options.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x.flatten(1)).view(-1, self.tokens_out, self.dim)  # type: ignore[no-any-return]

    def flops(self, rows: int) -> int:
        return self.mlp.flops(rows)


class LinearExpert(Expert):
    """A map of tokens."""

    def __init__(self, tokens_in: int, tokens_out: int, dim: int, options: LinearOptions) -> None:
        super().__init__(tokens_in, tokens_out, dim)
        self.mix = TokenMix(tokens_in, tokens_out)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.mix(x))  # type: ignore[no-any-return]

    def flops(self, rows: int) -> int:
        return self.mix.flops(rows, self.dim)


EXPERTS: dict[type, type[Any]] = {
    WukongOptions: WukongExpert,
    CrossOptions: CrossExpert,
    DeepOptions: DeepExpert,
    LinearOptions: LinearExpert,
}


class ExpertExchange(Protocol):
    """How ranks that share out the experts of an ensemble exchange rows. Its tensors carry gradients."""

    def join(self, z: Tensor) -> Tensor:
        """``[rows, tokens, dim]`` of this rank to the rows of all ranks, in rank order."""
        ...

    def give_back(self, mixed: Tensor, widths: Sequence[int] | None) -> Tensor:
        """What the held experts made of all rows to this rank's rows of what all experts made.

        Args:
            mixed: ``[rows of all ranks, tokens, dim]``.
            widths: None adds the ranks' tokens up; else they stand side by side, and this says how many each expert of the ensemble gives.
        """
        ...


class Ensemble(nn.Module):
    """``X' = N(experts(Z) + R(X))`` with ``Z`` all tokens of the layer, ``X`` those that the last layer made.

    Args:
        tokens_in: tokens of ``Z``.
        carried: tokens of ``X``; R is the identity if ``tokens_out`` equals it, else a learned map of tokens.
        tokens_out: tokens of the result.
        dim: width of a token.
        experts: options of each expert.
        join: ``sum`` adds the experts' outputs, ``concat`` gives each its share of the output tokens.
        partition: each expert sees its share of ``Z``, dealt out in turn, instead of the whole.
        dropout: on the experts' joint output.
    """

    def __init__(
        self, tokens_in: int, carried: int, tokens_out: int, dim: int, experts: Sequence[Any], *, join: str, partition: bool, dropout: float
    ) -> None:
        super().__init__()
        count = len(experts)
        if partition and tokens_in < count:
            raise RequestError(
                f"{count} experts on a partition", f"the layer has {tokens_in} tokens", "Ask for fewer experts, or set partition = false."
            )
        if join == "concat" and tokens_out < count:
            raise RequestError(f"{count} experts side by side", f"the layer gives {tokens_out} tokens", "Ask for fewer experts or more tokens.")
        self.join, self.partition, self.count = join, partition, count
        sees = [len(range(i, tokens_in, count)) if partition else tokens_in for i in range(count)]
        gives = [len(range(i, tokens_out, count)) if join == "concat" else tokens_out for i in range(count)]
        self.experts = nn.ModuleList(EXPERTS[type(o)](sees[i], gives[i], dim, o) for i, o in enumerate(experts))
        self.shortcut = None if carried == tokens_out else TokenMix(carried, tokens_out)
        self.norm = AddNorm(dim, residual=True)
        self.dropout = nn.Dropout(dropout)
        self.dim, self.gives = dim, gives
        self.held = range(count)
        self.exchange: ExpertExchange | None = None

    def share_out(self, held: range, exchange: ExpertExchange) -> None:
        """Compute only the experts ``held`` here, on the rows of all ranks that share it out. Called by a strategy of expert parallelism."""
        self.held, self.exchange = held, exchange

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        seen = z if self.exchange is None else self.exchange.join(z)
        outputs = [self.experts[i](seen[:, i :: self.count] if self.partition else seen) for i in self.held]
        joined = torch.cat(outputs, dim=1) if self.join == "concat" else sum(outputs[1:], start=outputs[0])
        if self.exchange is not None:
            joined = self.exchange.give_back(joined, self.gives if self.join == "concat" else None)
        return self.norm(self.dropout(joined), x if self.shortcut is None else self.shortcut(x))  # type: ignore[no-any-return]

    def flops(self, rows: int) -> int:
        experts: Sequence[Any] = list(self.experts)
        return total(expert.flops(rows) for expert in experts) + (0 if self.shortcut is None else self.shortcut.flops(rows, self.dim))
