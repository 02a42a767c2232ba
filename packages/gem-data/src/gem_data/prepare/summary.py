"""What ``data.json`` says of a prepared folder: its files, and the account of rows, users and events."""

from typing import Any

from gem_data.ledger import Ledger
from gem_data.prepare.engine import Engine
from gem_data.prepare.output import USER
from gem_data.prepare.placing import drop_counts, negative, sampled_out
from gem_data.prepare.plan import Plan, raw
from gem_data.prepare.stage import Staged
from gem_data.prepare.where import sql
from gem_data.prepare.writer import SplitSummary


def summary_of(engine: Engine, plan: Plan, staged: dict[str, Staged], splits: dict[str, SplitSummary], moment: int | None) -> dict[str, Any]:
    """The content of ``data.json``.

    Args:
        splits: what was written of each split.
        moment: the first second of the test split, where the split is by time.

    Raises:
        RequestError: rows, users or events do not add up.
    """
    main = staged[plan.definition.impressions.table]
    return {
        "format": 1,
        "splits": {name: split.files for name, split in splits.items()},
        "ledger": _rows(engine, plan, main, splits),
        "users": _users(engine, plan),
        "events": {h.name: _events(engine, plan, k, staged[h.table]) for k, h in enumerate(plan.definition.histories)},
        "sides": {
            side.table: {name: {"matched": split.matched[s], "unmatched": split.rows - split.matched[s]} for name, split in splits.items()}
            for s, side in enumerate(plan.definition.sides)
        },
        "labels": {name: {task: {"observed": n[0], "positive": n[1]} for task, n in split.labels.items()} for name, split in splits.items()},
        "unknown": {name: dict(split.unknown) for name, split in splits.items()},
        "cold": ({USER: _cold_users(engine)} if plan.table.user else {}) | dict(splits["test"].cold),
        "test_from": moment,
        "calibration": _calibration(engine, plan),
        "definition": plan.definition.model_dump(mode="json", by_alias=True, exclude_defaults=True),
    }


def _rows(engine: Engine, plan: Plan, main: Staged, splits: dict[str, SplitSummary]) -> dict[str, int]:
    ledger = Ledger(main.rows + sum(main.dropped.values()))
    for reason, count in {**main.dropped, **drop_counts(engine, plan)}.items():
        ledger.drop(reason, count)
    for name, split in splits.items():
        ledger.keep(name, split.rows)
    return ledger.counts()


def _users(engine: Engine, plan: Plan) -> dict[str, int]:
    """Users with an impression: those that are written, and those all of whose rows were dropped."""
    table = plan.impressions
    ledger = Ledger(_one(engine, f"SELECT COUNT(DISTINCT gem_user) FROM {table}"), "users")
    ledger.keep("written", _one(engine, "SELECT COUNT(DISTINCT gem_user) FROM kept"))
    gone = f"SELECT DISTINCT r.gem_user FROM {table} r LEFT JOIN (SELECT DISTINCT gem_user FROM kept) k ON k.gem_user = r.gem_user"
    ledger.drop("every row dropped", _one(engine, f"SELECT COUNT(*) FROM ({gone} WHERE k.gem_user IS NULL AND r.gem_user IS NOT NULL) t"))
    return ledger.counts()


def _events(engine: Engine, plan: Plan, h: int, table: Staged) -> dict[str, int]:
    history = plan.definition.histories[h]
    fits, source = sql(history.where), raw(history.table)
    ledger = Ledger(table.rows + sum(table.dropped.values()), "events")
    for reason, count in table.dropped.items():
        ledger.drop(reason, count)
    ledger.drop("not selected by where", _one(engine, f"SELECT COUNT(*) FROM {source} WHERE NOT COALESCE({fits}, FALSE)"))
    ledger.drop("no user or time", _one(engine, f"SELECT COUNT(*) FROM {source} WHERE ({fits}) AND (gem_user IS NULL OR gem_time IS NULL)"))
    known = "SELECT DISTINCT gem_user FROM kept"
    reached = _one(engine, f"SELECT COUNT(*) FROM events_{h} e JOIN ({known}) k ON k.gem_user = e.gem_user")
    ledger.keep("of users written", reached)
    ledger.drop("user is not written", _one(engine, f"SELECT COUNT(*) FROM events_{h}") - reached)
    return ledger.counts()


def _cold_users(engine: Engine) -> int:
    """Test rows whose user has no training row."""
    train = "SELECT DISTINCT gem_user FROM kept WHERE gem_split = 'train'"
    joined = f"kept k LEFT JOIN ({train}) t ON t.gem_user = k.gem_user"
    return _one(engine, f"SELECT COUNT(*) FROM {joined} WHERE k.gem_split = 'test' AND t.gem_user IS NULL")


def _calibration(engine: Engine, plan: Plan) -> dict[str, Any] | None:
    """Down-sampling keeps a share w of the negatives, which multiplies the odds by 1 / w (He et al. 2014, section 6.3)."""
    sampling = plan.definition.sampling
    if sampling is None:
        return None
    negatives = _one(engine, f"SELECT COUNT(*) FROM placed WHERE {negative(plan, sampling.task)}")
    left_out = _one(engine, f"SELECT COUNT(*) FROM placed WHERE {sampled_out(plan)}")
    return {
        "task": sampling.task,
        "rate": sampling.keep,
        "seed": sampling.seed,
        "negatives": negatives,
        "kept": negatives - left_out,
        "correction": "p = q / (q + (1 - q) / rate)",
    }


def _one(engine: Engine, query: str) -> int:
    return int(engine.rows(query)[0][0])
