"""Steps of a run under the profiler: the breakdown adds up, sees each part of a step, and leaves the run as it was."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gem_core.bench.breakdown import WINDOW, Breakdown, draw, named_ranges, profile_steps, read
from gem_core.bench.timeline import CATEGORIES, GAPS
from gem_core.cli.main import run as gem
from gem_core.config.load import load_config
from gem_core.ops.slot import kernel_slots
from gem_core.train.compose import compose
from gem_core.train.composed import Run

SMALL = ["data.batch_size=24", "data.options.rows=64", "model.options.dim=8", "model.options.sequence.dim=8"]
STEPS = 3


def composed(folder: Path, *overrides: str) -> Run:
    return compose(load_config("toy", [*SMALL, f"run.out='{folder / 'run'}'", *overrides]))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    done = composed(tmp_path_factory.mktemp("breakdown"), "run.device=cpu")
    yield done
    done.close()


@pytest.fixture(scope="module")
def found(run: Run) -> Breakdown:
    return profile_steps(run, steps=STEPS, warmup=1)


def test_the_parts_add_up_to_the_step(found: Breakdown) -> None:
    assert tuple(found.seconds) == (*CATEGORIES, GAPS)
    assert sum(found.seconds.values()) == pytest.approx(found.step)
    assert sum(found.share(category) for category in found.seconds) == pytest.approx(1.0)
    for category in CATEGORIES:
        assert sum(spent for (of, _), spent in found.names.items() if of == category) == pytest.approx(found.seconds[category])


def test_every_part_of_a_step_on_a_cpu_is_seen(found: Breakdown) -> None:
    assert {category for category, spent in found.seconds.items() if spent > 0} == {*CATEGORIES, GAPS} - {"communication"}
    assert found.plain > 0
    assert found.steps == STEPS


def test_parts_are_of_the_right_operators(found: Breakdown) -> None:
    """Products of attention are seen by the range around its kernel alone, and look-ups are not the dense part's learned vectors."""
    names = {category: {name for of, name in found.names if of == category} for category in CATEGORIES}
    assert "aten::bmm" in names["attention"]
    assert "aten::softmax" in names["attention"] or "aten::_softmax" in names["attention"]
    assert "aten::addmm" in names["matmul"]
    assert "aten::native_layer_norm" in names["memory-bound"]
    assert "aten::_softmax" not in names["memory-bound"]


def test_a_run_is_as_it_was_and_can_be_measured_again(run: Run, found: Breakdown) -> None:
    kernels = [(slot._kernel, slot.backend) for slot in kernel_slots(run.model)]
    module: Any = run.embeddings
    again = profile_steps(run, steps=1, warmup=1)
    assert again.seconds["attention"] > 0
    assert [(slot._kernel, slot.backend) for slot in kernel_slots(run.model)] == kernels
    assert not module._forward_hooks
    assert not module._forward_pre_hooks
    assert not run.world.clock.tracing


def test_ranges_are_taken_away_when_something_fails(run: Run) -> None:
    kernels = [slot._kernel for slot in kernel_slots(run.model)]
    with pytest.raises(KeyError):
        _fail_within(run)
    assert [slot._kernel for slot in kernel_slots(run.model)] == kernels


def _fail_within(run: Run) -> None:
    with named_ranges(run.model, run.embeddings):
        raise KeyError


def event(cat: str, name: str, begin: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "pid": 1, "tid": 1, "args": {}}


BY_HAND = [
    event("user_annotation", WINDOW, 1000, 5000),
    event("cpu_op", "aten::mm", 1000, 3000),
    event("cpu_op", "aten::add", 3000, 3500),
    event("cpu_op", "aten::bmm", 4000, 4100),
]


def test_figures_are_those_of_one_step_in_seconds() -> None:
    found = read(BY_HAND, steps=2, plain=1.5e-3)
    assert (found.step, found.plain) == (pytest.approx(2e-3), 1.5e-3)
    assert {name: spent for name, spent in found.seconds.items() if spent} == pytest.approx(
        {"matmul": 1.05e-3, "memory-bound": 0.25e-3, GAPS: 0.7e-3}
    )
    assert list(found.names) == [("matmul", "aten::mm"), ("memory-bound", "aten::add"), ("matmul", "aten::bmm")]  # most first
    assert found.share("matmul") == pytest.approx(0.525)


def test_the_bar_names_every_category(tmp_path: Path) -> None:
    path = tmp_path / "new" / "bar.svg"
    draw(read(BY_HAND, steps=2, plain=1e-3), "a title", path)
    text = path.read_text()
    for words in ("a title", "matmul  52.5 %", "launch gaps  35.0 %", "communication  0.0 %", "ms of a mean step"):
        assert words in text, words


def test_gem_bench_breakdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word for override in [*SMALL, "run.device=cpu", "train.trace=[1]"] for word in ("--set", override)]
    command = ["bench", "breakdown", "-c", "toy", *words, "--steps", "2", "--warmup", "1", "--csv", "out/parts.csv", "--plot", "out/parts.svg"]
    assert gem(command) == 0
    said = capsys.readouterr().out
    assert "launch gaps" in said
    assert "100 %" in said
    with Path("out/parts.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert ",".join(rows[0]) == "date,device,torch,recipe,category,ms,share,steps,step_ms,plain_ms"
    assert [r["category"] for r in rows] == [*CATEGORIES, GAPS]
    assert sum(float(r["share"]) for r in rows) == pytest.approx(1.0, abs=1e-4)
    assert sum(float(r["ms"]) for r in rows) == pytest.approx(float(rows[0]["step_ms"]), rel=1e-4)
    assert "toy on CPU" in Path("out/parts.svg").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_gem_bench_breakdown_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for override in [*SMALL, "run.device=cpu"] for word in ("--set", override)]
    assert gem(["bench", "breakdown", "-c", "toy", *words, "--steps", "1", "--warmup", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [r["category"] for r in told["categories"]] == [*CATEGORIES, GAPS]
    assert {r["category"] for r in told["names"]} <= set(CATEGORIES)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_every_part_of_a_step_on_a_gpu_is_seen(tmp_path: Path) -> None:
    run = composed(tmp_path, "run.device=cuda", "kernels.on_reference=allow")
    try:
        found = profile_steps(run, steps=STEPS, warmup=2)
    finally:
        run.close()
    assert {category for category, spent in found.seconds.items() if spent > 0} >= {
        "attention",
        "matmul",
        "memory-bound",
        "embedding",
        "optimiser",
        GAPS,
    }
    assert sum(found.seconds.values()) == pytest.approx(found.step)
