"""Labels of impressions: from a column, from a condition, or from what happened later."""

from gem_core.spec import RequestError
from gem_data.prepare.definition import Conversion
from gem_data.prepare.engine import Engine
from gem_data.prepare.plan import NOTHING, Plan, all_known, events_of, raw
from gem_data.prepare.where import quote, sql
from gem_data.schema import Task


def label_rows(engine: Engine, plan: Plan) -> None:
    """Make ``labelled``."""
    made = {c.task: c for c in plan.definition.conversions}
    positives = {p.task: p for p in plan.definition.positives}
    columns, joins = [], []
    for k, task in enumerate(plan.schema.task):
        if task.name in made:
            engine.create(f"conversion_{k}", _conversion(engine, plan, made[task.name]))
            joins.append(f"LEFT JOIN conversion_{k} ON conversion_{k}.gem_row = r.gem_row")
            columns += [f"conversion_{k}.gem_{what} AS gem_{what}_{k}" for what in ("label", "mask", "delay")]
        elif task.name in positives:
            condition = sql(positives[task.name].where)
            columns.append(_own_label(k, f"CASE WHEN {condition} THEN 1 WHEN NOT ({condition}) THEN 0 END", task))
        else:
            _check_label(engine, plan, task)
            columns.append(_own_label(k, f"CASE WHEN {quote(task.label)} IN (0, 1) THEN {quote(task.label)} END", task))
    observed = " + ".join(f"gem_mask_{k}" for k in range(len(plan.schema.task)))
    request = quote(plan.schema.request) if plan.schema.request else NOTHING
    inner = f"""SELECT r.gem_row, r.gem_user, r.gem_time, r.gem_order, {request} AS gem_request, {", ".join(columns)}
        FROM {plan.impressions} r {" ".join(joins)} WHERE {" AND ".join(f"NOT ({c})" for c in invalid(plan).values())}"""
    engine.create("labelled", f"SELECT *, CASE WHEN {observed} > 0 THEN 1 ELSE 0 END AS gem_observed FROM ({inner}) t")


def invalid(plan: Plan) -> dict[str, str]:
    """``{reason: condition}`` of impressions that cannot be trained on; the first that holds is the reason."""
    out = {"no time": "r.gem_time IS NULL"}
    if plan.table.user is not None:
        out = {"no user": "r.gem_user IS NULL", **out}
    if plan.shared:
        out["no request"] = f"r.{quote(plan.schema.request or '')} IS NULL"
    return out


def _own_label(k: int, value: str, task: Task) -> str:
    masked = "" if task.mask is None else f" AND {quote(task.mask)} = 1"
    return f"""COALESCE({value}, 0) AS gem_label_{k}, CASE WHEN ({value}) IS NOT NULL{masked} THEN 1 ELSE 0 END AS gem_mask_{k},
        {NOTHING if task.delay is None else quote(task.delay)} AS gem_delay_{k}"""


def _check_label(engine: Engine, plan: Plan, task: Task) -> None:
    """Labels are 0, 1, missing or -1 (unknown); anything else is refused."""
    column = quote(task.label)
    found = engine.rows(f"SELECT {column}, gem_row FROM {plan.impressions} WHERE {column} NOT IN (-1, 0, 1) ORDER BY gem_row LIMIT 1")
    if found:
        so = f"row {found[0][1]} has {task.label} = {found[0][0]!r}"
        raise RequestError(f"label of task {task.name!r}", so, "Labels are 0 and 1, and -1 or nothing where unknown; or give [[positives]].")


def _conversion(engine: Engine, plan: Plan, conversion: Conversion) -> str:
    """For each impression the first event at or after it: within one user and match, impressions come before events of the same second."""
    end = conversion.end
    if end is None:
        end = engine.rows(f"SELECT MAX(gem_time) FROM {raw(conversion.table)}")[0][0]
    match = [quote(c) for c in conversion.match]
    keys = ", ".join(["gem_user", *match])
    both = f"""SELECT {keys}, gem_time, 0 AS gem_kind, gem_row FROM {plan.impressions} WHERE gem_user IS NOT NULL AND gem_time IS NOT NULL
        UNION ALL SELECT {keys}, gem_time, 1, {NOTHING} FROM ({events_of(conversion, conversion.match)}) e {all_known(match)}"""
    first = f"""SELECT gem_row, gem_time, gem_kind, MIN(CASE WHEN gem_kind = 1 THEN gem_time END)
        OVER (PARTITION BY {keys} ORDER BY gem_time, gem_kind ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING) AS gem_first FROM ({both}) b"""
    hit = f"gem_first - gem_time <= {conversion.within}"  # unknown, hence 0, where there is none
    closed = "FALSE" if end is None else f"gem_time + {conversion.within} <= {end}"
    return f"""SELECT gem_row, CASE WHEN {hit} THEN 1 ELSE 0 END AS gem_label, CASE WHEN {closed} THEN 1 ELSE 0 END AS gem_mask,
        CASE WHEN {hit} THEN gem_first - gem_time END AS gem_delay FROM ({first}) f WHERE gem_kind = 0"""
