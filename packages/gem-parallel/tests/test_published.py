"""The published points: the kept results are what the model says today, and the scaling series is within 10 %."""

import csv
import runpy
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    return runpy.run_path(str(BENCHMARKS / "published.py"))


def test_scaling_from_256_to_4096_ranks_is_within_ten_per_cent(published: dict[str, Any]) -> None:
    rows = published["scaling"]()
    assert [point for point, _, _ in rows][-1] == "scaling at 4,096 GPUs"
    for point, was, predicted in rows:
        assert predicted == pytest.approx(was, rel=0.10), point
    assert rows[-1][1] == pytest.approx(0.90, abs=0.005)  # the figure that the paper's abstract rounds to


def test_kept_results_are_what_the_model_says(published: dict[str, Any]) -> None:
    with (BENCHMARKS / "results" / "published.csv").open(encoding="utf-8") as file:
        kept = {row["point"]: row for row in csv.DictReader(file)}
    for point, was, predicted in published["table"]():
        assert float(kept[point]["published"]) == pytest.approx(was, rel=1e-3)
        assert float(kept[point]["predicted"]) == pytest.approx(predicted, rel=2e-3), point
    for what, why in published["ASSUMED"]:
        assert kept[f"assumed: {what}"]["published"] == why
