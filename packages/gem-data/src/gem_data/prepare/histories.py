"""Which events a row sees: counting those before a moment, for all rows of a user in one pass."""

from collections.abc import Sequence

from gem_data.prepare.engine import Engine
from gem_data.prepare.plan import NOTHING, Plan, events_of, feature_columns
from gem_data.prepare.where import quote


def count_events(engine: Engine, plan: Plan) -> None:
    """Make ``counts_K`` for each offset number K: how many events of each history lie before ``gem_at`` - offset, by probe.

    A probe sorts before events of its own second, so that what is counted is strictly earlier.
    """
    for k, (offset, histories) in enumerate(offsets(plan).items()):
        once = "DISTINCT " if plan.shared else ""
        probes = f"SELECT {once}gem_user, gem_at - {offset} AS gem_moment, 0 AS gem_kind, -1 AS history, gem_probe FROM kept"
        events = [f"SELECT gem_user, gem_time, 1, {h}, {NOTHING} FROM events_{h}" for h in histories]
        sums = [f"SUM(CASE WHEN history = {h} THEN 1 ELSE 0 END) OVER earlier AS gem_count_{h}" for h in histories]
        names = ", ".join(f"CAST(gem_count_{h} AS BIGINT) AS gem_count_{h}" for h in histories)
        engine.create(
            f"counts_{k}",
            f"""SELECT gem_probe, {names} FROM (SELECT gem_probe, gem_kind, {", ".join(sums)} FROM ({" UNION ALL ".join([probes, *events])}) b
            WINDOW earlier AS (PARTITION BY gem_user ORDER BY gem_moment, gem_kind ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)) c
            WHERE gem_kind = 0""",
        )


def offsets(plan: Plan) -> dict[int, list[int]]:
    """``{seconds: history numbers}``: the moments before an impression at which events are counted, for the end and for the window's begin."""
    out: dict[int, list[int]] = {}
    for h, history in enumerate(plan.definition.histories):
        for offset in (history.lag, history.window):
            if offset is not None and h not in out.setdefault(offset, []):
                out[offset].append(h)
    return out


def make_events(engine: Engine, plan: Plan) -> None:
    """Make the views ``events_H`` and the tables ``starts_H``: where each user's events begin among all, in the order of users."""
    for h, (history, group) in enumerate(zip(plan.definition.histories, plan.groups, strict=True)):
        engine.view(f"events_{h}", events_of(history, feature_columns(group, history).values()))
        engine.create(
            f"starts_{h}",
            f"""SELECT gem_user, CAST(SUM(n) OVER (ORDER BY gem_user ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) - n AS BIGINT) AS start
            FROM (SELECT gem_user, COUNT(*) AS n FROM events_{h} GROUP BY gem_user) t""",
        )


def span_rows(engine: Engine, plan: Plan) -> None:
    """Make ``spanned``: ``kept`` with ``gem_begin_H, gem_end_H``, the part of all events of history H, in their order, that a row sees."""
    at = list(offsets(plan))
    columns, joins = ["k.*"], [f"LEFT JOIN counts_{k} ON counts_{k}.gem_probe = k.gem_probe" for k in range(len(at))]
    for h, (history, group) in enumerate(zip(plan.definition.histories, plan.groups, strict=True)):
        end = f"counts_{at.index(history.lag)}.gem_count_{h}"
        last = history.last or (group.max_length if group.truncate == "newest" else None)
        begin = ["0"] if last is None else [f"{end} - {last}", "0"]
        if history.window is not None:
            begin.append(f"LEAST(counts_{at.index(history.window)}.gem_count_{h}, {end})")
        columns.append(f"COALESCE(starts_{h}.start, 0) + GREATEST({', '.join(begin)}) AS gem_begin_{h}")
        columns.append(f"COALESCE(starts_{h}.start, 0) + {end} AS gem_end_{h}")
        joins.append(f"LEFT JOIN starts_{h} ON starts_{h}.gem_user = k.gem_user")
    engine.create("spanned", f"SELECT {', '.join(columns)} FROM kept k {' '.join(joins)}")


def visible_events(h: int, columns: Sequence[str]) -> str:
    """Events of history H that come before the end of their user's last training history."""
    numbered = f"SELECT *, ROW_NUMBER() OVER (PARTITION BY gem_user ORDER BY gem_order, gem_row) AS gem_number FROM events_{h}"
    ends = f"SELECT gem_user, MAX(gem_end_{h}) AS seen FROM spanned WHERE gem_split = 'train' GROUP BY gem_user"
    return f"""SELECT {", ".join(f"e.{quote(c)}" for c in columns)} FROM ({numbered}) e JOIN ({ends}) m ON m.gem_user = e.gem_user
        JOIN starts_{h} s ON s.gem_user = e.gem_user WHERE s.start + e.gem_number <= m.seen"""


def sorted_events(h: int, columns: Sequence[str]) -> str:
    """Events of history H by user and time, as ``gem_begin_H, gem_end_H`` number them."""
    return f"SELECT {', '.join(['gem_time', *(quote(c) for c in columns)])} FROM events_{h} ORDER BY gem_user, gem_order, gem_row"
