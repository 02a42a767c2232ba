"""Four gloo ranks: the ledger names an injected slow rank and an injected slow link, and nobody where nothing is injected."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gem_train_ranks import run_ranks

from gem_core.train.ledger.ranks import WAIT
from gem_core.train.log import read_log

STEPS = 16
"""In two windows."""
Trained = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def trained(recipe: str, tmp_path: Path) -> Trained:
    """The ``time`` of each window of a run of four ranks, the first window, where ranks warm up, left out."""

    def run(steps: int = STEPS, **injected: Any) -> list[dict[str, Any]]:
        settings = {f"parallel.options.fake-exchange.{key}": json.dumps(value) for key, value in injected.items()}
        settings |= {"parallel.strategies": "['fake-exchange']", "train.max_steps": steps, "train.log_every": steps // 2, "train.epochs": 12}
        settings |= {"train.steps_csv": "true", "train.trace": "[3]"}
        ranks = run_ranks(4, tmp_path, " ".join([f"train -c {recipe}", *(f"--set {key}={value}" for key, value in settings.items())]))
        assert ranks.codes == [0] * 4, ranks.err
        return [record["time"] for record in read_log(tmp_path / "run") if record["event"] == "train"][1:]

    return run


def test_a_slow_rank_is_named_and_no_link(trained: Trained, tmp_path: Path) -> None:
    for time in trained(slow_rank=2):
        named = time["straggler"]
        assert named["rank"] == 2
        assert named["seconds"] == pytest.approx(0.15, rel=0.3)
        assert named["share_of_steps"] > 0.9
        assert time["slowest"]["rank"] == 2
        assert "slow_exchange" not in time
        assert time["parts"][WAIT] == pytest.approx(0.75 * 0.15, rel=0.3)  # three of four ranks wait
        assert sum(time["parts"].values()) == pytest.approx(time["step"])
        assert (time["bound"]["rank"], time["bound"]["by"]) == (2, "local work")
        assert 0.15 < time["bound"]["seconds"] <= time["step"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["time"]["steps"] == STEPS
    assert 0.15 < summary["time"]["p50"] <= summary["time"]["p99"]
    assert "rank 2 is slow" in summary["time"]["named"]
    with (tmp_path / "run" / "steps.csv").open() as file:
        rows = [(int(row["step"]), int(row["rank"]), int(row["rows"])) for row in csv.DictReader(file)]
    assert rows == [(step, rank, 4) for step in range(1, STEPS + 1) for rank in range(4)]
    for rank in range(4):
        events = json.loads((tmp_path / "run" / "trace" / f"step-3-rank-{rank}.json").read_text())["traceEvents"]
        assert {"forward", "backward", "optimiser", "tables", "agree"} <= {event["name"] for event in events}


def test_a_slow_link_is_named_and_no_rank(trained: Trained) -> None:
    """Rank 2 sleeps inside its calls of one exchange; its partner feels that, and the other pair waits later."""
    for time in trained(slow_link=2):
        named = time["slow_exchange"]
        assert (named["name"], named["ranks"]) == ("rows", [2, 3])
        assert named["seconds"] == pytest.approx(0.15, rel=0.3)
        assert "straggler" not in time


def test_the_report_names_a_slow_rank_and_a_slow_link_of_one_run(trained: Trained, tmp_path: Path) -> None:
    """The link is slower than the rank, which the ranks of the link would wait for all the same."""
    trained(slow_rank=1, slow_link=2, link_seconds=0.5)
    report = (tmp_path / "run" / "report.html").read_text()
    for named in ("rank 1 is slow", "rows is slow between ranks 2, 3"):
        assert f"{named} (in" in report, named


def test_nobody_is_named_without_cause(trained: Trained) -> None:
    for time in trained(steps=60):
        assert not {"straggler", "slow_exchange"} & time.keys()
        assert time["imbalance"] >= 0
