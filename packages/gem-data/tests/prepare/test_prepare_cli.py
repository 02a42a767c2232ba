"""``gem data prepare`` and ``gem data audit`` as commands, splits with warnings, and down-sampling end to end."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from gem_core.spec import RequestError, RunFailed
from gem_data.audit import audit
from gem_data.cli import app
from gem_data.cli.prepare import parse_memory
from gem_data.prepare import prepare
from gem_data.splits import ColdSplit, OneClassSplit


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_prepare_prints_where_every_row_went(shop: Any) -> None:
    shop.table("log", {**shop.log, "user": [1, 1, 2, 1, None, 1]})
    done = run("prepare", shop.write(), "--out", shop.folder / "out", "--memory", "1GB")
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[1:5] == ["rows 6 train 4", "test 1", "dropped: no user 1", "users 2 written 2"]
    assert "events: clicks 6 of users written 2" in lines
    assert lines[-1] == f"prepared: {shop.folder / 'out'}"
    assert "warning: the test split has 0 positives in 1 labels of 'ctr'; AUC and NE are undefined on it" in done.stderr


def test_audit_prints_the_same_account_and_fails_on_a_difference(shop: Any) -> None:
    shop.run()
    done = run("audit", shop.folder / "out")
    assert done.exit_code == 0, done.output
    assert "the files hold what data.json says" in done.stdout
    path = shop.folder / "out" / "data.json"
    data = json.loads(path.read_text())
    data["ledger"]["train"] += 1
    path.write_text(json.dumps(data))
    failed = run("audit", shop.folder / "out")
    assert isinstance(failed.exception, RunFailed)
    assert failed.exception.exit_code == 1
    assert "the ledger counts 5 train rows, the files hold 4" in str(failed.exception)


def test_a_wrong_request_is_refused_before_work(shop: Any) -> None:
    assert isinstance(run("prepare", shop.write(), "--out", shop.folder / "out", "--memory", "lots").exception, RequestError)
    assert isinstance(run("prepare", shop.folder / "none.toml", "--out", shop.folder / "out").exception, RequestError)
    assert not (shop.folder / "out").exists()


@pytest.mark.parametrize(("text", "size"), [("4GB", 4 * 10**9), ("256MB", 256 * 10**6), ("2GiB", 2**31), ("512 MiB", 2**29)])
def test_sizes(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["4", "GB", "-4GB", "0.5GB", "255MB", "4TB", ""])
def test_no_sizes(text: str) -> None:
    with pytest.raises(RequestError, match="it is no size of 256MB or more"):
        parse_memory(text)


@pytest.mark.filterwarnings("ignore:2 of 2 test rows have an id")
def test_case_D13_poor_splits_warn(shop: Any) -> None:
    shop.table("log", {**shop.log, "user": [1, 1, 1, 1, 2, 2], "click": [1, 1, 0, 0, 1, 1]})
    with (
        pytest.warns(OneClassSplit, match="the test split has 2 positives in 2 labels"),
        pytest.warns(ColdSplit, match="2 of 2 test rows have a user"),
    ):
        prepare(shop.write(), shop.folder / "out")


def sampled(shop: Any, keep: float, seed: int = 0) -> dict[str, Any]:
    shop.definition["sampling"] = {"task": "ctr", "keep": keep, "seed": seed}
    made: dict[str, Any] = shop.run(f"out-{keep}-{seed}")
    return made


def test_down_sampling_is_stable_nested_and_recorded(shop: Any) -> None:
    n = 4000
    rng = np.random.default_rng(3)
    shop.table(
        "log", {"user": rng.integers(0, 50, n), "time": np.arange(n), "item": rng.integers(1, 9, n), "click": (rng.random(n) < 0.25).astype(int)}
    )
    shop.definition["split"] = {"kind": "time", "test_from": 3000}
    data = sampled(shop, 0.2)
    c = data["calibration"]
    negatives = data["ledger"]["dropped: negative down-sampling"] + c["kept"]
    assert c == {"task": "ctr", "rate": 0.2, "seed": 0, "negatives": negatives, "kept": c["kept"], "correction": "p = q / (q + (1 - q) / rate)"}
    assert abs(c["kept"] / negatives - 0.2) < 4 * (0.16 / negatives) ** 0.5
    assert data["ledger"]["test"] == 1000
    positives = data["labels"]["train"]["ctr"]["positive"]
    assert positives + negatives == 3000
    q = positives / (positives + c["kept"])  # what a model learns from the sampled rows
    assert q / (q + (1 - q) / c["rate"]) == pytest.approx(positives / 3000, abs=0.03)
    few = {row["_time"] for row in shop.rows(name="out-0.2-0")}
    sampled(shop, 0.5)
    assert few < {row["_time"] for row in shop.rows(name="out-0.5-0")}  # one hash: a larger share holds the smaller one
    sampled(shop, 0.2, seed=1)
    assert few != {row["_time"] for row in shop.rows(name="out-0.2-1")}


def test_negatives_of_a_conditional_task_are_those_where_the_condition_holds(shop: Any) -> None:
    n = 400
    click, buy = np.arange(n) % 2, (np.arange(n) % 8 == 1).astype(int)
    shop.table("log", {"user": [1] * n, "time": np.arange(n), "item": [1] * n, "click": click, "buy": buy})
    shop.schema["task"].append({"name": "cvr", "label": "buy", "condition": "ctr"})
    shop.definition["sampling"] = {"task": "cvr", "keep": 0.3}
    shop.definition["split"] = {"kind": "time", "test_from": 320}
    data = shop.run()
    assert data["calibration"]["negatives"] == 120  # clicked and not bought, of 320
    kept = [(row["label.ctr"], row["label.cvr"]) for row in shop.rows()]
    assert (kept.count((0, 0)), kept.count((1, 1)), kept.count((1, 0))) == (160, 40, data["calibration"]["kept"])
    assert 15 < data["calibration"]["kept"] < 60
    assert audit(shop.folder / "out") == data


def test_sampling_leaves_histories_and_split_alone(shop: Any, tmp_path: Path) -> None:
    shop.run()
    whole = {(row["_user"], row["_time"]): row for row in shop.rows()}
    sampled(shop, 0.5)
    for row in shop.rows(name="out-0.5-0"):
        assert row == whole[row["_user"], row["_time"]]
    assert shop.rows("test", "out-0.5-0") == shop.rows("test")


@pytest.mark.parametrize(("rows", "fraction", "test"), [(3, 0.1, 1), (10, 0.1, 1), (11, 0.1, 1), (20, 0.1, 2), (3, 0.9, 2), (2, 0.5, 1)])
def test_the_time_split_begins_at_the_ceiling_and_leaves_a_test_row(shop: Any, rows: int, fraction: float, test: int) -> None:
    shop.table("log", {"user": [1] * rows, "time": list(range(rows)), "item": [1] * rows, "click": [1] * rows})
    shop.definition["split"] = {"kind": "time", "test_fraction": fraction}
    data = shop.run()
    assert data["ledger"]["test"] == test
    assert data["test_from"] == rows - test
