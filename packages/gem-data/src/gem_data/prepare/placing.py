"""Which split a row belongs to, and which rows are left out."""

from gem_data.prepare.engine import Engine
from gem_data.prepare.labels import invalid
from gem_data.prepare.plan import Plan
from gem_data.splits import LeaveLastSplit, TimeSplit, UserFractionSplit, hash_below, ratio, test_condition


def place_rows(engine: Engine, plan: Plan) -> int | None:
    """Make ``placed``, and ``kept``; returns the first second of the test split where the split is by time."""
    split = plan.definition.split
    columns = "*"
    if isinstance(split, UserFractionSplit | LeaveLastSplit):
        columns = """*, ROW_NUMBER() OVER (PARTITION BY gem_user ORDER BY gem_order, gem_row) - 1 AS gem_position,
            COUNT(*) OVER (PARTITION BY gem_user) AS gem_user_rows"""
    if isinstance(split, TimeSplit) and split.test_fraction is not None:
        split = TimeSplit(kind="time", test_from=_moment(engine, split.test_fraction))
    test = test_condition(split)
    engine.view(
        "placed",
        f"SELECT *, CASE WHEN {test} THEN 'test' ELSE 'train' END AS gem_split FROM (SELECT {columns} FROM labelled WHERE gem_observed = 1) t",
    )
    keep = "TRUE" if plan.definition.sampling is None else f"NOT ({sampled_out(plan)})"
    probe = "gem_row AS gem_probe, gem_time AS gem_at, gem_order AS gem_probe_order"
    if plan.shared:
        over = "OVER (PARTITION BY gem_split, gem_user, gem_request)"
        probe = f"MIN(gem_row) {over} AS gem_probe, MIN(gem_time) {over} AS gem_at, MIN(gem_order) {over} AS gem_probe_order"
    engine.create("kept", f"SELECT *, {probe} FROM placed WHERE {keep}")
    return split.test_from if isinstance(split, TimeSplit) else None


def negative(plan: Plan, task: str) -> str:
    """SQL over ``placed``: a training row whose label of ``task`` is observed, which includes that the task's condition is positive, and is 0."""
    numbers = {t.name: k for k, t in enumerate(plan.schema.task)}
    conditions = {t.name: t.condition for t in plan.schema.task}
    parts = ["gem_split = 'train'", f"gem_mask_{numbers[task]} = 1 AND gem_label_{numbers[task]} = 0"]
    before = conditions[task]
    while before is not None:
        parts.append(f"gem_mask_{numbers[before]} = 1 AND gem_label_{numbers[before]} = 1")
        before = conditions[before]
    return " AND ".join(parts)


def sampled_out(plan: Plan) -> str:
    """SQL over ``placed``: the row is a negative that down-sampling leaves out."""
    sampling = plan.definition.sampling
    assert sampling is not None
    drawn = hash_below(f"concat('{sampling.seed}:', CAST(gem_row AS STRING))", sampling.keep)
    return f"{negative(plan, sampling.task)} AND NOT ({drawn})"


def _moment(engine: Engine, test_fraction: float) -> int:
    rows = engine.rows("SELECT COUNT(*) FROM labelled WHERE gem_observed = 1")[0][0]
    if not rows:
        return 0
    keep = 1 - ratio(test_fraction)
    place = min(-(-rows * keep.numerator // keep.denominator), rows - 1)
    found = engine.rows(f"SELECT gem_time FROM labelled WHERE gem_observed = 1 ORDER BY gem_time LIMIT 1 OFFSET {place}")
    return int(found[0][0])


def drop_counts(engine: Engine, plan: Plan) -> dict[str, int]:
    """Impressions dropped, by reason."""
    checks = invalid(plan)
    case = " ".join(f"WHEN {condition} THEN '{reason}'" for reason, condition in checks.items())
    found = engine.rows(
        f"SELECT reason, COUNT(*) FROM (SELECT CASE {case} END AS reason FROM {plan.impressions} r) t WHERE reason IS NOT NULL GROUP BY reason"
    )
    out = {str(reason): int(count) for reason, count in found}
    out["no observed label"] = int(engine.rows("SELECT COUNT(*) FROM labelled WHERE gem_observed = 0")[0][0])
    if plan.definition.sampling is not None:
        out["negative down-sampling"] = int(engine.rows(f"SELECT COUNT(*) FROM placed WHERE {sampled_out(plan)}")[0][0])
    return out
