"""Hierarchical seed pooling: a few tokens from a long history (HSP and SumKronLinear of Kunlun, arXiv 2602.10016)."""

from typing import Any

import torch
from torch import Tensor, nn

from gem_core.model.layers import AddNorm, FirstTokens, NormLinear, PreNormLinear, compute_dtype, pair_width, together
from gem_core.model.options import SequenceOptions
from gem_core.model.sequence import Events, Lengths
from gem_core.ops.packed import unbind_packed
from gem_core.ops.pooled_attention import flops as pooled_attention_flops
from gem_core.ops.products import linear_flops, own_flops, slot_flops
from gem_core.ops.slot import KernelSlot


class SumKronLinear(nn.Module):
    """``Y = sum_i Z_i X W_i`` over ``rank`` terms: a map of tokens and channels at once, and further tokens as they are.

    It has ``rank (tokens_in tokens_out + dim out)`` weights where a dense map has ``tokens_in tokens_out dim out``.

    ``[rows, tokens, dim] -> [rows, tokens_out, out], [rows, tokens - tokens_in, dim]``.
    """

    def __init__(self, tokens_in: int, tokens_out: int, dim: int, out: int, rank: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(rank, tokens_out, tokens_in))
        self.channels = nn.Parameter(torch.empty(rank, dim, out))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        rank, _, tokens = self.tokens.shape
        nn.init.normal_(self.tokens, std=tokens**-0.5)
        nn.init.normal_(self.channels, std=(rank * self.channels.shape[1]) ** -0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rank, tokens, _ = self.tokens.shape
        # all terms of a token stand side by side, so that one product sums over them as they lie
        weight = self.tokens.transpose(0, 1).flatten(0, 1)
        mixed, rest = FirstTokens.apply(weight, x.to(compute_dtype(weight)))  # type: ignore[no-untyped-call]
        return torch.matmul(mixed.view(-1, tokens, rank * x.shape[-1]), self.channels.flatten(0, 1)), rest

    def flops(self, rows: int) -> int:
        rank, tokens_out, tokens_in = self.tokens.shape
        _, dim, out = self.channels.shape
        return own_flops(self, rows * rank * (dim * pair_width(tokens_in, tokens_out) + tokens_out * pair_width(dim, out)))


class Asked(torch.autograd.Function):
    """The seeds before each row's own queries: ``[seeds, ...], [rows, queries, ...] -> [rows, seeds + queries, ...]``.

    ``torch.cat`` of expanded seeds gives the same and takes several times as long on a GPU, where it moves repeated elements one by one.
    """

    @staticmethod
    def forward(ctx: Any, seeds: Tensor, mine: Tensor) -> Tensor:
        ctx.seeds = len(seeds)
        out = mine.new_empty((mine.shape[0], len(seeds) + mine.shape[1], *mine.shape[2:]))
        # as in ``compact``, here to a part of a tensor
        words = mine.dtype if mine.shape[-1] * mine.element_size() % 8 else torch.int64
        out.view(words)[:, : len(seeds)] = seeds.clone(memory_format=torch.contiguous_format).view(words)
        out[:, len(seeds) :] = mine
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad[:, : ctx.seeds].sum(0), grad[:, ctx.seeds :]


class SeedPooling(nn.Module):
    """``H``: learned seeds and per-row queries attend to a group's events.

    The seeds are shared by all rows, ``[seeds, heads, head_dim]``; what they find is folded to ``pooled_tokens`` tokens. A query (made from X_sum, or
    the candidate itself) keeps a token of its own: what it found is added to it, so ``H`` says how the candidate relates to the history. Rows without
    events find zeros.

    ``[events, group dim], [rows, queries, dim] -> [rows, tokens, dim], [events, group dim]``, the second the events with nothing pending.
    """

    def __init__(self, queries: int, dim: int, options: SequenceOptions) -> None:
        super().__init__()
        self.heads, self.head_dim, self.seed_count, self.queries = options.heads, options.dim // options.heads, options.seeds, queries
        self.key_value = PreNormLinear(options.dim, 2 * options.dim, norm=options.norm, bias=options.bias)
        folded = options.pooled_tokens or options.seeds
        self.tokens = (folded if options.seeds else 0) + queries
        self.seeds: nn.Parameter | None = None
        self.fold: SumKronLinear | nn.Linear | None = None
        if options.seeds:
            self.seeds = nn.Parameter(torch.empty(options.seeds, self.heads, self.head_dim))
            plain = options.pooled_tokens is None
            self.fold = nn.Linear(options.dim, dim) if plain else SumKronLinear(options.seeds, folded, options.dim, dim, options.kron_rank)
            self.norm = AddNorm(dim)
        if queries:
            self.query = NormLinear(dim, options.dim, norm=options.norm)
            self.found = NormLinear(options.dim, dim, where="after", residual=True, norm=options.norm)
        self.slot = KernelSlot("pooled_attention", head_dim=self.head_dim, features=("per_row_seeds",) if queries else ())
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.seeds is not None:
            nn.init.normal_(self.seeds)

    def forward(self, events: Events, queries: Tensor) -> tuple[Tensor, Tensor]:
        made, stream = self.key_value(events.values, events.pending)
        key, value = unbind_packed(made.unflatten(-1, (2, self.heads, self.head_dim)))
        asked: Tensor | None = self.seeds
        if self.queries:
            mine = self.query(queries).unflatten(-1, (self.heads, self.head_dim))
            asked = mine if self.seeds is None else Asked.apply(self.seeds.to(mine.dtype), mine)  # type: ignore[no-untyped-call]
        q, k, v = together(asked, key, value)  # type: ignore[arg-type]
        found = self.slot(q, k, v, events.offsets, max_k=events.max_length).flatten(2)
        # no calls of layers inside those of `append`: where a layer cuts a compiled block, the bound method would be compiled for at each call
        if isinstance(self.fold, SumKronLinear):
            folded, mine = self.fold(found)
        else:
            seeds, mine = found.split([self.seed_count, self.queries], dim=1)
            folded = None if self.fold is None else self.fold(seeds)
        parts = [] if folded is None else [self.norm(folded)]
        if self.queries:
            parts += [self.found(mine, queries)]
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0], stream

    def flops(self, lengths: Lengths) -> int:
        rows = len(lengths)
        seeds = self.seed_count + self.queries
        count = self.key_value.flops(int(lengths.sum()))
        count += slot_flops(self.slot, pooled_attention_flops, seeds=seeds, k_lengths=lengths, heads=self.heads, dim=self.head_dim)
        if isinstance(self.fold, SumKronLinear):
            count += self.fold.flops(rows)
        elif self.fold is not None:
            count += linear_flops(self.fold, rows * self.seed_count)
        if self.queries:
            count += self.query.flops(rows * self.queries) + self.found.flops(rows * self.queries)
        return count
