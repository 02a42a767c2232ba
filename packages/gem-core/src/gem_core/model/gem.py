"""The GEM model: interaction layers that read summaries of event sequences, which are in turn personalised by the interactions.

One layer (docs/model.md has the figure and the sources): X_sum = WeightGen(X); for each event type PFFN(S; X_sum), attention on S, H = pooling of S;
X = N(experts([X_sum || H || X]) + shortcut(X)).
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from gem_core.batch import Batch
from gem_core.model.crossing import WeightGen
from gem_core.model.experts import Ensemble
from gem_core.model.features import FeatureTokens, target_tokens
from gem_core.model.heads import Heads
from gem_core.model.layers import DenseModel, TokenMix, compute_dtype, pick, total
from gem_core.model.options import BaseModelOptions, ExpertOptions, MergedSequences, Rate, SequenceOptions, Width, WukongOptions
from gem_core.model.pooling import SeedPooling
from gem_core.model.sequence import Events, EventTokens, Lengths, PersonalFfn, SelfAttention
from gem_core.model.tables import make_tables
from gem_core.spec.data import DataSchema
from gem_core.spec.embedding import TableSpec
from gem_core.spec.errors import RequestError

CompSkip = Literal["off", "pool_first", "attention_first"]


class GemOptions(BaseModelOptions, MergedSequences):
    """Options of ``gem``."""

    dim: Width = 64
    """Width of a non-sequence token."""
    layers: Width = 2
    tokens: Width = 16
    """Tokens that every layer gives."""
    x_sum: Width = 4
    """Summary tokens, from which the weights of the sequences are generated."""
    targets: bool = True
    """Features that share a table with a group's events (the candidate) are sources of its generated weights and pooling queries of their own."""
    experts: tuple[ExpertOptions, ...] = Field(default=(WukongOptions(),), min_length=1)
    ensemble: Literal["sum", "concat"] = "sum"
    """``sum`` adds the experts' outputs; ``concat`` gives each its share of the tokens."""
    partition: bool = False
    """Each expert sees a part of the tokens instead of all."""
    links: bool = False
    """A layer also sees what the layers below it pooled."""
    comp_skip: CompSkip = "off"
    """Layers take turns: one personalises and pools, the next attends and reuses the pooling (Kunlun); which comes first."""
    dropout: Rate = 0.0

    @model_validator(mode="after")
    def _layers_fit(self) -> Self:
        for where, options in self.named():
            if options.layers is not None and options.layers > self.layers:
                raise ValueError(f"{where}: layers {options.layers} is more than the model's {self.layers}")
        return self


class Step(NamedTuple):
    """What one layer does with one group."""

    pffn: bool
    attention: bool
    pool: bool


IDLE = Step(pffn=False, attention=False, pool=False)


def plan(layers: int, options: SequenceOptions, comp_skip: CompSkip) -> list[Step]:
    """The steps of one group, layer by layer.

    The first layer always pools, as there is nothing to reuse. Work after the last pooling would reach no output and is left out.
    """
    steps = []
    for layer in range(options.layers or layers):
        turn = comp_skip == "off" or (layer % 2 == 0) == (comp_skip == "pool_first")
        attends = comp_skip == "off" or not turn
        steps.append(Step(pffn=turn and options.pffn != "off", attention=attends and options.attention != "off", pool=turn or layer == 0))
    while not steps[-1].pool:
        steps.pop()
    return steps + [IDLE] * (layers - len(steps))


class GroupStep(nn.Module):
    """One layer's work on one group: ``S, sources, targets -> S, H``; H is None where it does not pool. Sources are X_sum, then the targets."""

    def __init__(self, step: Step, targets: int, longest: int, options: SequenceOptions, model: GemOptions) -> None:
        super().__init__()
        self.pffn = PersonalFfn(model.x_sum + targets, model.dim, options) if step.pffn else None
        self.attention = SelfAttention(options, longest) if step.attention else None
        self.pool = SeedPooling(options.queries + targets, model.dim, options) if step.pool else None
        self.ask = TokenMix(model.x_sum, options.queries) if step.pool and options.queries else None
        self.dim = model.dim

    def forward(self, events: Events, sources: Tensor, targets: Tensor) -> tuple[Events, Tensor | None]:
        if self.pffn is not None:
            events = events.holding(*self.pffn(events, sources))
        if self.attention is not None:
            events = events.holding(*self.attention(events))
        if self.pool is None:
            return events, None
        queries = targets if self.ask is None else torch.cat([self.ask(sources), targets], dim=1)
        pooled, stream = self.pool(events, queries)
        return events.holding(stream), pooled

    def flops(self, lengths: Lengths) -> int:
        count = 0 if self.pffn is None else self.pffn.flops(lengths)
        count += 0 if self.attention is None else self.attention.flops(lengths)
        count += 0 if self.pool is None else self.pool.flops(lengths)
        return count + (0 if self.ask is None else self.ask.flops(len(lengths), self.dim))


class State(NamedTuple):
    """What flows from layer to layer.

    Args:
        x: ``[rows, tokens, dim]``.
        events: each group's events.
        pooled: each group's last pooling ``[rows, pooled tokens, dim]``; empty before the first layer.
        links: poolings that later ones replaced, kept if the model has links.
    """

    x: Tensor
    events: list[Events]
    pooled: list[Tensor]
    links: list[Tensor]


class GemLayer(nn.Module):
    """One layer over all groups.

    Args:
        tokens: tokens of X that it receives.
        seen: pooled tokens that it sees, links included.
        steps: what it does with each group.
        kinds: which of the targets are each group's.
        options: the model's options.
    """

    def __init__(self, tokens: int, seen: int, steps: Sequence[GroupStep], kinds: Sequence[int], options: GemOptions) -> None:
        super().__init__()
        self.weight_gen = WeightGen(tokens, options.x_sum, options.dim)
        self.steps = nn.ModuleList(steps)
        size = (options.x_sum + seen + tokens, tokens, options.tokens, options.dim)
        self.ensemble = Ensemble(*size, options.experts, join=options.ensemble, partition=options.partition, dropout=options.dropout)
        self.links, self.kinds = options.links, kinds

    def forward(self, state: State, targets: Sequence[Tensor]) -> State:
        x_sum = self.weight_gen(state.x)
        sources = [torch.cat([x_sum, each], dim=1) for each in targets]  # once for groups of one kind: their gradients add up before they are parted
        events, pooled, links = [], [], list(state.links)
        for i, step in enumerate(self.steps):
            group, found = step(state.events[i], sources[self.kinds[i]], targets[self.kinds[i]])
            if found is not None and self.links and state.pooled:
                links.append(state.pooled[i])
            events.append(group)
            pooled.append(state.pooled[i] if found is None else found)
        z = torch.cat([x_sum, *pooled, state.x, *links], dim=1)
        return State(self.ensemble(z, state.x), events, pooled, links)

    def flops(self, lengths: Sequence[Lengths], rows: int) -> int:
        steps: list[Any] = list(self.steps)
        return self.weight_gen.flops(rows) + total(step.flops(n) for step, n in zip(steps, lengths)) + self.ensemble.flops(rows)


class GemModel(DenseModel):
    """The dense part of GEM. ``model(batch, embedded) -> {task: logits [rows]}``.

    Args:
        schema: the data set; any mix of non-sequence features and sequence groups.
        options: the model's options.

    Raises:
        RequestError: an option names a group or feature that the schema lacks, or asks for what it cannot give.
    """

    @classmethod
    def tables(cls, schema: DataSchema, options: GemOptions) -> list[TableSpec]:
        """The embedding tables for this schema."""
        return make_tables(schema, options)

    def __init__(self, schema: DataSchema, options: GemOptions) -> None:
        super().__init__()
        check_groups(schema, options)
        self.schema, self.options = schema, options
        self.features = FeatureTokens(schema, self.tables(schema, options), options.features, options.dim)
        self.events = nn.ModuleList(EventTokens(g, options.features.embedding_dim, options.group(g.name)) for g in schema.sequences)
        self.targets = [target_tokens(schema, g, self.features.names) if options.targets else [] for g in schema.sequences]
        self.distinct = [tokens for i, tokens in enumerate(self.targets) if self.targets.index(tokens) == i]
        self.layers = nn.ModuleList(self._layers())
        extra = self.features.numbers_width if options.head.numbers else 0
        self.heads = Heads(schema, options.tokens * options.dim + extra, options.head)

    def _layers(self) -> list[GemLayer]:
        options, groups = self.options, self.schema.sequences
        plans = [plan(options.layers, options.group(group.name), options.comp_skip) for group in groups]
        tokens, pooled = self.features.count, [0] * len(groups)
        kinds = [self.distinct.index(targets) for targets in self.targets]
        linked, layers = 0, []
        for layer in range(options.layers):
            steps = []
            for i, group in enumerate(groups):
                step = GroupStep(plans[i][layer], len(self.targets[i]), group.max_length, options.group(group.name), options)
                if step.pool is not None:
                    linked, pooled[i] = linked + pooled[i], step.pool.tokens
                steps.append(step)
            layers.append(GemLayer(tokens, sum(pooled) + (linked if options.links else 0), steps, kinds, options))
            tokens = options.tokens
        return layers

    def compiled_parts(self) -> list[nn.Module]:
        """What ``compile.blocks`` compiles: what works on rows, whose sizes stay.

        A sequence's steps are kernels with little between them, and compiling whole layers for any number of events takes minutes.
        """
        layers: list[Any] = list(self.layers)
        return [part for layer in layers for part in (layer.weight_gen, layer.ensemble)]

    def forward(self, batch: Batch, embedded: dict[str, Tensor]) -> dict[str, Tensor]:
        described = self.features.described(batch)
        x = self.features(batch, embedded, described)
        x = x.to(compute_dtype(x))  # once: features are float32 in some recipes, and each expert would round them for itself, and widen its gradient
        targets = [pick(x, tokens) for tokens in self.distinct]
        state = State(x, [group(batch, embedded) for group in self.events], [], [])
        for layer in self.layers:
            state = layer(state, targets)
        out = state.x.flatten(1)
        if described is not None and self.options.head.numbers:
            out = torch.cat([out, described.flatten(1)], dim=-1)
        first = self.features.first_order(batch, embedded, len(self.schema.tasks)) if self.options.wide and self.schema.ids else None
        return self.heads(out, batch, first)  # type: ignore[no-any-return]

    def flops(self, batch: Batch) -> int:
        """Exact forward model FLOPs of one CPU batch: matmuls on valid elements, 2 m n k; embeddings, norms and activations count nothing."""
        lengths = [batch.event_offsets[group.name].offsets.diff().numpy() for group in self.schema.sequences]
        groups: list[Any] = list(self.events)
        layers: list[Any] = list(self.layers)
        count = self.features.flops(batch.rows) + self.heads.flops(batch.rows)
        count += total(group.flops(int(n.sum())) for group, n in zip(groups, lengths))
        return count + total(layer.flops(lengths, batch.rows) for layer in layers)


def check_groups(schema: DataSchema, options: GemOptions) -> None:
    """Every group that an option names exists, holds something, and can be pooled."""
    known = [group.name for group in schema.sequences]
    for name in options.sequences:
        if name not in known:
            raise RequestError(f"model.options.sequences.{name}", f"the schema's sequence groups are {known}", "Name one of them.")
    shared = {feature.table_name for feature in schema.ids} if options.targets else set()
    for group in schema.sequences:
        own = options.group(group.name)
        if not (group.ids or group.dense or group.time):
            raise RequestError(f"sequence group {group.name!r}", "it has no columns", "Give it ids, numbers or times, or leave it out.")
        if not (own.seeds or own.queries or shared & {feature.table_name for feature in group.ids}):
            raise RequestError(f"sequence group {group.name!r}", "it has no pooling query", "Set its seeds or queries to 1 or more.")
