"""The log of a run: lines that survive a kill, TensorBoard, a bar on a terminal and plain lines elsewhere."""

import io
import json
import logging
from pathlib import Path

import pytest

from gem_core.train.log import RunLog, read_log


def steps(folder: Path) -> list[tuple[str, int]]:
    return [(record["event"], record["step"]) for record in read_log(folder)]


def written(folder: Path, *records: tuple[str, int]) -> None:
    with RunLog(folder, total=10) as log:
        for name, step in records:
            log.event(name, step, value=1.5)


def test_events_are_lines_of_json(tmp_path: Path) -> None:
    written(tmp_path, ("train", 1), ("eval", 1))
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"event": "train", "step": 1, "value": 1.5}, {"event": "eval", "step": 1, "value": 1.5}]


def test_a_value_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    with RunLog(tmp_path, total=1) as log, pytest.raises(ValueError, match="not JSON compliant"):
        log.event("train", 1, loss=float("nan"))


def test_a_new_run_starts_an_empty_log(tmp_path: Path) -> None:
    written(tmp_path, ("train", 1))
    written(tmp_path, ("train", 2))
    assert steps(tmp_path) == [("train", 2)]


def test_a_resumed_log_goes_back_to_its_checkpoint(tmp_path: Path) -> None:
    """What was logged after the checkpoint, also at the same step, will be logged again."""
    written(tmp_path, ("train", 2), ("eval", 2), ("saving", 2), ("eval", 2), ("train", 3), ("checkpoint", 2), ("saving", 4), ("failed", 4))
    with RunLog(tmp_path, total=10, step=2) as log:
        log.event("resumed", 2)
    assert steps(tmp_path) == [("train", 2), ("eval", 2), ("saving", 2), ("checkpoint", 2), ("resumed", 2)]


def test_a_kill_between_checkpoint_and_its_line_keeps_all_steps_before(tmp_path: Path) -> None:
    written(tmp_path, ("train", 1), ("train", 2), ("train", 3))
    RunLog(tmp_path, total=10, step=2).close()
    assert steps(tmp_path) == [("train", 1), ("train", 2)]


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    written(tmp_path, ("train", 1))
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"event": "train", "st')
    assert steps(tmp_path) == [("train", 1)]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with RunLog(None, total=5) as log:
        log.event("train", 1)
        log.scalars("train", 1, {"loss": 1.0})
        log.advance(1)
        log.say("text")
    assert list(tmp_path.iterdir()) == []


def test_scalars_reach_tensorboard_with_their_paths(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunLog(tmp_path, total=2) as log:
        log.scalars("test", 1, {"ctr": {"auc": 0.75, "reasons": {}, "ne": None}, "note": "text"})
        log.scalars("test", 2, {"ctr": {"auc": 0.5}})
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert board.Tags()["scalars"] == ["test/ctr/auc"]
    assert [(event.step, event.value) for event in board.Scalars("test/ctr/auc")] == [(1, 0.75), (2, 0.5)]


def test_plain_lines_without_a_terminal(tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    with caplog.at_level(logging.INFO, logger="gem_core.train"), RunLog(tmp_path, total=3) as log:
        log.advance(1)
        log.say("step 1/3  loss 0.5")
    assert [record.getMessage() for record in caplog.records] == ["step 1/3  loss 0.5"]
    assert "\x1b[" not in capfd.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with caplog.at_level(logging.INFO, logger="gem_core.train"), RunLog(tmp_path, total=3) as log:
        log.advance(2)
        log.say("loss 0.25")
    assert "2/3" in terminal.getvalue()
    assert "loss 0.25" in terminal.getvalue()
    assert caplog.records == []
