"""Non-sequence features as tokens ``X`` ``[rows, tokens, dim]``."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gem_core.batch import Batch, Jagged
from gem_core.model.jagged import mean_rows, weighted_mean_rows
from gem_core.model.layers import AddNorm, LearnedToken, Mlp, pair_width, total
from gem_core.model.options import FeatureOptions
from gem_core.model.tables import poolings
from gem_core.ops.products import linear_flops, own_flops
from gem_core.spec.data import DataSchema, DenseFeature, SequenceFeature
from gem_core.spec.embedding import TableSpec
from gem_core.spec.errors import RequestError


class TokenLinear(nn.Module):
    """A linear map of its own for each token: ``[rows, tokens, dim] -> [rows, tokens, out]``."""

    token_linear = True
    """``gem_core.spec.TOKEN_LINEAR``."""

    def __init__(self, tokens: int, dim: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(tokens, dim, out))
        self.bias = nn.Parameter(torch.empty(tokens, out))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bti,tio->bto", x, self.weight) + self.bias

    def flops(self, rows: int, *, input_gradient: bool = True) -> int:
        tokens, dim, out = self.weight.shape
        return own_flops(self, rows * tokens * pair_width(dim, out), input_gradient=input_gradient)


class NumberCode(nn.Module):
    """Describe each number by its value and learned sines and cosines: ``[rows, numbers] -> [rows, numbers, 1 + 2 frequencies]``.

    Periodic embeddings of Gorishniy et al., arXiv 2203.05556. Values stay float32 until they are described: in bf16 a large count would lose digits.
    """

    def __init__(self, numbers: int, options: FeatureOptions) -> None:
        super().__init__()
        self.compress = options.compress
        self.frequency = nn.Parameter(torch.empty(numbers, options.frequencies)) if options.frequencies else None
        self.width = 1 + 2 * options.frequencies
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.frequency is not None:
            nn.init.normal_(self.frequency, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        z = x.sign() * x.abs().log1p() if self.compress else x
        value = z[..., None]
        if self.frequency is None:
            return value
        angle = 2 * math.pi * self.frequency * value
        return torch.cat([value, angle.sin(), angle.cos()], dim=-1)


class FeatureTokens(nn.Module):
    """Tokens of the id features, of the numbers and of the dense embeddings, in that order.

    Args:
        schema: the data set.
        tables: the model's tables.
        options: how features become tokens.
        dim: width of a token.

    A schema without non-sequence features gives one learned token, so that everything built on tokens still has one.
    """

    def __init__(self, schema: DataSchema, tables: list[TableSpec], options: FeatureOptions, dim: int) -> None:
        super().__init__()
        pooling = poolings(tables)
        self.ids = tuple(feature.name for feature in schema.ids)
        self.to_pool = frozenset(f.name for f in schema.ids if f.multi and pooling[f.name] == "none")
        self.weighted = frozenset(f.name for f in schema.ids if f.weighted)
        self.numbers = tuple(feature.name for feature in schema.dense if feature.width == 1)
        self.vectors: tuple[DenseFeature, ...] = tuple(feature for feature in schema.dense if feature.width > 1)
        self.width, self.dim = options.embedding_dim, dim
        self.project = TokenLinear(len(self.ids), self.width, dim) if self.ids and self.width != dim else None
        self.code = NumberCode(len(self.numbers), options) if self.numbers else None
        code = self.code.width if self.code is not None else 0
        count = len(self.numbers)
        self.each = TokenLinear(count, code, dim) if count and options.numbers != "group" else None
        self.group = Mlp(count * code, (2 * dim,), options.group_tokens * dim) if count and options.numbers != "each" else None
        self.dense = nn.ModuleList(nn.Linear(feature.width, dim) for feature in self.vectors)
        self.grouped = options.group_tokens if self.group is not None else 0
        grouped = [f"numbers.{i}" for i in range(self.grouped)]
        names = [*self.ids, *(self.numbers if self.each is not None else ()), *grouped, *(feature.name for feature in self.vectors)]
        self.names = tuple(names or ["constant"])
        self.constant = None if names else LearnedToken(dim)
        self.norm = AddNorm(dim) if options.norm else None
        self.dropout = nn.Dropout(options.dropout)

    @property
    def count(self) -> int:
        """Number of tokens."""
        return len(self.names)

    @property
    def numbers_width(self) -> int:
        """Width of ``described``, 0 without numbers."""
        return 0 if self.code is None else len(self.numbers) * self.code.width

    def described(self, batch: Batch) -> Tensor | None:
        """The numbers' descriptions ``[rows, numbers, code]``, None without numbers."""
        if self.code is None:
            return None
        return self.code(torch.cat([batch.dense[name] for name in self.numbers], dim=-1))  # type: ignore[no-any-return]

    def vector(self, name: str, batch: Batch, embedded: dict[str, Tensor]) -> Tensor:
        """The embedding of one id feature ``[rows, table dim]``, bias columns included."""
        value = embedded[name]
        if name in self.to_pool:
            column = batch.ids[name]
            packed = Jagged(value, column.offsets, column.max_length)
            value = weighted_mean_rows(packed, _id_weights(batch, name, value.shape[0])) if name in self.weighted else mean_rows(packed)
        if value.shape[0] != batch.rows:
            raise RequestError(
                f"id feature {name!r}",
                f"{value.shape[0]} ids for {batch.rows} rows",
                "A single id feature has one id a row (0 if unknown); else declare it multi.",
            )
        return value

    def forward(self, batch: Batch, embedded: dict[str, Tensor], described: Tensor | None = None) -> Tensor:
        """Tokens ``[rows, count, dim]``; ``described`` is what the method of that name gave."""
        parts: list[Tensor] = []
        if self.ids:
            ids = torch.stack([self.vector(name, batch, embedded)[:, : self.width] for name in self.ids], dim=1)
            parts.append(ids if self.project is None else self.project(ids))
        if described is not None and self.each is not None:
            parts.append(self.each(described))
        if described is not None and self.group is not None:
            parts.append(self.group(described.flatten(1)).view(-1, self.grouped, self.dim))
        parts += [linear(batch.dense[feature.name])[:, None] for feature, linear in zip(self.vectors, self.dense)]
        if self.constant is not None:
            parts.append(self.constant(batch.rows))
        tokens = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        out: Tensor = self.dropout(tokens if self.norm is None else self.norm(tokens))
        return out

    def first_order(self, batch: Batch, embedded: dict[str, Tensor], tasks: int) -> Tensor:
        """Sum of the ids' bias columns: ``[rows, tasks]``."""
        terms = [self.vector(name, batch, embedded)[:, self.width : self.width + tasks] for name in self.ids]
        return torch.stack(terms).sum(0)

    def flops(self, rows: int) -> int:
        learned = self.code is not None and self.code.frequency is not None
        count = 0 if self.project is None else self.project.flops(rows)
        count += sum(part.flops(rows, input_gradient=learned) for part in (self.each, self.group) if part is not None)
        vectors: Sequence[Any] = list(self.dense)
        return count + total(linear_flops(linear, rows, input_gradient=False) for linear in vectors)


def _id_weights(batch: Batch, name: str, ids: int) -> Tensor:
    weights = batch.id_weights.get(name)
    if weights is None or weights.shape != (ids,):
        so = "the batch has none" if weights is None else f"their shape is {list(weights.shape)} for {ids} ids"
        raise RequestError(f"weights of id feature {name!r}", so, "A source gives one weight for each id of a weighted feature.")
    return weights


def target_tokens(schema: DataSchema, group: SequenceFeature, names: Sequence[str]) -> list[int]:
    """The candidate of a group: places among the tokens ``names`` of the id features that look up a table which the group's events look up too."""
    tables = {feature.table_name for feature in group.ids}
    return [names.index(feature.name) for feature in schema.ids if feature.table_name in tables]
