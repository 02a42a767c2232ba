"""A prepared folder as the source ``files`` reads it: batches hold the rows that were written."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from gem_data.sources.files import load


@pytest.mark.parametrize("shared", [False, True])
def test_batches_hold_the_prepared_rows(shop: Any, shared: bool) -> None:
    n = 300
    rng = np.random.default_rng(2)
    shop.log = {
        "user": [f"u{k}" for k in rng.integers(0, 9, n)],
        "time": np.sort(rng.integers(0, 200, n)),
        "item": rng.integers(1, 9, n),
        "click": rng.integers(-1, 2, n),
        "request": np.arange(n) // 4,
    }
    shop.table("log", shop.log)
    shop.schema["request"] = "request"
    shop.schema["task"].append({"name": "again", "label": "again"})
    shop.definition["impressions"]["share_histories"] = shared
    shop.definition["conversions"] = [{"task": "again", "table": "log", "where": [["click", "==", 1]], "match": ["item"], "within": 30}]
    data = shop.run()
    source = load(path=shop.folder / "out")
    assert source.ledger() == data["ledger"]
    for split in ("train", "test"):
        rows = shop.rows(split)
        batches = list(source.batches(split, batch_size=64, seed=None))
        assert sum(batch.rows for batch in batches) == len(rows) == data["ledger"][split]
        assert torch.cat([b.ids["item"].values for b in batches]).tolist() == [r["item"] for r in rows]
        for task in ("ctr", "again"):
            labels, masks = (torch.cat([getattr(b, what)[task] for b in batches]).tolist() for what in ("labels", "masks"))
            seen = [bool(m) for m in masks]
            assert seen == [r[f"mask.{task}"] for r in rows]
            assert [v for v, m in zip(labels, seen, strict=True) if m] == [r[f"label.{task}"] for r in rows if r[f"mask.{task}"]]
        times = []
        for batch in batches:
            offsets, values = batch.event_offsets["clicks"].offsets.tolist(), batch.event_time["clicks"].tolist()
            times += [values[a:b] for a, b in pairwise(offsets)]
        assert times == [r["clicks.time"] for r in rows]
