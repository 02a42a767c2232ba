"""The page about a run's number formats, from files written here and from a run that guards itself."""

import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from gem_core.spec import RequestError
from gem_precision.cli import app
from gem_precision.guard import records
from gem_precision.probe.record import FILE as PROBE
from gem_precision.report import PAGE, write_report
from gem_precision.telemetry import FILE as TELEMETRY

NASTY = "layers.<b>&0"


class Texts(HTMLParser):
    """Tags and texts of a page; fails on tags that do not match."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def manifest(folder: Path, **options: Any) -> None:
    config = [{"path": "precision.recipe", "value": "mxfp8", "origin": "file"}, {"path": "run.seed", "value": 1, "origin": "default"}]
    config += [{"path": f"precision.options.{key}", "value": value, "origin": "--set"} for key, value in options.items()]
    decided = [{"module": name, "format": "mxfp8_e4m3", "reason": "a < b"} for name in ("one", NASTY)]
    decided += [{"module": "head", "format": "fp32", "reason": "last layers"}]
    (folder / "manifest.json").write_text(json.dumps({"gem_run": 1, "precision": decided, "config": config}))


def judged(rise: float) -> dict[str, Any]:
    return {"pairs": 9, "ne": [0.9, 0.9 * (1 + rise)], "difference": rise, "low": rise - 1e-4, "high": rise + 1e-4, "verdict": "holds"}


def guard(folder: Path) -> None:
    for step, rise, action in ((10, 1e-3, None), (20, 2e-3, "fallback"), (30, 0.0, None)):
        record = {"step": step, "bound": 2e-4, "tasks": {"ctr": judged(rise)}, "sites": {"one": 20.0 + step, NASTY: None}, "action": action}
        records.append(folder, record if action is None else {**record, "site": "one", "reason": f"{NASTY} was worst"})


def telemetry(folder: Path) -> None:
    values = [(10, 1.0, 30.0), (20, float("inf"), -999.0), (30, 0.0, None)]
    rows = [
        {"step": step, "site": site, "role": role, "amax": amax, "sqnr": sqnr, "saturated": 0.1, "underflow": 0.0}
        for step, amax, sqnr in values
        for site in ("one", NASTY)
        for role in ("inputs", "weights", "grads")
    ]
    (folder / TELEMETRY).write_text("".join(json.dumps(row) + "\n" for row in rows))


def charts(page: str) -> list[str]:
    found = re.findall(r"<svg.*?</svg>", page, flags=re.S)
    for svg in found:
        ElementTree.fromstring(svg.replace("xlink:href", "href"))
    return found


def test_a_page_with_everything(tmp_path: Path) -> None:
    manifest(tmp_path)
    guard(tmp_path)
    telemetry(tmp_path)
    rows = [{"site": s, "product": "forward", "recipe": r, "sqnr": v, "calls": 1} for s, r, v in (("one", "mxfp8", 31.26), (NASTY, "mxfp8", None))]
    (tmp_path / PROBE).write_text(json.dumps({"format": 1, "rows": rows}))
    page = write_report(tmp_path, tmp_path / "page.html").read_text()
    assert len(charts(page)) == 1 + 1 + 2  # a task, the sites, two layers
    assert "http" not in re.sub(r"http://www\.w3\.org/[^\"]*|https?://(?:purl|creativecommons|matplotlib)\.org[^\"<]*", "", page)  # nothing is loaded
    texts = Texts(page)
    assert "b" not in texts.seen  # names are escaped
    assert NASTY in texts.texts
    said = " ".join(texts.texts)
    for text in ("a < b", f"one, {NASTY}", "last layers", "fallback", f"{NASTY} was worst", "31.3", "exact", "bound", "95 % interval"):
        assert text in said, text
    assert "run.seed" not in said


def test_a_page_with_nothing_says_how_to_get_more(tmp_path: Path) -> None:
    manifest(tmp_path)
    page = write_report(tmp_path, tmp_path / "page.html").read_text()
    assert charts(page) == []
    for words in ("guard.every", "telemetry = true", "gem precision sweep", "No pair was measured"):
        assert words in page


@pytest.mark.parametrize("option", ["probe", "ramp.probe"])
def test_the_probe_that_a_run_was_given_is_shown(tmp_path: Path, option: str) -> None:
    run, probe = tmp_path / "run", tmp_path / "probe"
    for folder in (run, probe):
        folder.mkdir()
    manifest(run, **{option: str(probe)})
    (probe / PROBE).write_text(
        json.dumps({"format": 1, "rows": [{"site": "one", "product": "forward", "recipe": "mxfp8", "sqnr": 12.5, "calls": 1}]})
    )
    assert "12.5" in write_report(run, run / PAGE).read_text()
    (probe / PROBE).unlink()
    assert "No probe" in write_report(run, run / PAGE).read_text()


def test_a_guard_without_a_judged_task_still_draws(tmp_path: Path) -> None:
    manifest(tmp_path)
    records.append(tmp_path, {"step": 1, "bound": 1e-3, "tasks": {}, "sites": {"one": None}, "action": None})
    assert len(charts(write_report(tmp_path, tmp_path / PAGE).read_text())) == 1


@pytest.mark.parametrize("content", [None, "{", "[]", '{"gem_run": 1}'])
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(RequestError, match=r"manifest\.json"):
        write_report(tmp_path, tmp_path / PAGE)
    assert not (tmp_path / PAGE).exists()


FORCED = """
import runpy, sys
from gem_precision.guard import window

window.interval = lambda high, low: (1.0, 2.0)
sys.argv = ["gem", *sys.argv[1:]]
runpy.run_module("gem_core", run_name="__main__")
"""
"""``gem`` where every eight pairs are a breach."""


def forced(run: Path, on_breach: str, *words: str) -> subprocess.CompletedProcess[str]:
    options = {"guard.every": 1, "guard.on_breach": on_breach}
    asked = [*words, *(word for key, value in options.items() for word in ("--set", f"precision.options.{key}={value}"))]
    for value in ("precision.recipe=fp8_naive", "data.batch_size=16", "model.name=dlrm", "train.log_every=10"):
        asked += ["--set", value]
    return subprocess.run(
        [sys.executable, "-c", FORCED, "train", "-c", "toy", "--out", str(run), *asked], capture_output=True, text=True, check=False
    )


def test_case_G03_a_run_that_falls_back_tells_so_and_goes_on_so(tmp_path: Path) -> None:
    """A site after 8 pairs, another after 8 more although the run was resumed between; manifest, log and records tell one story."""
    run = tmp_path / "run"
    done = forced(run, "fallback", "--set", "train.max_steps=14")
    assert done.returncode == 0, done.stderr
    again = [sys.executable, "-c", FORCED, "train", "--resume", str(run), "--set", "train.max_steps=18"]
    subprocess.run(again, check=True, capture_output=True)
    kept = records.read_lines(run / records.FILE)
    assert [record["step"] for record in kept] == list(range(1, 19))
    fallen = {record["site"]: record["step"] for record in kept if record["action"]}
    assert list(fallen.values()) == [8, 16]
    made = json.loads((run / "manifest.json").read_text())
    assert {event["site"]: event["step"] for event in made["precision_events"]} == fallen
    for site, step in fallen.items():
        (decision,) = [d for d in made["precision"] if d["module"] == site]
        assert (decision["format"], f"since step {step}" in decision["reason"]) == ("fp32", True)
        assert all((site in record["sites"]) == (record["step"] <= step) for record in kept)
        assert min(kept[step - 1]["sites"].items(), key=lambda item: item[1] if item[1] is not None else math.inf)[0] == site
    told = CliRunner().invoke(app, ["report", str(run)])
    assert told.exit_code == 0, told.output
    assert len(charts((run / PAGE).read_text())) == 3  # two tasks and the sites


def test_case_G03_a_run_may_end_on_a_breach_with_its_checkpoint(tmp_path: Path) -> None:
    done = forced(tmp_path / "run", "stop", "--set", "train.max_steps=14")
    assert done.returncode == 1
    assert "training step 8" in done.stderr
    assert "the manifest says what led to it" in done.stderr
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-8"]
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["precision_events"][0]["action"] == "stop"
