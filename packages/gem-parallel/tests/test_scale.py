"""``gem bench scale``: layouts and their degrees, rows of the results, what is kept and what fails. Runs themselves are stood in for here."""

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.spec import MachineError, RequestError, RunFailed, load_object
from gem_parallel import plugin
from gem_parallel.scale import cli, runs, table
from gem_parallel.scale.calibrate import COLLECTIVES, COPIED, COPIES, LARGE, SIZE, measured
from gem_parallel.scale.figures import FIELDS, Figures, read_run, row_of
from gem_parallel.scale.layouts import DEGREE, LAYOUTS, settings_of, why_not
from gem_parallel.scale.machine import Measured
from gem_parallel.scale.predict import LEAST, Predictor, reached
from gem_parallel.scale.runs import Bench

CONFIG: dict[str, Any] = {
    "data": {"batch_size": 64},
    "optim": {"accumulate": 1},
    "parallel": {"strategies": ["ddp"]},
    "embedding": {"engine": "torch", "options": {}},
}
STEPS = 3
PREDICTOR = Predictor(bench=Bench(recipe="toy", sets=(), config=CONFIG, steps=STEPS, weak=False, device="cpu", folder=Path("runs")))


def bench_of(folder: Path, **changed: Any) -> Bench:
    words: dict[str, Any] = {"recipe": "toy", "sets": (), "config": CONFIG, "steps": STEPS, "weak": False, "device": "cpu", "folder": folder}
    return Bench(**{**words, **changed})


def write_run(run: Path, *, ms: float, rows: int = 64, last: int = 2 * STEPS) -> None:
    """The files of a run whose steps take ``ms``: half of it forward, the rest shared out."""
    run.mkdir(parents=True)
    shares = {"forward": 0.5, "optimiser": 0.1, "exchange: dense: weights": 0.2, "agree": 0.05, "wait for the slowest": 0.1, "data": 0.05}
    time = {"p50": ms / 1e3, "p99": 2 * ms / 1e3, "step": ms / 1e3, "parts": {name: share * ms / 1e3 for name, share in shares.items()}}
    events = [
        {"event": "train", "step": step, "rows": step * rows, "samples_per_second": 1e3 * rows / ms, "time": time}
        for step in (STEPS, 2 * STEPS)
        if step <= last
    ]
    (run / "log.jsonl").write_text("\n".join(json.dumps(event) for event in [{"event": "started", "step": 0}, *events]))
    (run / "summary.json").write_text(json.dumps({"train_flops": 3e6 * rows, "rows": rows, "peak": {"flops_per_second": 1e10}}))
    (run / "manifest.json").write_text(json.dumps({"machine": {"name": "a CPU"}, "versions": {"torch": "2.13"}}))


Ran = list[tuple[str, int]]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Runs take ``100 / ranks + 10`` ms; those of ``ends`` write a log and end with a code. Returns the names of what was run."""

    def install(ends: dict[tuple[str, int], tuple[int, str]] | None = None, rows: int = 64) -> Ran:
        ran: Ran = []

        def train(place: Path, ranks: int, words: Sequence[str]) -> int:
            ran.append((place.name, ranks))
            code, text = (ends or {}).get((place.name, ranks), (0, ""))
            if code:
                place.mkdir(parents=True, exist_ok=True)
                (place / "log.txt").write_text(text)
            else:
                write_run(place / "run", ms=100 / ranks + 10, rows=rows)
            return code

        monkeypatch.setattr(table, "train", train)
        monkeypatch.setattr(Predictor, "seconds", lambda self, ranks, layout, base, base_layout: 0.055 if ranks > 1 else 0.11)
        return ran

    return install


# ---- layouts ---------------------------------------------------------------------------------------------------------------------------


@given(st.sampled_from(list(LAYOUTS)), st.integers(1, 64))
@settings(max_examples=60)
def test_a_layout_has_settings_or_a_reason(layout: str, ranks: int) -> None:
    """Degrees divide the ranks wherever there is no reason against it, and whatever has no experts needs none."""
    reason = why_not(layout, ranks)
    possible = ranks == 1 or layout == "fsdp" or ranks % DEGREE == 0
    assert (reason is None) == possible
    if reason is None:
        joined = " ".join(settings_of(layout, ranks, CONFIG))
        assert ("experts.degree=2" in joined) == (layout != "fsdp" and ranks > 1)
        assert ("options.replicas=2" in joined) == (layout in ("fsdp-experts-2d", "fsdp-experts-sharded2d") and ranks > 1)
    else:
        assert str(ranks) in reason


def test_one_thing_changes_from_layout_to_layout() -> None:
    fsdp, experts, copies, sharded = (settings_of(name, 8, CONFIG) for name in LAYOUTS)
    assert fsdp == ('parallel.strategies=["fsdp"]',)
    assert experts == ('parallel.strategies=["experts", "fsdp"]', "parallel.options.experts.degree=2")
    assert copies == (*experts, 'embedding.engine="torchrec"', "embedding.options={}", "embedding.options.replicas=2")
    assert sharded == (*experts, 'embedding.engine="sharded_2d"', "embedding.options={}", "embedding.options.replicas=2")


def test_strategies_of_other_stages_and_options_of_the_recipes_engine_stay() -> None:
    own = {**CONFIG, "parallel": {"strategies": ["fsdp", "activations"]}, "embedding": {"engine": "torchrec", "options": {"dtype": "fp16"}}}
    assert settings_of("fsdp", 4, own) == ('parallel.strategies=["fsdp", "activations"]', "embedding.options.replicas=1")
    assert settings_of("fsdp-experts-2d", 4, own)[2:] == ("embedding.options.replicas=2",)


# ---- rows ------------------------------------------------------------------------------------------------------------------------------


def figures(ranks: int, ms: float, *, peak: float = 1e10) -> Figures:
    parts = {"forward": 0.5 * ms, "backward": 0.2 * ms, "tables": 0.1 * ms, "exchange: a": 0.15 * ms, "agree": 0.05 * ms}
    return Figures(
        device="d", torch="t", samples_per_s=64e3 / ms, ms=ms, ms_p99=ms, parts=parts, flops_per_row=1e6, peak=peak, rows=64, day="2026-01-01"
    )


@given(st.floats(0.1, 1e4), st.floats(0.1, 1e4), st.integers(1, 512), st.floats(1e8, 1e15))
@settings(max_examples=50)
def test_mfu_is_local_mfu_times_scaling_ratio(alone: float, together: float, ranks: int, peak: float) -> None:
    row = row_of({"ranks": ranks}, figures(ranks, together, peak=3 * peak), figures(1, alone, peak=peak), None, [])
    assert row["mfu"] == pytest.approx(row["local_mfu"] * row["scaling_ratio"])
    assert row["mfu"] == pytest.approx(1e6 * 64e3 / together / ranks / peak), "the peak is that of the run of one rank"
    assert row["scaling_ratio"] == pytest.approx(alone / together / ranks)


def test_parts_of_a_row_by_hand(tmp_path: Path) -> None:
    write_run(tmp_path / "run", ms=20.0)
    read = read_run(tmp_path / "run", STEPS)
    row = row_of({"ranks": 2, "layout": "fsdp", "recipe": "toy", "scaling": "strong"}, read, None, 0.015, ["a", "b"])
    assert set(FIELDS) - set(row) == {"mfu", "local_mfu", "scaling_ratio"}, "there is no run of one rank to relate it to"
    want = {"local_ms": 12.0, "exposed_ms": 5.0, "wait_ms": 2.0, "data_ms": 1.0, "ms": 20.0, "ms_p99": 40.0, "predicted_ms": 15.0, "error_pct": -25.0}
    assert {name: row[name] for name in want} == pytest.approx(want)
    assert read.exposed() == pytest.approx({"dense: weights": 4.0, "host values": 1.0})
    assert row["exposed_by"] == "dense: weights 4.00; host values 1.00"
    assert (row["note"], row["device"], row["torch"]) == ("a; b", "a CPU", "2.13")
    assert (read.rows, read.flops_per_row) == (64, 3e6)


def test_what_was_exposed_is_added_up_over_blocks() -> None:
    sent = {"dense: weights of layers.0": 1.0, "tables: ask": 2.0, "dense: weights of layers.1": 1.25, "dense: gradients of layers.0": 0.0}
    parts = {"forward": 9.0, "agree": 0.5} | {f"exchange: {name}": ms for name, ms in sent.items()}
    told = replace(figures(2, 10.0), parts=parts).exposed_by()
    assert told == "dense: weights 2.25; tables: ask 2.00; host values 0.50"
    assert sum(float(part.rpartition(" ")[2]) for part in told.split("; ")) == pytest.approx(
        sum(replace(figures(2, 10.0), parts=parts).exposed().values())
    )


def test_a_run_that_ended_early_has_no_figures(tmp_path: Path) -> None:
    write_run(tmp_path / "run", ms=20.0, last=STEPS)
    with pytest.raises(RunFailed, match="step 3 of 6"):
        read_run(tmp_path / "run", STEPS)


# ---- the loop --------------------------------------------------------------------------------------------------------------------------


def test_every_number_of_ranks_and_layout_has_a_row(tmp_path: Path, stand_in: Callable[..., Ran]) -> None:
    ran = stand_in()
    rows, details = zip(*table.measure(bench_of(tmp_path), [1, 2, 3], list(LAYOUTS), PREDICTOR), strict=True)
    assert [(row["ranks"], row["layout"]) for row in rows] == [(count, layout) for count in (1, 2, 3) for layout in LAYOUTS]
    assert [detail["status"] for detail in details] == ["ran"] * 9 + ["cannot"] * 3
    assert "3 ranks cannot be divided into pairs" in rows[9]["note"]
    assert ("fsdp-experts", 1) not in ran, "on one rank it is what fsdp is"
    assert "the run of fsdp" in rows[1]["note"]
    assert len(ran) == 3 + 4 + 1
    at2 = rows[4]
    assert at2["scaling_ratio"] == pytest.approx(110 / 60 / 2)
    assert at2["error_pct"] == pytest.approx(100 * (55 / 60 - 1))


def test_a_second_call_goes_on(tmp_path: Path, stand_in: Callable[..., Ran]) -> None:
    broken = stand_in({("fsdp", 2): (1, "[rank1]: ValueError: no such thing\nmore")})
    first = list(table.measure(bench_of(tmp_path), [1, 2], ["fsdp"], PREDICTOR))
    assert broken == [("fsdp", 1), ("fsdp", 2)]
    assert first[1][1]["status"] == "failed"
    assert first[1][0]["note"].startswith("failed: ValueError: no such thing (")
    assert str(tmp_path / "ranks-2" / "fsdp" / "log.txt") in first[1][0]["note"]
    again = stand_in()
    second = list(table.measure(bench_of(tmp_path), [1, 2], ["fsdp"], PREDICTOR))
    assert again == [("fsdp", 2)]
    assert second[0] == first[0]
    assert second[1][1]["status"] == "ran"


def test_a_folder_of_another_request_is_refused_before_any_work(tmp_path: Path, stand_in: Callable[..., Ran]) -> None:
    ran = stand_in()
    list(table.measure(bench_of(tmp_path), [1], ["fsdp"], PREDICTOR))
    for other in (bench_of(tmp_path, steps=STEPS + 1), bench_of(tmp_path, sets=("optim.lr=1",)), bench_of(tmp_path, recipe="synthetic")):
        with pytest.raises(RequestError, match="other settings"):
            list(table.measure(other, [1, 2], ["fsdp"], PREDICTOR))
    assert ran == [("fsdp", 1)]


REFUSAL = "gem: an expert degree of 2\n  no block of the model has interaction experts\n  Choose degree 1.\n"


def test_what_is_refused_on_many_ranks_alone_cannot_be_and_what_is_refused_everywhere_failed(tmp_path: Path, stand_in: Callable[..., Ran]) -> None:
    stand_in({("fsdp-experts", 2): (2, REFUSAL), ("fsdp", 2): (3, REFUSAL)})
    rows = list(table.measure(bench_of(tmp_path / "a"), [1, 2], ["fsdp", "fsdp-experts"], PREDICTOR))
    assert [detail["status"] for _, detail in rows] == ["ran", "ran", "cannot", "cannot"]
    assert rows[3][0]["note"] == "cannot be: an expert degree of 2: no block of the model has interaction experts"
    stand_in({("fsdp", 1): (2, REFUSAL), ("fsdp", 2): (2, REFUSAL)})
    assert [detail["status"] for _, detail in table.measure(bench_of(tmp_path / "b"), [1, 2], ["fsdp"], PREDICTOR)] == ["failed", "failed"]


def test_steps_that_lack_rows_are_told(tmp_path: Path, stand_in: Callable[..., Ran]) -> None:
    stand_in(rows=60)
    ((row, _),) = table.measure(bench_of(tmp_path), [1], ["fsdp"], PREDICTOR)
    assert "60 rows, not 64" in row["note"]


def test_a_prediction_that_cannot_be_made_is_told(tmp_path: Path, stand_in: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in()

    def refuse(*_: Any) -> float:
        raise RequestError("gem plan with engine 'torch'", "it plans nothing", "Choose another.")

    monkeypatch.setattr(Predictor, "seconds", refuse)
    ((row, detail),) = table.measure(bench_of(tmp_path), [1], ["fsdp"], PREDICTOR)
    assert detail["status"] == "ran"
    assert "predicted_ms" not in row
    assert row["note"] == "no prediction: gem plan with engine 'torch': it plans nothing"


def test_nothing_is_predicted_without_a_predictor(tmp_path: Path, stand_in: Callable[..., Ran]) -> None:
    stand_in()
    for row, _ in table.measure(bench_of(tmp_path), [1, 2], ["fsdp"], None):
        assert "predicted_ms" not in row
        assert row["note"] == ""


def test_a_command_that_is_killed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "GEM", ("-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    with pytest.raises(RequestError, match=r"gem plan: signal 9 ended it\. Run `gem plan -c toy`"):
        runs.answer(["plan", "-c", "toy"])


TOLD_TO_END = """
import sys, time
from gem_parallel.scale.runs import run_to_end
run_to_end([sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"])
"""


def test_a_command_ends_with_the_process_that_is_told_to_end() -> None:
    """Ranks that are left behind would keep their GPUs."""
    asking = subprocess.Popen([sys.executable, "-c", TOLD_TO_END], stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    asked = int(asking.stdout.readline())
    asking.terminate()
    assert asking.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(asked, 0)


def test_weak_scaling_gives_every_rank_the_same_rows(tmp_path: Path) -> None:
    weak, strong = bench_of(tmp_path, weak=True), bench_of(tmp_path)
    assert "data.batch_size=256" in runs.asked_of(weak, 4, ())
    assert "data.batch_size=64" in runs.asked_of(strong, 4, ())
    assert bench_of(tmp_path, weak=True, config={**CONFIG, "optim": {"accumulate": 3}}).rows_a_step(4) == 768


def test_the_measurements_own_settings_come_after_the_users(tmp_path: Path) -> None:
    words = runs.asked_of(bench_of(tmp_path, sets=("train.log_every=1", "optim.lr=1")), 2, settings_of("fsdp", 2, CONFIG))
    values = [word for word in words if "=" in word]
    assert values.index("train.log_every=1") < values.index(f"train.log_every={STEPS}")
    assert values[:2] == ["train.log_every=1", "optim.lr=1"]
    assert f"train.max_steps={2 * STEPS}" in values
    assert 'run.device="cpu"' in values


# ---- the command -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("work was begun")

    monkeypatch.setattr(runs, "answer", fail)
    monkeypatch.setattr(table, "train", fail)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ({"gpus": "1,x"}, "--gpus 1,x"),
        ({"gpus": "0"}, "--gpus 0"),
        ({"gpus": ""}, "--gpus"),
        ({"gpus": "-2"}, "--gpus -2"),
        ({"layout": ["fsdp", "fsd"]}, "--layout fsd: there is no such layout"),
        ({"plot": Path("a.png")}, "a.png: it is drawn as SVG"),
    ],
)
def test_wrong_words_are_refused_before_any_work(words: dict[str, Any], match: str, no_work: None) -> None:
    with pytest.raises(RequestError, match=match):
        cli.scale(recipe="toy", device="cpu", **words)


@pytest.mark.parametrize("there", [0, 2])
def test_more_gpus_than_there_are_is_the_machines_error(there: int, monkeypatch: pytest.MonkeyPatch, no_work: None) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: there > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(cli, "configuration", lambda recipe, sets: CONFIG)
    with pytest.raises(MachineError, match=f"on 4 GPUs: this machine has {there}. .*--device cpu"):
        cli.scale(recipe="toy", gpus="2,4")
    cli.check_gpus(there)


def test_finished_runs_are_told_where_there_are_no_gpus(tmp_path: Path, stand_in: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured on one machine, predicted on another; what is left to run still wants its GPUs, and only those."""
    ran = stand_in()
    list(table.measure(bench_of(tmp_path, device="cuda"), [1, 2], ["fsdp", "fsdp-experts"], None))
    asked: list[int] = []
    monkeypatch.setattr(cli, "check_gpus", asked.append)
    monkeypatch.setattr(cli, "configuration", lambda recipe, sets: CONFIG)
    common: dict[str, Any] = {"recipe": "toy", "layout": ["fsdp", "fsdp-experts"], "steps": STEPS, "out": tmp_path}
    cli.scale(gpus="2", **common)
    assert asked == []
    assert len(ran) == 3
    cli.scale(gpus="2,3", **common)
    assert asked == [3]


def test_a_recipe_that_there_is_not_is_refused_as_gem_says_it(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="neither a file nor a recipe"):
        cli.scale(recipe="toyy", gpus="1", device="cpu", out=tmp_path)


def test_results_picture_and_exit_of_a_call(
    tmp_path: Path, stand_in: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in({("fsdp", 4): (1, "RuntimeError: rank 3 is gone")})
    monkeypatch.setattr(cli, "configuration", lambda recipe, sets: CONFIG)
    files = {"csv_file": tmp_path / "new" / "r.csv", "plot": tmp_path / "p.svg"}
    with pytest.raises(RunFailed, match=r"1 of 3 runs failed.*ranks-4.*log\.txt"):
        cli.scale(recipe="toy", gpus="2,4", layout=["fsdp", "fsdp"], steps=STEPS, device="cpu", out=tmp_path / "runs", **files)
    text = files["csv_file"].read_text()
    assert text == (tmp_path / "runs" / "results.csv").read_text()
    assert text.splitlines()[0] == ",".join(FIELDS)
    rows = list(csv.DictReader(text.splitlines()))
    assert [row["ranks"] for row in rows] == ["1", "2", "4"]
    assert float(rows[1]["mfu"]) == pytest.approx(float(rows[1]["local_mfu"]) * float(rows[1]["scaling_ratio"]))
    assert rows[2]["ms"] == ""
    assert "rank 3 is gone" in rows[2]["note"]
    svg = files["plot"].read_text()
    assert "<svg" in svg
    printed = capsys.readouterr().out
    assert "scaling ratio 91.7%" in printed
    cli.scale(recipe="toy", gpus="2", layout=["fsdp"], steps=STEPS, device="cpu", out=tmp_path / "runs", json=True)
    told = json.loads(capsys.readouterr().out)
    assert [row["status"] for row in told] == ["ran", "ran"]
    assert told[1]["exposed"]["dense: weights"] == pytest.approx(12.0)


def test_the_command_is_declared() -> None:
    (command,) = [command for command in plugin.gem_cli_commands() if command.name == "bench scale"]
    assert load_object(command.load) is cli.scale


# ---- logs ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (f"Traceback\n{REFUSAL}[rank0]: RuntimeError: later", "an expert degree of 2: no block of the model has interaction experts"),
        ("Traceback (most recent call last):\n  File\ntorch.OutOfMemoryError: CUDA out of memory\nRuntimeError: second", "torch.OutOfMemoryError: "),
        ("[rank2]: ValueError: x\n", "ValueError: x"),
        ("torch.errors.ChildFailedError: \n  traceback : Signal 9 (SIGKILL) received by PID 7\n===", "Signal 9 (SIGKILL) received by PID 7"),
        ("killed\n\n", "killed"),
        ("", "nothing was printed"),
    ],
)
def test_the_first_error_of_a_log(log: str, line: str) -> None:
    assert runs.first_error(log).startswith(line)


def test_a_runs_exit_code_is_that_of_its_first_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_to_end(command: Sequence[str], *, stdout: Any, **_: Any) -> int:
        stdout.write("Failures:\n[1]:\n  exitcode  : -15 (pid: 8)\nRoot Cause (first observed failure):\n[0]:\n  exitcode  : 2 (pid: 7)\n")
        return 1

    monkeypatch.setattr(runs, "run_to_end", run_to_end)
    (tmp_path / "old").mkdir()
    assert runs.train(tmp_path / "old", 2, ["train"]) == 2
    assert (
        "torch.distributed.run --standalone --local-addr localhost --nproc-per-node 2 -m gem_core train --out"
        in (tmp_path / "old" / "log.txt").read_text()
    )


# ---- predictions -----------------------------------------------------------------------------------------------------------------------


def test_calibrated_figures_by_hand() -> None:
    best = {
        "product": 1e-3,
        "copy": 2e-3,
        "small": 1e-4,
        "large": 4.1e-3,
        "scatter": 8.1e-3,
        "reduce": 12.1e-3,
        "plain": 1e-3,
        "sharded": 1e-3 + COLLECTIVES * 5e-4,
    }
    found = measured(best, 4)
    assert (found.flops, found.memory) == pytest.approx((2 * SIZE**3 / 1e-3, 2 * COPIED * COPIES / 2e-3))
    assert (found.latency, found.bandwidth, found.host) == pytest.approx((5e-5, 3 * LARGE / 4e-3, 4e-4))
    assert (found.scatter, found.reduce) == pytest.approx((2.0, 3.0))
    alone = measured({"product": 1e-3, "copy": 2e-3}, 1)
    assert (alone.world, alone.host, alone.topology().tiers[0].size) == (1, 0.0, 1)


def test_a_measured_machine_is_what_gem_plan_reads(tmp_path: Path) -> None:
    """Its description gives the very topology that the cost model is given; core's reader is reached as a user reaches it, by its name."""
    described = load_object("gem_core.topology.describe:described")
    machine = Measured(world=4, flops=1e11, memory=2e10, host=1e-4, latency=1e-5, bandwidth=1e9, scatter=1.5, reduce=1.2)
    file = tmp_path / "machine.toml"
    file.write_text(machine.toml())
    read, own = described(str(file), 4), machine.topology()
    assert (read.device, read.tiers, read.memory_bandwidth, read.peak_flops) == (own.device, own.tiers, own.memory_bandwidth, own.peak_flops)


@given(st.floats(1e-3, 1.0), st.floats(0.0, 1.0), st.floats(0.01, 1.0))
@settings(max_examples=50)
def test_the_speed_of_products_is_such_that_compute_is_as_measured(products: float, memory: float, fraction: float) -> None:
    plan = {"parts": {"forward": products / 3 + memory, "backward": 2 * products / 3}, "local_mfu": products / (products + memory)}
    assert reached(plan, products / fraction + memory) == pytest.approx(fraction, rel=1e-6)


def test_the_speed_of_products_stays_within_what_the_cost_model_takes() -> None:
    plan = {"parts": {"forward": 1.0, "backward": 2.0}, "local_mfu": 0.5}
    assert reached(plan, 1.0) == 1.0, "activations alone take longer than what was measured"
    assert reached(plan, 1.6) == 1.0
    assert reached(plan, 1e12) == LEAST


def test_a_prediction_asks_for_the_layout_with_the_calibrated_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gem_parallel.scale import predict

    asked: list[list[str]] = []

    def answer(words: list[str]) -> dict[str, Any]:
        asked.append(words)
        return {"step": {"layouts": [{"seconds": 0.25, "parts": {"forward": 0.01, "backward": 0.02}, "local_mfu": 1.0}]}}

    monkeypatch.setattr(predict, "answer", answer)
    predictor = Predictor(bench=bench_of(tmp_path), machine="h200")
    base = figures(1, 100.0)  # 70 ms of forward and backward, of which products at the peak would take 30
    for _ in range(2):
        assert predictor.seconds(4, ("a=1",), base, ("a=0",)) == 0.25
    one, *four = asked
    assert len(four) == 2, "one rank is planned once"
    assert one[one.index("--world") + 1] == "1"
    assert "matmul=1.0" in one
    assert {"a=1", "--machine", "h200"} <= set(four[0])
    (matmul,) = [float(word.removeprefix("matmul=")) for word in four[0] if word.startswith("matmul=")]
    assert matmul == pytest.approx(30 / 70)


def test_a_machine_that_nobody_knows_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gem_parallel.scale import predict

    monkeypatch.setattr(predict, "answer", lambda words: {"step": None})
    with pytest.raises(RequestError, match="links or peak are unknown"):
        Predictor(bench=bench_of(tmp_path, device="cuda")).seconds(2, (), figures(1, 1.0), ())
