"""Time and peak memory of ``gem data prepare`` on a generated log.

Every event of it is an impression, a fifth of them are clicks, and histories are the last 50 clicks.

    python cpu_prepare.py [--events 10000000] [--memory 4GB] [--csv FILE]

Prints one line of JSON. The preparation runs in a process of its own, whose peak of resident memory counts, files that it maps included.
"""

import argparse
import csv
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = """
user = "user"
time = "time"
[[id]]
name = "user"
encode = "hash"
rows = 1000000
[[id]]
name = "item"
encode = "{encode}"
{rows}
[[sequence]]
name = "clicks"
max_length = 50
time = "time"
[[sequence.id]]
name = "item"
encode = "{encode}"
{rows}
table = "item"
[[task]]
name = "ctr"
label = "click"
"""
DEFINITION = """
schema = "schema.toml"
[tables.log]
path = "log.parquet"
user = "user"
time = "time"
[impressions]
table = "log"
[[histories]]
name = "clicks"
table = "log"
where = [["click", "==", 1]]
[split]
kind = "time"
test_fraction = 0.1
"""


def generate(folder: Path, events: int, seed: int = 1) -> None:
    """A log in the order of time over 30 days; users are unequally busy (lognormal, sigma 1.5), items follow Zipf's law."""
    rng = np.random.default_rng(seed)
    busy = np.cumsum(rng.lognormal(sigma=1.5, size=max(events // 50, 1)))
    kinds = pa.schema([("user", pa.int64()), ("time", pa.int64()), ("item", pa.int64()), ("click", pa.int8())])
    step = 1_000_000
    with pq.ParquetWriter(folder / "log.parquet", kinds, compression="zstd") as writer:
        for at in range(0, events, step):
            n = min(step, events - at)
            times = np.sort(rng.integers(at * 2_592_000 // events, (at + n) * 2_592_000 // events, n))
            users, items = np.searchsorted(busy, rng.random(n) * busy[-1]), rng.zipf(1.2, n) % 1_000_000
            writer.write_table(pa.table([users, times, items, (rng.random(n) < 0.2).astype(np.int8)], schema=kinds), row_group_size=131_072)


def measure(folder: Path, memory: str) -> dict[str, Any]:
    """Prepare in a child process: seconds, peak memory, and what it wrote."""
    began = time.perf_counter()
    gem = [sys.executable, "-c", "from gem_core.cli.main import main; main()"]
    command = [*gem, "data", "prepare", str(folder / "definition.toml"), "--out", str(folder / "out"), "--memory", memory]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    data = json.loads((folder / "out" / "data.json").read_text())
    written = sum(path.stat().st_size for path in (folder / "out").rglob("*.parquet"))
    return {
        "seconds": round(seconds, 1),
        "peak_gb": round(peak / 1e9, 2),
        "rows": data["ledger"]["read"],
        "events_in_rows": data["leakage"]["clicks"],
        "written_gb": round(written / 1e9, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--memory", default="4GB")
    parser.add_argument("--encode", choices=("hash", "vocabulary"), default="hash")
    parser.add_argument("--csv", type=Path, help="append a line to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generate(folder, arguments.events)
        rows = "rows = 1000000" if arguments.encode == "hash" else ""
        (folder / "schema.toml").write_text(SCHEMA.format(encode=arguments.encode, rows=rows))
        (folder / "definition.toml").write_text(DEFINITION)
        load = os.getloadavg()[0]
        result = measure(folder, arguments.memory)
    about = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": f"python cpu_prepare.py --events {arguments.events} --memory {arguments.memory} --encode {arguments.encode}",
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "load_before": round(load, 2),
        **{name: version(name) for name in ("duckdb", "pyarrow", "numpy")},
    }
    print(json.dumps(result | about))
    if arguments.csv is not None:
        new = not arguments.csv.exists()
        with arguments.csv.open("a", newline="") as file:
            table = csv.DictWriter(file, [*result, *about])
            if new:
                table.writeheader()
            table.writerow(result | about)


if __name__ == "__main__":
    main()
