"""A model without sequence layers to compare with: pairwise dots (DLRM, arXiv 1906.00091) or crosses (DCN v2, arXiv 2008.13535) of all features."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from gem_core.batch import Batch, Jagged
from gem_core.model.experts import CrossExpert
from gem_core.model.features import FeatureTokens
from gem_core.model.heads import Heads
from gem_core.model.jagged import mean_rows
from gem_core.model.layers import DenseModel, pair_width, total
from gem_core.model.options import BaseModelOptions, CrossOptions, Width
from gem_core.model.tables import make_tables
from gem_core.ops.products import linear_flops, own_flops
from gem_core.spec.data import DataSchema
from gem_core.spec.embedding import TableSpec


class DlrmOptions(BaseModelOptions):
    """Options of ``dlrm``."""

    dim: Width = 32
    """Width of a token."""
    interaction: Literal["dot", "cross"] = "dot"
    """``dot``: dot products of all pairs of tokens; ``cross``: a low-rank cross network."""
    cross: CrossOptions = CrossOptions(depth=3, rank=32)
    histories: Literal["mean", "ignore"] = "mean"
    """Each event column as its row's mean, or not at all."""


class DlrmModel(DenseModel):
    """Tokens of all features and of the means of the histories, their interaction, a head for each task.

    ``model(batch, embedded) -> {task: logits [rows]}``.
    """

    @classmethod
    def tables(cls, schema: DataSchema, options: DlrmOptions) -> list[TableSpec]:
        """The embedding tables for this schema; histories are pooled by the engine."""
        return make_tables(schema, options, sequences=options.histories == "mean", pool_sequences=True)

    def __init__(self, schema: DataSchema, options: DlrmOptions) -> None:
        super().__init__()
        self.schema, self.options = schema, options
        self.features = FeatureTokens(schema, self.tables(schema, options), options.features, options.dim)
        groups = schema.sequences if options.histories == "mean" else ()
        self.event_ids = tuple(f"{group.name}.{feature.name}" for group in groups for feature in group.ids)
        self.event_dense = tuple((group.name, f"{group.name}.{feature.name}", feature.width) for group in groups for feature in group.dense)
        self.project_ids = nn.ModuleList(nn.Linear(options.features.embedding_dim, options.dim) for _ in self.event_ids)
        self.project_dense = nn.ModuleList(nn.Linear(width, options.dim) for *_, width in self.event_dense)
        self.tokens = self.features.count + len(self.event_ids) + len(self.event_dense)
        self.cross = CrossExpert(self.tokens, self.tokens, options.dim, options.cross) if options.interaction == "cross" else None
        made = self.tokens * (self.tokens - 1) // 2 if self.cross is None else self.tokens * options.dim
        self.heads = Heads(schema, self.tokens * options.dim + made, options.head)

    def forward(self, batch: Batch, embedded: dict[str, Tensor]) -> dict[str, Tensor]:
        x = self.features(batch, embedded, self.features.described(batch))
        width = self.options.features.embedding_dim
        means = [project(embedded[key][:, :width]) for key, project in zip(self.event_ids, self.project_ids)]
        for (group, key, _), project in zip(self.event_dense, self.project_dense):
            offsets = batch.event_offsets[group]
            means.append(project(mean_rows(Jagged(batch.event_dense[key], offsets.offsets, offsets.max_length))))
        if means:
            x = torch.cat([x, torch.stack(means, dim=1)], dim=1)
        made = self._dots(x) if self.cross is None else self.cross(x).flatten(1)
        first = self.features.first_order(batch, embedded, len(self.schema.tasks)) if self.options.wide and self.schema.ids else None
        return self.heads(torch.cat([x.flatten(1), made], dim=-1), batch, first)  # type: ignore[no-any-return]

    def _dots(self, x: Tensor) -> Tensor:
        """Dot products of all pairs of different tokens: ``[rows, tokens, dim] -> [rows, tokens (tokens - 1) / 2]``."""
        above = torch.triu_indices(self.tokens, self.tokens, offset=1, device=x.device)
        return torch.matmul(x, x.transpose(1, 2))[:, above[0], above[1]]

    def flops(self, batch: Batch) -> int:
        """Exact forward model FLOPs of one CPU batch: matmuls, 2 m n k."""
        rows, ids, numbers = batch.rows, list[Any](self.project_ids), list[Any](self.project_dense)
        means = total(linear_flops(m, rows) for m in ids) + total(linear_flops(m, rows, input_gradient=False) for m in numbers)
        dots = rows * self.options.dim * pair_width(self.tokens, self.tokens)
        made = own_flops(self, dots) if self.cross is None else self.cross.flops(rows)
        return self.features.flops(rows) + means + made + self.heads.flops(rows)
