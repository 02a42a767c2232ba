"""From a user's schema to the schema that models and trainers read."""

from gem_core.spec import DataSchema, DenseFeature, IdFeature, RequestError, SequenceFeature
from gem_core.spec import Task as CoreTask
from gem_data.schema.declare import Id, Schema


def to_data_schema(schema: Schema) -> DataSchema:
    """Raises RequestError where a vocabulary is not built yet, or no task is declared."""
    if not schema.task:
        raise RequestError("schema", "it declares no task", "Declare a [[task]] with the column of its label.")
    return DataSchema(
        ids=(*(_id(f) for f in schema.id), *(_id(f, multi=True, weighted=f.weights is not None) for f in schema.multi_id)),
        dense=(*(DenseFeature(name=f.name) for f in schema.number), *(DenseFeature(name=f.name, width=f.width) for f in schema.embedding)),
        sequences=tuple(
            SequenceFeature(
                name=group.name,
                ids=tuple(_id(f) for f in group.id),
                dense=tuple(DenseFeature(name=f.name) for f in group.number),
                time=group.time is not None,
                max_length=group.max_length,
            )
            for group in schema.sequence
        ),
        tasks=tuple(CoreTask(name=task.name, condition=task.condition, weight=task.loss_weight) for task in schema.task),
        group=schema.user is not None or schema.request is not None,
    )


def _id(feature: Id, multi: bool = False, weighted: bool = False) -> IdFeature:
    if feature.rows is None:
        so = "its vocabulary is not built, so the rows of its table are not known"
        raise RequestError(f"id {feature.name!r}", so, "Run `gem data prepare`, or encode it by hash with a number of rows.")
    return IdFeature(name=feature.name, cardinality=feature.rows, multi=multi, table=feature.table, weighted=weighted)
