"""The benchmark of native layers runs through on tiny shapes in the interpreter, with times that are made up: its one run on a GPU is dear."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def load(name):
    path = Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"bench_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bench(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("a GPU can run the benchmark itself")
    module = load("linear")
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


@pytest.fixture
def norms(bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "linear", bench)
    module = load("norm_linear")
    plain = module.op
    monkeypatch.setattr(module, "op", lambda *tensors, backend, **how: plain(*tensors, **how))
    monkeypatch.setattr(module, "LAYERS", (module.Layer(130, 128, 256, "layer", True),))
    monkeypatch.setattr(module, "PASSES", ((130, 128, "rms"),))
    return module


def test_every_check_and_every_timing_runs(bench, capsys):
    checks = bench.checks()
    assert not [record for record in checks if record["check"].startswith("failed")]
    assert len(checks) == 6 + 4 + 6 + 3 + 1
    timings = list(bench.timings())
    assert not [record for record in timings if "failed" in record["what"]]
    assert len(timings) == 9 + 7 + 3 + 4 + 2
    assert {record["of_a_copy"] for record in timings if record["what"] == "cast"} == {1.0}


def test_the_page_shows_what_was_measured(bench, norms, monkeypatch, tmp_path):
    document = load("document")
    about = {"gpu": "a GPU", "torch": "2", "triton": "3", "date": "today"}
    timings = list(bench.timings())
    next(record for record in timings if record["what"] == "RMS norm and linear, fp8_block").update(ms=1.0, over_bf16=2.0)
    found = {"about": about, "checks": [{"holds": True}, {"holds": False}], "timings": [{"shape": "1", "what": "attention failed"}, *timings]}
    steps = ("linear, bf16", *(what for _, what in document.LAYERS))
    ran = {what: {"shape": "1x128x256", "what": what, "ms": 3.0, "over_bf16": 1.5} for what in steps}
    ran |= {what: {"shape": "1x256", "what": what, "of_a_copy": 0.5, "ms": 1.0, "tb_a_second": 4.0} for what in ("copy", "cast in squares")}
    page, results, later, normed = (tmp_path / name for name in ("page.md", "results.json", "later.json", "normed.json"))
    normed.write_text(json.dumps({"about": about, "timings": list(norms.timings())}))
    later.write_text(json.dumps({"about": about, "timings": list(ran.values())}))
    page.write_text(f"before\n{document.BEGIN}\nstale\n{document.END}\nbehind\n")
    results.write_text(json.dumps(found))
    monkeypatch.setattr(document, "PAGE", page)
    monkeypatch.setattr(document, "RESULTS", results)
    monkeypatch.setattr(document, "LATER", later)
    monkeypatch.setattr(document, "NORMS", normed)
    monkeypatch.setattr(sys, "argv", ["document.py", "--check"])
    with pytest.raises(SystemExit, match="out of date"):
        document.main()
    assert "stale" in page.read_text()
    monkeypatch.setattr(sys, "argv", ["document.py"])
    document.main()
    written = page.read_text()
    assert written.startswith("before\n")
    assert written.endswith("\nbehind\n")
    assert "stale" not in written
    assert "1 of 2 checks hold" in written
    assert "| 130x128x256 | layer | 2.00 | 2.00, **1.00** | 2.00, **1.00** |" in written
    assert "| 130x128 | rms: sum, norm and cast | 2.00 | 200% |" in written
    assert "| 1x128x256 | 3.00 | 3.00, **1.50** | 3.00, **1.50** | 3.00, **1.50** | 3.00 | 3.00, **1.50** |" in written
    assert "| 1x256 | 4.00 |  |  | 50% |  |  |  |  |" in written
    assert "| 130x128x256 | RMS norm and linear | 2.00 | 1.00 | 2.00 |" in written
    assert "| 130x128x256 | linear |" not in written  # the later run tells it
    assert "| 130x128x256 | weight gradient | 0 |  | **1.00** |  |" in written
    assert "| 130x256 | 0.00 | 100% |" in written
    monkeypatch.setattr(sys, "argv", ["document.py", "--check"])
    document.main()


def test_the_page_is_that_of_the_results():
    document = load("document")
    if not document.RESULTS.exists():
        pytest.skip("nothing has been measured")
    text = document.PAGE.read_text(encoding="utf-8")
    assert (
        document.page(text, document.section(*(json.loads(path.read_text()) for path in (document.RESULTS, document.LATER, document.NORMS)))) == text
    )


def test_a_way_that_fails_is_printed_and_costs_the_others_nothing(bench, capsys):
    assert list(bench.working({"good": lambda: 1, "bad": lambda: 1 / 0, "last": lambda: 2})) == ["good", "last"]
    assert "FAILED bad: ZeroDivisionError" in capsys.readouterr().out


def test_a_wrong_kernel_is_printed_and_ends_with_exit_code_1(bench, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench, "cast_both", lambda x: (_ for _ in ()).throw(RuntimeError("planted")))
    monkeypatch.setattr(bench, "timings", lambda: iter([{"what": "none"}]))
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


def test_every_timing_of_norms_and_their_layers_runs(norms):
    timings = list(norms.timings())
    assert not [record for record in timings if "failed" in record["what"]]
    steps = [record["what"] for record in timings if "over_bf16" in record]
    assert steps == [f"layer norm and linear, {name}" for name in ("bf16", "fp8_block", "fp8_square")]
    assert {record["of_a_copy"] for record in timings if "sum" in record["what"]} == {2.0}  # twice the bytes of a copy in the same time
    assert {record["shape"] for record in timings} == {"130x128", "130x128x256"}


def test_norms_and_their_layers_need_a_hopper_gpu_and_write_as_they_go(norms, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["norm_linear.py", "--json", str(tmp_path / "deep" / "out.json")])
    assert norms.main() == 3
    assert "needs a Hopper GPU" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(norms, "steps", lambda *layer: [{"what": "planted"}])
    monkeypatch.setattr(norms, "passes", lambda *shape: 1 / 0)
    assert norms.main() == 0
    kept = json.loads((tmp_path / "deep" / "out.json").read_text())
    assert "benchmarks/norm_linear.py --json out.json" in kept["about"]["command"]
    assert kept["timings"][0]["what"] == "planted"
    assert "ZeroDivisionError" in kept["timings"][1]["what"]
