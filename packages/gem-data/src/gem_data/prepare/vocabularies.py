"""Vocabularies from what training rows hold: their own ids, and the events that their histories can reach."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from gem_data.ids import VocabularyBuilder
from gem_data.prepare.engine import Engine
from gem_data.prepare.histories import visible_events
from gem_data.prepare.plan import Plan, feature_columns
from gem_data.prepare.sides import final_rows
from gem_data.schema import Id


def write_vocabularies(engine: Engine, plan: Plan, folder: Path) -> None:
    """Write ``vocabulary/TABLE.parquet`` of each table that is encoded by vocabulary; each event counts once, however many rows see it."""
    wanted = [f for _, _, f in plan.schema.id_columns() if f.encode == "vocabulary"]
    builders = {f.table_name: VocabularyBuilder(f.table_name, min_count=f.min_count) for f in wanted}
    for feature, values in _training_values(engine, plan):
        builders[feature.table_name].add(values)
    for builder in builders.values():
        builder.build().write(folder / "vocabulary")


def _training_values(engine: Engine, plan: Plan) -> Iterator[tuple[Id, pa.Array]]:
    own = [(f.column or f.name, f) for f in (*plan.schema.id, *plan.schema.multi_id) if f.encode == "vocabulary"]
    if own:
        for batch in engine.stream(final_rows(plan, "train", list(dict.fromkeys(c for c, _ in own)))):
            for column, feature in own:
                values = batch.column(column)
                yield feature, values.flatten() if pa.types.is_nested(values.type) else values
    for h, (history, group) in enumerate(zip(plan.definition.histories, plan.groups, strict=True)):
        source = feature_columns(group, history)
        features = [f for f in group.id if f.encode == "vocabulary"]
        if features:
            for batch in engine.stream(visible_events(h, list(dict.fromkeys(source[f.name] for f in features)))):
                for feature in features:
                    yield feature, batch.column(source[feature.name])
