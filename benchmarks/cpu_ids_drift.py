"""Items that come and go: a table with managed ids against a hash into as many rows, and into so many that ids hardly collide.

    python benchmarks/cpu_ids_drift.py --seeds 3

The source ``generated`` in time order; every item gets a new 62-bit id every ``--life`` days, at a time of its own, with the item's effect unchanged.
Arms differ in the item table alone: ``managed`` (``[[embedding.ids]]``, distance_lfu), ``hash`` (the same number of rows) and ``wide`` (a hash into
2^20 rows). NE on the test rows, which are the last days; one line a run. A seed is that of data and weights.
"""

import argparse
import csv
import os
import platform
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gem_core.batch import Batch
from gem_core.config.load import load_config
from gem_core.spec import DataSchema, DataSource
from gem_core.testing.plugins import fake_host, fake_module, fake_plugin
from gem_core.train.ids.layout import keys_of
from gem_core.train.run import train
from gem_data.options import GeneratedOptions
from gem_data.sources.generated import Generated

DAY = 86_400
WIDE = 1 << 20
ARMS = ("managed", "hash", "wide")


class Drifting(Generated):
    """``generated`` with items that change their ids; ``rows`` above 0 hashes them into so many rows."""

    def __init__(self, *, life: int, hash_rows: int, **options: Any) -> None:
        self.life, self.hash_rows = life * DAY, hash_rows
        super().__init__(GeneratedOptions(**options))

    def schema(self) -> DataSchema:
        plain, rows = super().schema(), self.hash_rows or 1 << 62
        ids = tuple(replace(f, cardinality=rows) if f.name == "item" else f for f in plain.ids)
        (history,) = plain.sequences
        events = tuple(replace(f, cardinality=rows) if f.name == "item" else f for f in history.ids)
        return replace(plain, ids=ids, sequences=(replace(history, ids=events),))

    def _batch(self, rows: Any, global_rows: int) -> Batch:
        batch = super()._batch(rows, global_rows)
        values = batch.ids.values.clone()
        assert batch.time is not None
        for key, time in (("item", batch.time), ("history.item", batch.event_time["history"])):
            start = batch.ids.starts[batch.ids.keys.index(key)]
            values[start : start + time.numel()] = torch.from_numpy(self._renamed(batch.ids.ids(key).numpy(), time.numpy()))
        return replace(batch, ids=replace(batch.ids, values=values))

    def _renamed(self, item: Any, time: Any) -> Any:
        phase = (keys_of(item) % np.uint64(self.life)).astype(np.int64)
        keys = keys_of(item + (time + phase) // self.life * (1 << 32))
        if self.hash_rows:
            return (1 + keys % np.uint64(self.hash_rows - 1)).astype(np.int64)
        return 1 + (keys >> np.uint64(3)).astype(np.int64)


def measure(arm: str, seed: int, options: argparse.Namespace, out: Path) -> dict[str, Any]:
    hash_rows = {"managed": 0, "hash": options.table, "wide": WIDE}[arm]
    rule = f'embedding.ids=[{{pattern = "item", rows = {options.table}, buckets = 16, evict_every = {options.evict_every}}}]'
    settings = {
        "data.source": "drifting",
        "data.options": f"{{rows = {options.rows}, test_rows = 50000, items = 2000, zipf = 0.5, conversion = false, history_length = 20, "
        f"drift = 0.0, seed = {seed}, life = {options.life}, hash_rows = {hash_rows}}}",
        "data.batch_size": 512,
        "model.name": "dlrm",
        "run.seed": seed,
        "run.threads": 1,
        "train.shuffle": "false",
        "optim.schedule": "cosine",
    }
    words = [f"{key}={value}" for key, value in settings.items()] + ([rule] if arm == "managed" else [])
    summary = train(load_config(out / "empty.toml", [*words, f"run.out={out / f'{arm}-{seed}'}"]))
    return {
        "arm": arm,
        "table_rows": hash_rows or options.table,
        "seed": seed,
        "train_rows": options.rows,
        "life_days": options.life,
        "evict_every": options.evict_every,
        "ne": round(summary["test"]["ctr"]["ne"], 5),
        "auc": round(summary["test"]["ctr"]["auc"], 5),
        "best_ne": round(summary["baselines"]["bayes"]["ctr"]["ne"], 5) if "bayes" in summary["baselines"] else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=300_000, help="training rows")
    parser.add_argument("--table", type=int, default=2501, help="rows of the managed and of the hashed item table")
    parser.add_argument("--life", type=int, default=6, help="days that an item keeps an id, of 60 days in all")
    parser.add_argument("--evict-every", type=int, default=10, help="steps between evictions")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--csv", type=Path, help="append the results to this file")
    options = parser.parse_args()
    declared = DataSource(name="drifting", summary="items that change their ids", load="ids_drift_source:Drifting")
    plugin = fake_plugin("drifting", {"gem_data_sources": [declared]})
    where = {"date": datetime.now(UTC).date().isoformat(), "machine": f"{platform.machine()}, {os.cpu_count()} cores", "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder, fake_module("ids_drift_source", Drifting=Drifting), fake_host(plugin):
        (Path(folder) / "empty.toml").touch()
        for seed in range(1, options.seeds + 1):
            for arm in ARMS:
                row = measure(arm, seed, options, Path(folder)) | where
                print(row, flush=True)
                if options.csv is not None:
                    new = not options.csv.exists()
                    with options.csv.open("a", newline="") as file:
                        writer = csv.DictWriter(file, row)
                        if new:
                            writer.writeheader()
                        writer.writerow(row)


if __name__ == "__main__":
    main()
