"""The benchmark of ``gem data prepare`` runs, at a size that costs nothing, and reports what was written."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cpu_prepare.py"


@pytest.mark.skipif(not SCRIPT.exists(), reason="the benchmark is not beside the tests")
def test_the_benchmark_reports_and_appends(tmp_path: Path) -> None:
    table = tmp_path / "results.csv"
    command = [sys.executable, str(SCRIPT), "--events", "5000", "--memory", "256MB", "--encode", "vocabulary", "--csv", str(table)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert result["rows"] == 5000
    assert result["events_in_rows"] > 5000
    assert 0 < result["peak_gb"] < 4
    (line,) = csv.DictReader(table.open())
    assert line["command"].endswith("--events 5000 --memory 256MB --encode vocabulary")
    assert line["duckdb"]
