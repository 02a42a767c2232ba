"""Prepared rows against a slow reference that follows the definition word by word."""

import hashlib
import math
import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from gem_core.spec import RequestError

LOG_TYPES = pa.schema([(name, pa.int64()) for name in ("user", "time", "item", "click", "request")])
BUY_TYPES = pa.schema([(name, pa.int64()) for name in ("user", "time", "item")])
Row = dict[str, Any]


def draw_tables(seed: int) -> tuple[list[Row], list[Row]]:
    """A log and purchases of three users within a few seconds: full of ties, repeated items and missing values."""
    draw = random.Random(seed)

    def maybe(value: int) -> int | None:
        return None if draw.random() < 0.06 else value

    log = [
        {
            "user": maybe(draw.randrange(3)),
            "time": maybe(draw.randrange(-3, 13)),
            "item": maybe(draw.randrange(1, 10)),
            "click": draw.choice([0, 1, 1, None, -1]),
            "request": draw.randrange(5),
        }
        for _ in range(draw.randrange(15, 60))
    ]
    bought = [{"user": maybe(draw.randrange(3)), "time": draw.randrange(-3, 16), "item": maybe(draw.randrange(1, 10))} for _ in range(25)]
    return log, bought


splits = st.one_of(
    st.integers(0, 10).map(lambda t: {"kind": "time", "test_from": t}),
    st.sampled_from([0.1, 0.5, 0.7]).map(lambda f: {"kind": "time", "test_fraction": f}),
    st.sampled_from([0.5, 0.8]).map(lambda f: {"kind": "user_fraction", "train_fraction": f}),
    st.integers(1, 3).map(lambda k: {"kind": "leave_last", "last": k}),
    st.tuples(st.sampled_from(["request", "user"]), st.sampled_from([0.3, 0.6]), st.integers(0, 2)).map(
        lambda d: {"kind": "hash", "by": d[0], "test_fraction": d[1], "seed": d[2]}
    ),
)
options = st.fixed_dictionaries(
    {
        "lag": st.sampled_from([0, 0, 1, 4]),
        "window": st.sampled_from([None, None, 1, 5]),
        "last": st.integers(1, 4),
        "within": st.integers(0, 6),
        "share": st.booleans(),
        "keep": st.sampled_from([None, 0.5]),
        "split": splits,
    }
)


def drawn_below(text: str, share: float) -> bool:
    return int(hashlib.md5(text.encode()).hexdigest()[:15], 16) < math.floor(round(share * 10) * 16**15 / 10)


def is_test(row: Row, rows: list[Row], split: dict[str, Any]) -> bool:
    ordered = sorted(rows, key=lambda r: (r["time"], r["row"]))
    own = [r["row"] for r in ordered if r["user"] == row["user"]]
    match split["kind"]:
        case "time" if "test_from" in split:
            return bool(row["time"] >= split["test_from"])
        case "time":
            place = -(-len(rows) * round(10 - 10 * split["test_fraction"]) // 10)
            return bool(row["time"] >= ordered[min(place, len(rows) - 1)]["time"])
        case "user_fraction":
            return own.index(row["row"]) >= -(-len(own) * round(10 * split["train_fraction"]) // 10)
        case "leave_last":
            return own.index(row["row"]) >= len(own) - split["last"]
    return drawn_below(f"{split['seed']}:{row[split['by']]}", split["test_fraction"])


def reference(log: list[Row], bought: list[Row], o: dict[str, Any]) -> tuple[dict[str, list[Row]], dict[str, int]]:
    """``(rows of each split, ledger)`` by definition."""
    ledger = {"read": len(log)}
    end = max(b["time"] for b in bought)
    valid: list[Row] = []
    for number, row in enumerate(log):
        reason = "no user" if row["user"] is None else "no time" if row["time"] is None else None
        if reason is None:
            found = [
                b["time"] - row["time"]
                for b in bought
                if (b["user"], b["item"]) == (row["user"], row["item"]) and b["time"] >= row["time"] and b["item"] is not None
            ]
            delay = min(found, default=None)
            bought_in_time = delay is not None and delay <= o["within"]
            closed = row["time"] + o["within"] <= end
            made = row | {"row": number, "ctr": int(row["click"] == 1), "seen": row["click"] in (0, 1), "cvr": int(bought_in_time), "closed": closed}
            made["delay"] = delay if bought_in_time else None
            reason = None if made["seen"] or closed else "no observed label"
            valid += [made] if reason is None else []
        if reason:
            ledger[f"dropped: {reason}"] = ledger.get(f"dropped: {reason}", 0) + 1
    out: dict[str, list[Row]] = {"train": [], "test": []}
    for row in valid:
        split = "test" if is_test(row, valid, o["split"]) else "train"
        negative = row["seen"] and not row["ctr"]
        if o["keep"] and split == "train" and negative and not drawn_below(f"0:{row['row']}", o["keep"]):
            ledger["dropped: negative down-sampling"] = ledger.get("dropped: negative down-sampling", 0) + 1
        else:
            out[split].append(row)
    for split, rows in out.items():
        ledger[split] = len(rows)
        for row in rows:
            shared = [r for r in rows if o["share"] and (r["user"], r["request"]) == (row["user"], row["request"])] or [row]
            row["at"], row["first"] = min(r["time"] for r in shared), min(r["row"] for r in shared)
            row["clicks"] = history(log, row["user"], row["at"], o)
        rows.sort(key=lambda r: (r["at"], r["first"], r["time"], r["row"]))
    return out, ledger


def history(log: list[Row], user: int, at: int, o: dict[str, Any]) -> list[tuple[int, int]]:
    events = [(r["time"], n, r["item"] or 0) for n, r in enumerate(log) if r["click"] == 1 and r["user"] == user and r["time"] is not None]
    before = [(time, item) for time, _, item in sorted(events) if time < at - o["lag"] and (o["window"] is None or time >= at - o["window"])]
    return before[-o["last"] :]


def written(rows: list[Row]) -> list[tuple[Any, ...]]:
    return [
        (
            *(r[c] for c in ("_user", "_request", "_time", "item", "label.ctr", "mask.ctr", "label.cvr", "mask.cvr", "delay.cvr")),
            list(zip(r["clicks.time"], r["clicks.item"], strict=True)),
        )
        for r in rows
    ]


def expected(rows: list[Row]) -> list[tuple[Any, ...]]:
    return [(r["user"], r["request"], r["time"], r["item"] or 0, r["ctr"], r["seen"], r["cvr"], r["closed"], r["delay"], r["clicks"]) for r in rows]


def lay_out(shop: Any, log: list[Row], bought: list[Row], o: dict[str, Any]) -> None:
    shop.table("log", {name: [row[name] for row in log] for name in LOG_TYPES.names}, LOG_TYPES, row_group_size=7)
    shop.table("buys", {name: [row[name] for row in bought] for name in BUY_TYPES.names}, BUY_TYPES)
    shop.schema |= {"request": "request", "task": [{"name": "ctr", "label": "click"}, {"name": "cvr", "label": "buy", "delay": "delay"}]}
    shop.definition["tables"]["buys"] = {"path": "buys.parquet", "user": "user", "time": "time"}
    shop.definition["impressions"]["share_histories"] = o["share"]
    shop.definition["histories"][0] |= {"lag": o["lag"], "last": o["last"]} | ({"window": o["window"]} if o["window"] else {})
    shop.definition["conversions"] = [{"task": "cvr", "table": "buys", "match": ["item"], "within": o["within"]}]
    shop.definition["split"] = o["split"]
    if o["keep"]:
        shop.definition["sampling"] = {"task": "ctr", "keep": o["keep"]}


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), o=options)
def test_rows_are_those_of_the_definition(make_shop: Callable[[], Any], seed: int, o: dict[str, Any]) -> None:
    log, bought = draw_tables(seed)
    shop = make_shop()
    lay_out(shop, log, bought, o)
    rows, ledger = reference(log, bought, o)
    if not rows["train"] or not rows["test"]:
        event("an empty split")
        with pytest.raises(RequestError, match="it has no row"):
            shop.run()
        return
    data = shop.run()
    event(f"shared: {o['share']}")
    assert data["ledger"] == ledger
    for split in ("train", "test"):
        assert written(shop.rows(split)) == expected(rows[split])
