"""The report of a run: one page that needs nothing else, whatever the run's figures are."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gem_core.train.report import facts, figures, grouped_decisions, metric_table, step_table, write_report

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Collects texts, tags and whatever would be fetched; checks that tags close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href") and not (value or "").startswith("#")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture
def folder(finished_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished_run, tmp_path / "run")


def test_the_page_is_whole_and_needs_no_network(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert page.fetched == []
    assert page.tags.count("svg") == 6
    assert not re.search(r"@import|url\(\s*['\"]?http", text)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)


def test_the_page_shows_results_baselines_kernels_precision_configuration_and_ledger(folder: Path) -> None:
    words = " ".join(" ".join(Page((folder / "report.html").read_text()).words).split())
    summary = json.loads((folder / "summary.json").read_text())
    assert f"{summary['test']['ctr']['auc']:.4f}" in words
    assert f"{summary['test']['cvr']['ne']:.4f}" in words
    for said in ("constant", "Training loss", "Test AUC", "Test normalised entropy", "Samples a second", "MFU (%)", "optim.lr", "--set"):
        assert said in words, said
    for said in ("matmuls under autocast", "dropped_uneven", "this model asks for no kernels", "gem_train_fakes", "torch"):
        assert said in words, said


def test_the_page_is_made_from_the_folder_alone(folder: Path) -> None:
    first = (folder / "report.html").read_text()
    (folder / "report.html").unlink()
    again = write_report(folder).read_text()
    assert Page(again).words == Page(first).words


def test_values_are_escaped(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["config"].append({"path": "x", "value": "<script>alert(1)</script>", "origin": "--set"})
    (folder / "manifest.json").write_text(json.dumps(manifest))
    page = Page(write_report(folder).read_text())
    assert "script" not in page.tags
    assert any("<script>alert(1)</script>" in word for word in page.words)


def test_undefined_metrics_are_shown_with_their_reason(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    summary["test"]["ctr"] |= {"auc": None, "group_auc": None, "reasons": {"auc": "one class: no positive row"}, "bad_predictions": 3}
    summary["stopped"] = "rank 1 ran out"
    (folder / "summary.json").write_text(json.dumps(summary))
    words = " ".join(" ".join(Page(write_report(folder).read_text()).words).split())
    for said in ("auc is undefined (one class: no positive row)", "3 with a non-finite prediction", "rank 1 ran out"):
        assert said in words, said


def test_a_run_too_short_for_a_log_line_has_no_empty_figures() -> None:
    assert figures([], {}) == []


def record(step: int, auc: float | None) -> dict[str, Any]:
    return {"event": "eval", "step": step, "test": {"ctr": {"auc": auc, "ne": 0.9}}}


def test_figures_leave_undefined_points_out_and_draw_baselines() -> None:
    titles = dict(figures([record(1, None), record(2, 0.7)], {"best": {"ctr": {"auc": 0.8}}}))
    assert list(titles) == ["Test AUC", "Test normalised entropy"]
    assert titles["Test AUC"].startswith("<svg")
    assert list(dict(figures([record(1, None)], {}))) == ["Test normalised entropy"]


def test_tables_behind_the_page() -> None:
    decisions = [{"module": m, "format": f, "reason": "r"} for m, f in (("a", "bf16"), ("b", "fp32"), ("c", "bf16"))]
    assert [(d["format"], d["modules"]) for d in grouped_decisions(decisions)] == [("bf16", ["a", "c"]), ("fp32", ["b"])]
    summary = {"test": {"ctr": {"auc": 0.7}, "cvr": {"auc": 0.6}}, "baselines": {"b": {"ctr": {"auc": 0.5}}}}
    assert [(row["task"], row["model"]) for row in metric_table(summary)] == [("ctr", "this run"), ("", "b"), ("cvr", "this run")]


def test_facts_name_the_peak_and_its_source(folder: Path) -> None:
    summary, manifest = (json.loads((folder / f"{name}.json").read_text()) for name in ("summary", "manifest"))
    shown = dict(facts(summary, manifest))
    assert "measured" in shown["peak of a rank"]
    assert shown["rows trained"] == "192"


def test_the_page_says_where_a_step_goes_and_who_was_named(folder: Path) -> None:
    """The parts of the run's own ledger, and a name where there is one; a summary without a ledger has no table."""
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary["time"]["parts"]) == sorted(summary["time"]["parts"], key=lambda part: -summary["time"]["parts"][part])
    summary["time"]["named"] = {"rank 3 is slow": 2}
    (folder / "summary.json").write_text(json.dumps(summary))
    words = " ".join(Page(write_report(folder).read_text()).words)
    assert "Where a step goes" in words
    assert {"forward", "backward", "optimiser", "tables"} <= set(words.split())
    assert "rank 3 is slow (in 2 windows of the log)" in words
    del summary["time"]
    (folder / "summary.json").write_text(json.dumps(summary))
    assert "part, mean over ranks" not in " ".join(Page(write_report(folder).read_text()).words)


def test_shares_of_a_step() -> None:
    assert step_table({"parts": {"forward": 0.003, "data": 0.001}}) == [("forward", "3.000", "75.0 %"), ("data", "1.000", "25.0 %")]
    assert step_table(None) == step_table({"parts": {}}) == []
