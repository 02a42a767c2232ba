"""Columns of other tables for each impression, without losing or multiplying a row."""

from gem_core.spec import RequestError
from gem_data.prepare.definition import Side
from gem_data.prepare.engine import Engine
from gem_data.prepare.plan import NOTHING, Plan, all_known, raw
from gem_data.prepare.where import literal, quote


def join_sides(engine: Engine, plan: Plan) -> None:
    """Make ``side_S`` for each side table number S: its row for each impression kept, at most one."""
    for s, side in enumerate(plan.definition.sides):
        keys = [quote(c) for c in side.on]
        if side.as_of:
            engine.create(f"side_{s}", _as_of(plan, side, keys))
            continue
        table, many = raw(side.table), ", ".join(keys)
        found = engine.rows(f"SELECT {many}, COUNT(*) FROM {table} {all_known(keys)} GROUP BY {many} HAVING COUNT(*) > 1 LIMIT 1")
        if found:
            so = f"{dict(zip(side.on, found[0][:-1]))} occurs {found[0][-1]} times, which would multiply impressions"
            raise RequestError(f"side table {side.table!r}", so, "Give one row a key, or set as_of = true on a table with times.")
        same = " AND ".join(f"i.{c} = t.{c}" for c in keys)
        engine.create(f"side_{s}", f"SELECT i.gem_row, t.gem_row AS side_row FROM {plan.impressions} i JOIN {table} t ON {same}")


def _as_of(plan: Plan, side: Side, keys: list[str]) -> str:
    """The last side row strictly before the impression: the count of earlier rows of the key is its number among them."""
    table, key = raw(side.table), ", ".join(keys)
    rows = f"SELECT {key}, gem_time, gem_row, ROW_NUMBER() OVER (PARTITION BY {key} ORDER BY gem_order, gem_row) AS gem_number FROM {table}"
    both = f"""SELECT {key}, gem_time, 0 AS gem_kind, gem_row FROM {plan.impressions} WHERE gem_time IS NOT NULL
        UNION ALL SELECT {key}, gem_time, 1, {NOTHING} FROM {table} {all_known([*keys, "gem_time"])}"""
    counted = f"""SELECT {key}, gem_kind, gem_row, SUM(gem_kind) OVER (PARTITION BY {key} ORDER BY gem_time, gem_kind
        ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS gem_number FROM ({both}) b"""
    same = " AND ".join(f"c.{c} = t.{c}" for c in keys)
    known = all_known([*keys, "gem_time"])
    return f"""SELECT c.gem_row, t.gem_row AS side_row FROM ({counted}) c
        JOIN (SELECT * FROM ({rows} {known}) n) t ON {same} AND c.gem_number = t.gem_number WHERE c.gem_kind = 0"""


def final_rows(plan: Plan, split: str, columns: list[str]) -> str:
    """The rows of a split in the order of time: ids, labels, spans of the histories, and ``columns`` of the impressions and side tables."""
    source, joins = {}, []
    for s, side in enumerate(plan.definition.sides):
        source.update({c: f"table_{s}.{quote(c)}" for c in side.columns})
        joins.append(
            f"LEFT JOIN side_{s} ON side_{s}.gem_row = k.gem_row LEFT JOIN {raw(side.table)} table_{s} ON table_{s}.gem_row = side_{s}.side_row"
        )
    if any(c not in source for c in columns):
        joins.append(f"JOIN {plan.impressions} r ON r.gem_row = k.gem_row")
    chosen = ["k.gem_row", "k.gem_probe", "k.gem_user", "k.gem_request", "k.gem_time"]
    chosen += [f"k.gem_{what}_{k}" for k in range(len(plan.schema.task)) for what in ("label", "mask", "delay")]
    chosen += [f"k.gem_{what}_{h}" for h in range(len(plan.definition.histories)) for what in ("begin", "end")]
    chosen += [f"CASE WHEN side_{s}.side_row IS NULL THEN 0 ELSE 1 END AS gem_matched_{s}" for s in range(len(plan.definition.sides))]
    chosen += [f"{source.get(c, f'r.{quote(c)}')} AS {quote(c)}" for c in columns]
    return f"""SELECT {", ".join(chosen)} FROM spanned k {" ".join(joins)} WHERE k.gem_split = {literal(split)}
        ORDER BY k.gem_probe_order, k.gem_probe, k.gem_order, k.gem_row"""
