"""What can be wrong with a schema whose parts are each well formed."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gem_data.schema.declare import Id, Schema, Sequence


def conflicts(schema: "Schema") -> Iterator[str]:
    """One sentence for each contradiction."""
    yield from _names(schema)
    yield from _tables(schema)
    yield from _tasks(schema)
    yield from _features(schema)


def _twice(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _names(schema: "Schema") -> Iterator[str]:
    rows = [f.name for f in (*schema.id, *schema.multi_id, *schema.number, *schema.embedding)]
    for what, names in (("feature", rows), ("sequence", [s.name for s in schema.sequence]), ("task", [t.name for t in schema.task])):
        yield from (f"{what} {name!r} is declared twice" for name in _twice(names))
    for group in schema.sequence:
        yield from _group(group)
    keys = {f"{group.name}.{name}": group.name for group in schema.sequence for name in _sides(group)}
    yield from (f"feature {n!r} and sequence {keys[n]!r}: two of their columns would be called {n!r}" for n in rows if n in keys)


def _sides(group: "Sequence") -> list[str]:
    times = [group.time] if group.time else []
    return [*(f.name for f in (*group.id, *group.number)), *times]


def _group(group: "Sequence") -> Iterator[str]:
    names = _sides(group)
    yield from (f"sequence {group.name!r} declares {name!r} twice" for name in _twice(names))
    if not names:
        yield f"sequence {group.name!r} has no column; declare a [[sequence.id]], a [[sequence.number]] or time"
    if group.time_column and not group.time:
        yield f"sequence {group.name!r} gives time_column but no time"


def _tables(schema: "Schema") -> Iterator[str]:
    """Features that share a table encode alike."""
    first: dict[str, tuple[str, Id]] = {}
    for key, _, feature in schema.id_columns():
        if feature.encode != "vocabulary" and feature.rows is None:
            yield f"id {key!r} is encoded by {feature.encode!r} but gives no rows"
        other, known = first.setdefault(feature.table_name, (key, feature))
        for what in ("encode", "rows", "min_count"):
            mine, theirs = getattr(feature, what), getattr(known, what)
            if mine != theirs:
                yield f"ids {other!r} and {key!r} share table {feature.table_name!r} but differ in {what}: {theirs!r} and {mine!r}"


def _tasks(schema: "Schema") -> Iterator[str]:
    tasks = {task.name: task for task in schema.task}
    for task in schema.task:
        roles = {role: getattr(task, role) for role in ("label", "mask", "weight", "delay")}
        for column in _twice(c for c in roles.values() if c is not None):
            same = [role for role, value in roles.items() if value == column]
            yield f"task {task.name!r} uses column {column!r} as its {' and its '.join(same)}"
        seen, at = [task.name], task.condition
        while at is not None:
            if at not in tasks:
                yield f"task {seen[-1]!r} is conditional on {at!r}, which is no task"
                break
            if at in seen:
                yield f"the conditions of tasks run in a circle: {' -> '.join([*seen, at])}"
                break
            seen.append(at)
            at = tasks[at].condition


def _features(schema: "Schema") -> Iterator[str]:
    """A label, or the delay of one, is never an input: the model would see the answer."""
    answers = {c: (t.name, role) for t in schema.task for role, c in (("label", t.label), ("delay", t.delay)) if c is not None}
    inputs = {f.column or f.name: f.name for f in (*schema.id, *schema.multi_id, *schema.number, *schema.embedding)}
    for column, feature in inputs.items():
        if column in answers:
            task, role = answers[column]
            yield f"column {column!r} is the {role} of task {task!r} and also feature {feature!r}; the model would see the answer"
