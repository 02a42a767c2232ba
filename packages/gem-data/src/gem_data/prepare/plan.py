"""The relational part of a preparation is SQL that DuckDB and Spark run alike; this is what all of it is made from.

Tables come one from the other:

- ``labelled``: impressions with a user and a time, with ``gem_observed`` and ``gem_label_K, gem_mask_K, gem_delay_K`` of task number K;
- ``placed``: those with a label, with ``gem_split``;
- ``kept``: those that are written, with the probe whose histories they get: ``gem_probe`` (a row number) at time ``gem_at``;
- ``spanned``: the same with ``gem_begin_H, gem_end_H``, the part of all events of history number H that a row sees.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from gem_data.prepare.definition import Conversion, Definition, History, Table
from gem_data.prepare.where import quote, sql
from gem_data.schema import Schema
from gem_data.schema import Sequence as Group

NOTHING = "CAST(NULL AS BIGINT)"


def raw(table: str) -> str:
    """The engine's name of a staged table."""
    return quote(f"raw_{table}")


@dataclass(frozen=True)
class Plan:
    """What the SQL is made from."""

    definition: Definition
    schema: Schema

    @property
    def impressions(self) -> str:
        return raw(self.definition.impressions.table)

    @property
    def table(self) -> Table:
        """The table of the impressions."""
        return self.definition.tables[self.definition.impressions.table]

    @property
    def groups(self) -> list[Group]:
        """The schema's sequence of each history."""
        by_name = {group.name: group for group in self.schema.sequence}
        return [by_name[history.name] for history in self.definition.histories]

    @property
    def shared(self) -> bool:
        return self.definition.impressions.share_histories


def events_of(part: History | Conversion, columns: Iterable[str] = ()) -> str:
    """The events of one type: rows of the table that fit the filter and have a user and a time."""
    names = ["gem_user", "gem_time", "gem_order", "gem_row", *(quote(c) for c in dict.fromkeys(columns))]
    return f"SELECT {', '.join(names)} FROM {raw(part.table)} WHERE ({sql(part.where)}) AND gem_user IS NOT NULL AND gem_time IS NOT NULL"


def all_known(columns: Iterable[str]) -> str:
    return f"WHERE {' AND '.join(f'{c} IS NOT NULL' for c in columns)}" if columns else ""


def feature_columns(group: Group, history: History) -> dict[str, str]:
    """``{feature: column of the event table}``."""
    return {f.name: history.columns.get(f.name, f.column or f.name) for f in (*group.id, *group.number)}
