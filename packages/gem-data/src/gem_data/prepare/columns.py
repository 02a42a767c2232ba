"""Which columns of the raw tables a preparation reads, and whether their types make sense together."""

import pyarrow as pa

from gem_core.spec import RequestError
from gem_data.prepare.output import impression_columns
from gem_data.prepare.plan import Plan, feature_columns
from gem_data.prepare.stage import Staged
from gem_data.prepare.where import Where


def needed(plan: Plan) -> dict[str, list[str]]:
    """``{table: raw columns}`` that the preparation reads."""
    definition, schema = plan.definition, plan.schema
    out: dict[str, list[str]] = {name: [] for name in definition.tables}
    sides = {c for side in definition.sides for c in side.columns}
    conversions = {c.task for c in definition.conversions}
    made = conversions | {p.task for p in definition.positives}
    own = [c for c in impression_columns(schema) if c not in sides]
    own += [c for t in schema.task if t.name not in conversions for c in (t.mask, t.delay) if c is not None]
    own += [t.label for t in schema.task if t.name not in made]
    own += [c for p in definition.positives for c, _, _ in p.where]
    own += [c for conversion in definition.conversions for c in conversion.match]
    own += [c for side in definition.sides for c in side.on]
    out[definition.impressions.table] += [*own, *([schema.request] if schema.request else [])]
    for history, group in zip(definition.histories, plan.groups, strict=True):
        out[history.table] += [*feature_columns(group, history).values(), *(c for c, _, _ in history.where)]
    for conversion in definition.conversions:
        out[conversion.table] += [*conversion.match, *(c for c, _, _ in conversion.where)]
    for side in definition.sides:
        out[side.table] += [*side.on, *side.columns]
    for name, columns in out.items():
        _check_names(name, set(columns))
    return out


def _check_names(table: str, columns: set[str]) -> None:
    """SQL takes ``Item`` and ``item`` for one."""
    known: dict[str, str] = {}
    for column in sorted(columns):
        if column.lower().startswith("gem_"):
            raise RequestError(f"column {column!r} of table {table!r}", "names that begin with gem_ are taken", "Rename the column.")
        other = known.setdefault(column.lower(), column)
        if other != column:
            raise RequestError(f"columns {other!r} and {column!r} of table {table!r}", "they differ in case only", "Rename one of them.")


def check_types(plan: Plan, staged: dict[str, Staged]) -> None:
    """Columns that are compared across tables have one type; SQL would convert, or fail in its own words."""
    definition = plan.definition
    main = definition.impressions.table
    _check_labels(plan, staged[main])
    _check_numbers(plan, staged)
    pairs = [(history.table, "gem_user") for history in definition.histories]
    pairs += [(conversion.table, "gem_user") for conversion in definition.conversions]
    pairs += [(c.table, column) for c in definition.conversions for column in c.match]
    pairs += [(side.table, column) for side in definition.sides for column in side.on]
    for table, column in pairs:
        mine, theirs = (staged[name].schema.field(column).type for name in (main, table))
        if mine != theirs:
            what = "user" if column == "gem_user" else column
            so = f"it is {mine} in table {main!r} and {theirs} in {table!r}"
            raise RequestError(f"column {what!r}", so, "Give both one type, for text files by `scan.types`.")
    filters = [(part.table, part.where) for part in definition.histories]
    filters += [(part.table, part.where) for part in definition.conversions]
    filters += [(main, positive.where) for positive in definition.positives]
    for table, where in filters:
        _check_filter(table, where, staged[table].schema)


def _check_labels(plan: Plan, main: Staged) -> None:
    """Labels and masks are numbers."""
    made = {c.task for c in plan.definition.conversions}
    positives = {p.task for p in plan.definition.positives}
    for task in plan.schema.task:
        columns = [] if task.name in made else [task.mask, task.delay, task.weight, *([] if task.name in positives else [task.label])]
        for column in (c for c in columns if c is not None):
            kind = main.schema.field(column).type
            if not is_number(kind):
                so = f"column {column!r} holds {kind}"
                raise RequestError(f"label of task {task.name!r}", so, "Give 0 and 1, or say in [[positives]] which values are positive.")


def _check_numbers(plan: Plan, staged: dict[str, Staged]) -> None:
    """Numbers of rows and of events are numbers."""
    side_of = {column: side.table for side in plan.definition.sides for column in side.columns}
    main = plan.definition.impressions.table
    found = [(n.name, side_of.get(n.column or n.name, main), n.column or n.name) for n in plan.schema.number]
    for history, group in zip(plan.definition.histories, plan.groups, strict=True):
        source = feature_columns(group, history)
        found += [(f"{group.name}.{n.name}", history.table, source[n.name]) for n in group.number]
    for name, table, column in found:
        kind = staged[table].schema.field(column).type
        if not is_number(kind):
            so = f"column {column!r} of table {table!r} holds {kind}"
            raise RequestError(f"number {name!r}", so, "Declare it as an id, or state its type with `scan.types`.")


def _check_filter(table: str, where: Where, schema: pa.Schema) -> None:
    """Numbers are compared with numbers and texts with texts."""
    for column, operator, value in where:
        kind = schema.field(column).type
        texts = {isinstance(v, str) for v in (value if isinstance(value, tuple) else (value,))}
        if texts != {not is_number(kind)}:
            so = f"column {column!r} of table {table!r} holds {kind}"
            raise RequestError(f"condition {[column, operator, value]}", so, "Compare numbers with numbers and texts with texts.")


def is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))
