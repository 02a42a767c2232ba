"""An HSTU ranker (arXiv 2402.17152): context, events and the candidate as one sequence, attention with SiLU in the place of softmax."""

from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor, nn

from gem_core.batch import Batch
from gem_core.model.features import FeatureTokens, target_tokens
from gem_core.model.heads import Heads
from gem_core.model.jagged import regular_offsets, row_of
from gem_core.model.layers import AddNorm, DenseModel, LearnedToken, PreNormLinear, pick, together, total
from gem_core.model.options import BaseModelOptions, Rate, SequenceOptions, Width
from gem_core.model.sequence import Events, EventTokens, Lengths, LogEmbedding
from gem_core.model.tables import make_tables
from gem_core.ops.hstu_attention import flops as hstu_flops
from gem_core.ops.packed import unbind_packed
from gem_core.ops.products import linear_flops, slot_flops
from gem_core.ops.slot import KernelSlot
from gem_core.spec.data import DataSchema
from gem_core.spec.embedding import TableSpec
from gem_core.spec.errors import RequestError

BIAS_BUCKETS = 32


class HstuOptions(BaseModelOptions):
    """Options of ``hstu``."""

    dim: Width = 64
    heads: Width = 2
    layers: Width = 2
    window: Width | None = None
    """Events back that one event sees; None: all earlier ones. A prefix is always seen."""
    context: Literal["prefix", "causal"] = "prefix"
    """Context tokens see the whole history and are seen by all, or are the first tokens of plain causal attention, which faster kernels offer."""
    order: Literal["time", "group"] = "group"
    """Several groups become one history by event time, or one group after the other."""
    bias: Literal["none", "position", "time"] = "position"
    """Relative bias of the scores by log bucket of the distance, with ``time`` also of the time between."""
    concat_inputs: bool = True
    """The output layer reads the gate and the layer's input beside the gated result."""
    dropout: Rate = 0.0

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}")
        return self


class RelativeBias(nn.Module):
    """Additive bias ``[rows or 1, heads, length, length]`` by log bucket of the distance, and of the seconds between if times are given."""

    def __init__(self, heads: int, timed: bool) -> None:
        super().__init__()
        self.distance = LogEmbedding(BIAS_BUCKETS, 16.0, heads)
        self.between = LogEmbedding(BIAS_BUCKETS, 32.0, heads) if timed else None

    def forward(self, length: int, ages: Tensor | None, device: torch.device) -> Tensor:
        """Args:
        length: longest row.
        ages: ``[rows, length]`` int64 seconds, padded; None without times.
        device: where to make it.
        """
        place = torch.arange(length, device=device)
        bias: Tensor = self.distance((place[:, None] - place).abs()).permute(2, 0, 1)[None]
        if self.between is not None and ages is not None:
            bias = bias + self.between((ages[:, :, None] - ages[:, None, :]).abs()).permute(0, 3, 1, 2)
        return bias


class HstuLayer(nn.Module):
    """``[U, V, Q, K] = SiLU(LN(x) W)``; ``A = SiLU(scale Q K^T + bias) / N`` on its mask; ``Y = W_o [U || x || LN(A V) * U] + x``.

    N is a constant, the longest sequence of the schema, so a row's result does not depend on its batch. The summands of Y stay apart: the layer gives
    x and what is ``pending``, and the next one adds them in its norm. ``[tokens, dim], [tokens, dim] -> [tokens, dim], [tokens, dim]``.

    Args:
        options: of the model.
        longest: N.
        prefix: tokens at the begin of each row that see its whole history. Without any the mask is causal: one target at the end of a row sees
            what an event there would, and is seen by nobody.
    """

    def __init__(self, options: HstuOptions, longest: int, prefix: int) -> None:
        super().__init__()
        dim = options.dim
        self.prefix = prefix
        self.heads, self.head_dim, self.window, self.longest = options.heads, dim // options.heads, options.window, longest
        self.inputs = PreNormLinear(dim, 4 * dim, norm="layer")
        self.norm = AddNorm(dim, gate=True, concat=options.concat_inputs)
        self.concat = options.concat_inputs
        self.out = nn.Linear(3 * dim if self.concat else dim, dim)
        self.dropout = nn.Dropout(options.dropout)
        used = {"contextual": prefix, "targets": prefix, "window": options.window is not None, "bias": options.bias != "none"}
        words = ("causal", *(word for word, on in used.items() if on))
        self.slot = KernelSlot("hstu_attention", head_dim=self.head_dim, features=words)

    def forward(self, x: Tensor, pending: Tensor | None, offsets: Tensor, max_length: int, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        made, x = self.inputs(x, pending)
        gate, value, query, key = unbind_packed(nn.functional.silu(made).view(-1, 4, self.heads, self.head_dim), flat=1)
        q, k, v = together(query, key, value)
        parts = {"contextual": torch.full_like(offsets[1:], self.prefix), "targets": torch.ones_like(offsets[1:])} if self.prefix else {}
        found = self.slot(
            q,
            k,
            v,
            offsets,
            max_length=max_length,
            causal=True,
            window=self.window,
            bias=None if bias is None else bias.to(q.dtype),
            norm_length=self.longest,
            **parts,
        )
        return x, self.out(self.dropout(self.norm(found.flatten(1), gate=gate, concat=x if self.concat else None)))

    def flops(self, lengths: Lengths) -> int:
        tokens, mask = int(lengths.sum()), {"window": self.window, "contextual": self.prefix, "targets": 1}
        attention = slot_flops(self.slot, hstu_flops, lengths=lengths, heads=self.heads, dim=self.head_dim, **mask)
        return self.inputs.flops(tokens) + attention + linear_flops(self.out, tokens)


class HstuModel(DenseModel):
    """Context tokens, events and one target token a row through HSTU layers; heads on the target.

    The features that share a table with events are the candidate: together they are the target. All other non-sequence features are the context, by
    default a prefix that sees the whole history and that every token sees. Without a candidate the target is a learned token.

    ``model(batch, embedded) -> {task: logits [rows]}``.
    """

    @classmethod
    def tables(cls, schema: DataSchema, options: HstuOptions) -> list[TableSpec]:
        """The embedding tables for this schema."""
        return make_tables(schema, options)

    def __init__(self, schema: DataSchema, options: HstuOptions) -> None:
        super().__init__()
        check_times(schema, options)
        self.schema, self.options = schema, options
        dim, groups = options.dim, schema.sequences
        self.features = FeatureTokens(schema, self.tables(schema, options), options.features, dim)
        event = SequenceOptions(dim=dim, heads=options.heads, rope="off")
        self.events = nn.ModuleList(EventTokens(group, options.features.embedding_dim, event) for group in groups)
        self.candidate = sorted({i for group in groups for i in target_tokens(schema, group, self.features.names)})
        self.context = [i for i in range(self.features.count) if i not in self.candidate]
        self.target = nn.Linear(len(self.candidate) * dim, dim) if self.candidate else LearnedToken(dim)
        self.longest = len(self.context) + sum(group.max_length for group in groups) + 1
        self.bias = None if options.bias == "none" else RelativeBias(options.heads, options.bias == "time")
        prefix = len(self.context) if options.context == "prefix" else 0
        self.layers = nn.ModuleList(HstuLayer(options, self.longest, prefix) for _ in range(options.layers))
        self.heads = Heads(schema, dim, options.head)
        self.concat, self.pad = KernelSlot("jagged_concat"), KernelSlot("jagged_pad")

    def forward(self, batch: Batch, embedded: dict[str, Tensor]) -> dict[str, Tensor]:
        tokens = self.features(batch, embedded, self.features.described(batch))
        x, offsets, ages = self._sequence(batch, embedded, tokens)
        length = len(self.context) + sum(batch.event_offsets[group.name].max_length for group in self.schema.sequences) + 1
        bias = None
        if self.bias is not None:
            padded = None if ages is None else self.pad(ages, offsets, max_length=length)
            bias = self.bias(length, padded, x.device)
        pending: Tensor | None = None
        for layer in self.layers:
            x, pending = layer(x, pending, offsets, length, bias)
        assert pending is not None  # there is a layer
        last = offsets[1:] - 1
        first = self.features.first_order(batch, embedded, len(self.schema.tasks)) if self.options.wide and self.schema.ids else None
        return self.heads(x[last] + pending[last], batch, first)  # type: ignore[no-any-return]

    def _sequence(self, batch: Batch, embedded: dict[str, Tensor], tokens: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Context, events and target of each row: values ``[tokens, dim]``, offsets, and if the bias wants them ages ``[tokens]`` int64."""
        rows, device = batch.rows, tokens.device
        target = self.target(pick(tokens, self.candidate).flatten(1)) if self.candidate else self.target(rows)[:, 0]
        first, last = regular_offsets(rows, len(self.context), device), regular_offsets(rows, 1, device)
        context = pick(tokens, self.context).flatten(0, 1)
        events = [group(batch, embedded) for group in self.events]
        history, between, age = self._history(events) if events else (context[:0], first * 0, None)
        context, history, target = together(context, history, target)  # one float32 part would widen what passes from layer to layer
        values, offsets = self.concat([(context, first), (history, between), (target, last)])
        if age is None or self.options.bias != "time":
            return values, offsets, None
        ages, _ = self.concat([(age.new_zeros(context.shape[0]), first), (age, between), (age.new_zeros(rows), last)])
        return values, offsets, ages

    def _history(self, groups: list[Events]) -> tuple[Tensor, Tensor, Tensor | None]:
        """All groups as one history: values ``[events, dim]``, offsets, and ages ``[events]`` int64 if an option reads them."""
        values, offsets = self._joined([(group.values, group.offsets) for group in groups])
        if "time" not in (self.options.order, self.options.bias):
            return values, offsets, None
        age, _ = self._joined([(group.age, group.offsets) for group in groups])
        if self.options.order == "time":
            order = torch.argsort(age, stable=True, descending=True)
            order = order[torch.argsort(row_of(offsets, values.shape[0])[order], stable=True)]
            values, age = values[order], age[order]
        return values, offsets, age

    def _joined(self, parts: list[tuple[Any, Tensor]]) -> tuple[Tensor, Tensor]:
        """The rows of all parts, one after the other; of a single part without a copy."""
        joined: tuple[Tensor, Tensor] = parts[0] if len(parts) == 1 else self.concat(parts)
        return joined

    def flops(self, batch: Batch) -> int:
        """Exact forward model FLOPs of one CPU batch: matmuls on valid elements, 2 m n k."""
        groups: list[Any] = list(self.events)
        layers: list[Any] = list(self.layers)
        lengths = [batch.event_offsets[group.name].offsets.diff().numpy() for group in self.schema.sequences]
        whole = np.add.reduce([np.full(batch.rows, len(self.context) + 1), *lengths])
        join = linear_flops(self.target, batch.rows) if isinstance(self.target, nn.Linear) else 0
        count = self.features.flops(batch.rows) + join + self.heads.flops(batch.rows)
        count += total(group.flops(int(n.sum())) for group, n in zip(groups, lengths))
        return count + total(layer.flops(whole) for layer in layers)


def check_times(schema: DataSchema, options: HstuOptions) -> None:
    """Options that read event times need groups, and times in every one of them."""
    timed = bool(schema.sequences) and all(group.time for group in schema.sequences)
    for name, value in (("order", options.order), ("bias", options.bias)):
        if value == "time" and not timed:
            have = {group.name: group.time for group in schema.sequences}
            raise RequestError(f"model.options.{name} = 'time'", f"the groups carry event times as follows: {have}", f"Choose another {name}.")
