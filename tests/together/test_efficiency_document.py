"""The figures of whole steps in the documents are those of the committed results."""

import csv
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "benchmarks" / "document.py"
spec = importlib.util.spec_from_file_location("gem_document", FILE)
assert spec is not None
assert spec.loader is not None
document: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(document)

STEP = {
    "date": "2026-01-02", "gpu": "A GPU", "torch": "2.0", "recipe": "r", "rung": "padded", "samples_per_s": "100", "tokens_per_s": "1", "ms": "10",
    "model_tflops": "5", "mfu_bf16": "0.1", "mfu_weighted": "0.1", "hfu": "0.2", "peak_gib": "3", "ne": "0.9", "steps": "4", "ms_p99": "11",
    "data_share": "0.001", "first_step_s": "2", "compile_s": "0", "note": "",
}  # fmt: skip


def put(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(document, "RESULTS", tmp_path)
    return tmp_path


def test_the_committed_pages_are_up_to_date() -> None:
    done = subprocess.run([sys.executable, FILE, "--check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_without_results_there_are_no_tables(results: Path) -> None:
    assert [document.ladder(), document.layers(), document.breakdown(), document.headline()] == [[], [], [], []]


def test_a_ladder_has_the_last_row_of_a_rung_its_factor_and_the_reasons_of_those_without_figures(results: Path) -> None:
    faster = {**STEP, "rung": "compiled", "samples_per_s": "450", "mfu_bf16": "0.45"}
    refused = {
        **dict.fromkeys(STEP, ""),
        "date": "2026-01-03",
        "gpu": "A GPU",
        "torch": "2.0",
        "recipe": "r",
        "rung": "fp8",
        "note": "no kernel fits",
    }
    put(results / "h200-step.csv", [{**STEP, "samples_per_s": "7"}, STEP, faster, refused])
    text = "\n".join(document.ladder())
    assert "| padded | 100 | 1.00 | 10.0 | 1.100 | 5 | 10.0 |" in text
    assert "| compiled | 450 | 4.50 |" in text
    assert "- `r`, fp8: no kernel fits" in text
    assert "A GPU, torch 2.0, 2026-01-02 to 2026-01-03" in text
    assert "| `r` | 450 | 10.0 | 5 | 45.0 |" in document.headline()


def test_the_headline_is_no_row_in_fp8(results: Path) -> None:
    put(results / "h200-step.csv", [STEP, {**STEP, "rung": "fp8", "mfu_bf16": "0.9"}])
    assert document.headline()[-1] == "| `r` | 100 | 10.0 | 5 | 10.0 |"


def test_layers_weigh_by_how_often_they_stand_there_and_parts_do_not_count_twice(results: Path) -> None:
    row = {
        "date": "2026-01-02", "device": "A GPU", "torch": "2.0", "recipe": "r", "layer": "L", "module": "a.b", "count": "2", "part_of": "",
        "flops": "989e9", "moved": "1e6", "bound": "compute", "forward_ms": "1", "backward_ms": "1", "ms": "2", "mfu": "0.5", "over_floor": "2",
    }  # fmt: skip
    put(results / "h200-layers.csv", [row, {**row, "part_of": "a.b"}])
    assert document.layers()[0].endswith("2.0 TFLOP in 4.0 ms, local MFU 50.0 %.")
    assert sum(line.startswith("| L `a.b` | 2 |") for line in document.layers()) == 1


def test_a_breakdown_for_each_file(results: Path) -> None:
    row = {
        "date": "2026-01-02",
        "device": "A GPU",
        "torch": "2.0",
        "category": "matmul",
        "ms": "60",
        "share": "0.6",
        "step_ms": "100",
        "plain_ms": "90",
    }
    put(results / "h200-breakdown.csv", [{**row, "recipe": "r"}])
    put(results / "h200-breakdown-s.csv", [{**row, "recipe": "s"}])
    lines = document.breakdown()
    assert [line.split(" on ")[0] for line in lines if " on " in line] == ["`s`", "`r`"]
    assert lines.count("| matmul | 60.0 | 60.0 |") == 2


def test_what_stands_between_the_marks_is_replaced_and_nothing_else() -> None:
    begin, end = "<!-- ladder: written by benchmarks/document.py -->", "<!-- end of ladder -->"
    assert document.written(f"before\n{begin}\nold\n{end}\nafter\n", "ladder", ["new"]) == f"before\n{begin}\n\nnew\n\n{end}\nafter\n"
    for text in ("no marks", begin, end):
        with pytest.raises(ValueError, match="no marks for 'ladder'"):
            document.written(text, "ladder", ["new"])
