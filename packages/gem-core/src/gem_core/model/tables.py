"""The embedding tables a model asks for, and its columns in them."""

from collections.abc import Mapping, Sequence

from gem_core.model.options import BaseModelOptions
from gem_core.spec.data import DataSchema, IdFeature
from gem_core.spec.embedding import TableSpec
from gem_core.spec.errors import RequestError

ALIGN = 4
"""Fused table kernels want rows of a multiple of four floats."""


def bias_columns(tasks: int) -> int:
    """Columns that first-order terms take in a table: one for each task, rounded up to ``ALIGN``."""
    return -(-tasks // ALIGN) * ALIGN


def used_features(schema: DataSchema, *, sequences: bool = True) -> dict[str, IdFeature]:
    """Id features by batch key; without those of histories when a model ignores them."""
    return schema.all_id_features() if sequences else {feature.name: feature for feature in schema.ids}


def make_tables(schema: DataSchema, options: BaseModelOptions, *, sequences: bool = True, pool_sequences: bool = False) -> list[TableSpec]:
    """One table for each ``IdFeature.table_name``.

    A table gives a vector an id, so that a candidate and a history can share it. The engine pools (``mean``) where rows hold several ids, no
    history is wanted event by event and no id has a weight.

    Args:
        schema: the data set.
        options: the model's options.
        sequences: whether the model reads histories.
        pool_sequences: whether the mean of a history is all the model wants of it.

    Raises:
        RequestError: features of one table differ in cardinality, an event column is multi-valued, or a weighted feature shares its table with a
            history that the engine pools.
    """
    columns: dict[str, dict[str, IdFeature]] = {}
    for key, feature in used_features(schema, sequences=sequences).items():
        columns.setdefault(feature.table_name, {})[key] = feature
    of_rows = {feature.name for feature in schema.ids}
    extra = bias_columns(len(schema.tasks)) if options.wide else 0
    return [_table(name, keys, of_rows, extra, pool_sequences, options) for name, keys in columns.items()]


def _table(name: str, columns: Mapping[str, IdFeature], of_rows: set[str], extra: int, pool_sequences: bool, options: BaseModelOptions) -> TableSpec:
    sizes = {key: feature.cardinality for key, feature in columns.items()}
    if len(set(sizes.values())) > 1:
        raise RequestError(
            f"embedding table {name!r}",
            f"its features have different cardinalities: {sizes}",
            "Features that share a table have one; or name two tables.",
        )
    several = [key for key, feature in columns.items() if feature.multi]
    events = [key for key in columns if key not in of_rows]
    if wrong := [key for key in several if key in events]:
        raise RequestError(f"event column {wrong[0]!r}", "it is multi-valued", "Events carry one id a column; give each of its values a column.")
    weighted = [key for key in several if columns[key].weighted]
    if weighted and events and pool_sequences:
        so = f"it shares table {name!r} with {events[0]!r}, of which the model wants the engine's mean"
        raise RequestError(f"weighted id feature {weighted[0]!r}", so, "Give the weighted feature a table of its own.")
    mean = not weighted and ((bool(several) or bool(events)) if pool_sequences else (bool(several) and not events))
    return TableSpec(
        name=name,
        rows=next(iter(sizes.values())),
        dim=options.features.embedding_dim + (extra if len(events) < len(columns) else 0),
        features=tuple(columns),
        pooling="mean" if mean else "none",
        init_scale=options.features.init_scale,
    )


def poolings(tables: Sequence[TableSpec]) -> dict[str, str]:
    """``TableSpec.pooling`` by batch key."""
    return {key: table.pooling for table in tables for key in table.features}
