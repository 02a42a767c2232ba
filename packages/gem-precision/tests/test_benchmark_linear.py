"""The benchmark of native layers runs through on tiny shapes in the interpreter, with times that are made up: its one run on a GPU is dear."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.fixture
def bench(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("a GPU can run the benchmark itself")
    path = Path(__file__).parents[1] / "benchmarks" / "linear.py"
    spec = importlib.util.spec_from_file_location("bench_linear", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(module, "choose", lambda *shape: "own")
    monkeypatch.setattr(module, "library_reasons", lambda *shape: ["there is no GPU"])
    monkeypatch.setattr("gem_precision.kernels.product.choose", lambda *shape: "own")
    monkeypatch.setattr(torch, "compile", lambda **how: lambda function: function)
    for name in ("CHECKED", "TIMED", "STEPPED", "FUSED"):
        monkeypatch.setattr(module, name, ((130, 128, 256),))
    monkeypatch.setattr(module, "ATTENDED", ((2, 40),))
    monkeypatch.setattr(module, "medians", lambda ways: dict.fromkeys(module.working(ways), 2.0))
    return module


def test_every_check_and_every_timing_runs(bench, capsys):
    checks = bench.checks()
    assert not [record for record in checks if record["check"].startswith("failed")]
    assert len(checks) == 4 + 3 + 3 + 3 + 1
    timings = bench.timings()
    assert not [record for record in timings if "failed" in record["what"]]
    assert len(timings) == 7 + 7 + 2 + 4 + 2
    assert {record["of_a_copy"] for record in timings if record["what"] == "cast"} == {1.0}


def test_a_way_that_fails_is_printed_and_costs_the_others_nothing(bench, capsys):
    assert list(bench.working({"good": lambda: 1, "bad": lambda: 1 / 0, "last": lambda: 2})) == ["good", "last"]
    assert "FAILED bad: ZeroDivisionError" in capsys.readouterr().out


def test_a_wrong_kernel_is_printed_and_ends_with_exit_code_1(bench, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench, "cast_both", lambda x: (_ for _ in ()).throw(RuntimeError("planted")))
    monkeypatch.setattr(bench, "timings", lambda: [{"what": "none"}])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(sys, "argv", ["linear.py", "--json", str(tmp_path / "deep" / "out.json")])
    assert bench.main() == 1
    assert "WRONG 130x128x256: failed: RuntimeError('planted')" in capsys.readouterr().out
    kept = json.loads((tmp_path / "deep" / "out.json").read_text())
    assert set(kept) == {"about", "checks", "timings"}


def test_without_a_hopper_gpu_it_says_so(bench, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["linear.py", "--json", "none.json"])
    assert bench.main() == 3
    assert "needs a Hopper GPU" in capsys.readouterr().err
