"""The ladder: what each rung changes, that one which cannot be says why, and that its figures are those of the batches."""

import csv
import gc
import json
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gem_core.batch import Batch
from gem_core.bench import step as step_module
from gem_core.bench.flops import run_flops
from gem_core.bench.ladder import RUNGS, climb, rungs_named
from gem_core.bench.results import append_rows, check_columns, draw
from gem_core.bench.step import COLUMNS, StepFigures, measure_steps
from gem_core.cli.bench import app
from gem_core.config.load import load_config
from gem_core.spec import KernelImpl, RequestError, RunFailed
from gem_core.testing import fake_host, fake_module, fake_plugin
from gem_core.train import compose as compose_module
from gem_core.train import feed
from gem_core.train.compose import compose, preview
from gem_core.train.loop import epoch_feed

NAMES = ["padded", "bucketed", "fused-attention", "fused-blocks", "compiled", "balanced", "overlapped", "graphed", "fp8"]
TOY = ["run.device=cpu", "run.threads=1", "data.options.rows=96", "data.batch_size=32"]


@pytest.fixture
def alone(clean_host: None) -> None:
    """Core without its siblings."""


def toy(folder: Path, *more: str) -> list[str]:
    return [*TOY, f"run.out={str(folder / 'run')!r}", *more]


def gem(*words: str, folder: Path) -> Any:
    sets = [word for override in toy(folder) for word in ("--set", override)]
    return CliRunner().invoke(app, ["step", "--recipe", "toy", *sets, "--steps", "3", "--warmup", "1", *words])


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# ---- rungs --------------------------------------------------------------------------------------------------------------------------------


def test_the_rungs_and_their_order_are_those_of_the_documents() -> None:
    assert [rung.name for rung in RUNGS] == NAMES
    assert [rung.name for rung in rungs_named(["fp8", "padded"])] == ["padded", "fp8"]
    with pytest.raises(RequestError, match="Did you mean 'bucketed'"):
        rungs_named(["buckted"])


def test_each_rung_stands_on_those_below_and_one_that_cannot_be_changes_nothing(alone: None, tmp_path: Path) -> None:
    placed = {p.rung.name: p for p in climb("toy", toy(tmp_path))}
    assert list(placed) == NAMES
    assert {name for name, p in placed.items() if not p.reasons} == {"padded", "bucketed", "overlapped"}
    assert placed["padded"].loaded.config.train.ahead is False
    assert set(placed["padded"].loaded.config.kernels.use.values()) == {"padded"}
    top = placed["overlapped"].loaded.config
    assert top.train.ahead is True
    assert set(top.kernels.use.values()) == {"bucketed"}  # neither of the fused rungs can be here, so neither is below
    assert top.compile.blocks == "off"


def test_why_a_rung_cannot_be_is_said_by_name(alone: None, tmp_path: Path) -> None:
    reasons = {p.rung.name: "; ".join(p.reasons) for p in climb("toy", toy(tmp_path))}
    assert "gdpa: nothing but reference fits this machine" in reasons["fused-attention"]
    assert "norm_linear: nothing but reference fits this machine" in reasons["fused-blocks"]
    assert "gdpa: bucketed cannot stand inside a compiled block" in reasons["compiled"]
    assert reasons["balanced"] == "the data source 'toy' has no option balance"
    assert reasons["graphed"] == "the run computes on cpu"
    assert "precision recipe 'fp8_block'" in reasons["fp8"]


def test_a_fused_kernel_makes_its_rung(tmp_path: Path) -> None:
    fused = [
        KernelImpl(op=op, contract=1, backend="acme", load="acme_kernels:run", devices=("cpu",), dtypes=("fp32",), features=words)
        for op, words in (("gdpa", ("dense_kv", "act_gelu")), ("jagged_attention", ("window",)))
    ]
    with fake_host(fake_plugin("acme-gem", {"gem_kernel_impls": fused})), fake_module("acme_kernels", run=lambda *a, **o: None):
        placed = {p.rung.name: p for p in climb("toy", toy(tmp_path, "kernels.prefer=['acme', 'reference']"))}
        assert placed["fused-attention"].reasons == ()
        run = preview(placed["fused-attention"].loaded)
    assert run.kernels["gdpa"] == "acme"
    assert run.kernels["norm_linear"] == "bucketed"


def test_a_rung_that_is_left_out_says_so_and_changes_nothing_above(tmp_path: Path) -> None:
    placed = {p.rung.name: p for p in climb("toy", toy(tmp_path), without=rungs_named(["overlapped"]))}
    assert placed["overlapped"].reasons == ("it is left out, as asked for",)
    assert not placed["fp8"].loaded.config.train.ahead
    assert {p.rung.name: p for p in climb("toy", toy(tmp_path))}["fp8"].loaded.config.train.ahead


def test_a_baseline_that_does_not_fit_is_no_rung(alone: None, tmp_path: Path) -> None:
    """HSTU's relative bias is a feature that the baselines do not have: nothing takes their place."""
    (padded,) = climb("toy", toy(tmp_path, "model.name=hstu"), rungs_named(["padded"]))
    assert "does not fit" in padded.reasons[0]
    (padded,) = climb("toy", toy(tmp_path, "model.name=hstu", "model.options.bias=none"), rungs_named(["padded"]))
    assert padded.reasons == ()


def test_a_configuration_that_is_wrong_by_itself_is_refused(alone: None, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="there is no such key"):
        list(climb("toy", toy(tmp_path, "model.options.dimm=3")))


def test_kernels_that_the_rungs_would_replace_are_refused(alone: None, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="its rungs name the kernels"):
        list(climb("toy", toy(tmp_path, "kernels.use.gdpa=reference")))


def test_several_processes_are_refused(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def two(loaded: Any) -> Any:
        run = preview(loaded)
        run.world = replace(run.world, size=2)
        return run

    monkeypatch.setattr("gem_core.bench.ladder.preview", two)
    with pytest.raises(RequestError, match="gem bench scale"):
        list(climb("toy", toy(tmp_path)))


def test_a_preview_makes_no_weights_tables_or_folder(alone: None, tmp_path: Path) -> None:
    run = preview(load_config("toy", toy(tmp_path)))
    assert all(p.is_meta for p in run.model.parameters())
    assert not hasattr(run, "embeddings")
    assert not (tmp_path / "run").exists()
    assert {stage.do for stage in compose_module.STAGES} >= set(compose_module.PREVIEWED)


# ---- figures ------------------------------------------------------------------------------------------------------------------------------


def test_figures_are_those_of_the_measured_batches(alone: None, tmp_path: Path) -> None:
    """96 rows in batches of 32: the warm-up takes the first, and the second epoch follows the first."""
    run = compose(load_config("toy", toy(tmp_path, "train.shuffle=false")))
    told: list[int] = []
    try:
        found = measure_steps(run, steps=4, warmup=1, told=told.append)
        run.progress.next_batch = 0
        batches = [batch for epoch in (0, 1) for work in epoch_feed(run, epoch) for batch in work.batches][1:5]
        model = sum(run_flops(run, batch).model for batch in batches)
        tokens = sum(int(span.offsets[-1]) for batch in batches for span in batch.event_offsets.values())
    finally:
        run.close()
    assert told == [1, 2, 3, 4, 5]
    assert run.progress.step == 5
    assert found.steps == 4
    seconds = 4 * 32 / found.samples_per_s
    assert found.tokens_per_s * seconds == pytest.approx(tokens)
    assert found.model_tflops * seconds * 1e12 == pytest.approx(model)
    assert 0 < found.ms <= found.ms_p99 <= 1e3 * seconds
    assert 0 < found.mfu_bf16 <= found.hfu
    assert found.peak_gib is None
    assert found.ne is not None
    assert 0.2 < found.ne < 5
    assert 0 <= found.data_share < 1
    assert found.first_step_s > 0
    assert found.compile_s == 0
    assert found.note == ""


def figures_of(folder: Path, steps: int = 6) -> StepFigures:
    """Of so many steps after two of warm-up."""
    run = compose(load_config("toy", toy(folder, "data.batch_size=8")))
    try:
        return measure_steps(run, steps=steps, warmup=2)
    finally:
        run.close()


@pytest.mark.parametrize(
    ("compiling", "before", "note"),
    [
        ({1}, 5, "warm-up of 5 steps, as step 1 compiled"),
        ({1, 3}, 7, "warm-up of 7 steps, as step 3 compiled"),
        ({1, 7}, 8, "warm-up of 8 steps, as step 7 compiled"),  # the second of the measured ones: they begin again
        ({2, 3, 4, 5, 6, 7, 8}, 8, "warm-up of 8 steps, as step 8 compiled"),  # most steps before what is measured whatever it does
        (set(range(1, 99)), 8, "compiled up to measured step 6: no figure of a settled run"),
    ],
)
def test_steps_that_compile_are_not_measured(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiling: set[int], before: int, note: str
) -> None:
    """A compilation is told as torch tells it, by the number of graphs."""
    take, flops = step_module.take, step_module.run_flops
    seen: list[Any] = []
    counted: list[Any] = []

    def compiles(run: Any, *what: Any) -> Any:
        run.compiled.graphs += run.progress.step + 1 in compiling
        work = take(run, *what)
        seen.append(work.batches[0])
        return work

    def counts(run: Any, batch: Any) -> Any:
        counted.append(batch)
        return flops(run, batch)

    quiet = figures_of(tmp_path)
    monkeypatch.setattr(step_module, "take", compiles)
    monkeypatch.setattr(step_module, "run_flops", counts)
    found = figures_of(tmp_path)
    assert (found.note, quiet.note) == (note, "")
    assert found.ne == quiet.ne  # of the same batches
    assert len(seen) == before + 6
    assert all(one is other for one, other in zip(counted[-6:], seen[before:], strict=True))


def test_batches_of_measured_steps_are_not_kept(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who holds them makes the feed ask for new page-locked memory at each step."""
    take = step_module.take
    labels: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def watched(run: Any, *what: Any) -> Any:
        work = take(run, *what)
        labels.append(weakref.ref(next(iter(work.batches[0].labels.values()))))
        gc.collect()
        alive.append(sum(label() is not None for label in labels))
        return work

    monkeypatch.setattr(step_module, "take", watched)
    figures_of(tmp_path)
    assert len(labels) >= 8
    assert max(alive) <= 3


def test_gradients_of_the_last_step_are_looked_at_too(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt() -> float:
        raise RunFailed("training step 8", "its gradients are not finite", "Lower the learning rate.")

    take = step_module.take

    def last_spoilt(run: Any, *what: Any) -> Any:
        work = take(run, *what)
        if run.progress.step == 8:
            run.learner.unread = spoilt
        return work

    monkeypatch.setattr(step_module, "take", last_spoilt)
    with pytest.raises(RunFailed, match="training step 8"):
        figures_of(tmp_path)


@pytest.mark.parametrize(("owner", "name"), [(feed, "check_batch"), (Batch, "to")])
def test_waiting_for_a_batch_to_be_read_or_copied_counts_as_data(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    plain, slow = getattr(owner, name), figures_of(tmp_path, 2).ms / 1e3

    def late(*what: Any) -> Any:
        time.sleep(5 * slow)
        return plain(*what)

    monkeypatch.setattr(owner, name, late)
    assert 0.6 < figures_of(tmp_path, 2).data_share < 1


def test_rounding_keeps_six_digits(alone: None) -> None:
    figures = step_module.StepFigures(
        samples_per_s=123456.789, tokens_per_s=1.0, ms=0.123456789, model_tflops=1.0, mfu_bf16=0.1, mfu_weighted=0.1, hfu=0.1, peak_gib=None, ne=None,
        steps=3, ms_p99=1.0, data_share=0.0, first_step_s=1.0, compile_s=0.0, note="",
    )  # fmt: skip
    row = figures.row()
    assert (row["samples_per_s"], row["ms"], row["steps"], row["ne"]) == (123457.0, 0.123457, 3, None)
    assert tuple(COLUMNS[5:]) == tuple(row)


# ---- the command ----------------------------------------------------------------------------------------------------------------------------


def test_the_ladder_of_the_toy_recipe_on_a_cpu(alone: None, tmp_path: Path) -> None:
    done = gem("--csv", str(tmp_path / "out/rows.csv"), "--plot", str(tmp_path / "out/rows.svg"), folder=tmp_path)
    assert done.exit_code == 0, done.output
    rows = rows_of(tmp_path / "out/rows.csv")
    assert [row["rung"] for row in rows] == NAMES
    assert tuple(rows[0]) == COLUMNS
    measured = [row for row in rows if row["samples_per_s"]]
    assert [row["rung"] for row in measured] == ["padded", "bucketed", "overlapped"]
    assert len({row["ne"] for row in measured[1:]}) == 1  # the same batches, the same arithmetic
    assert float(measured[0]["ne"]) == pytest.approx(float(measured[1]["ne"]), rel=1e-4)
    assert all(row["note"].startswith("cannot be here: ") for row in rows if not row["samples_per_s"])
    assert "nothing but reference fits" in done.output
    assert {row["gpu"] for row in rows} == {"cpu"}
    assert (tmp_path / "out/rows.svg").read_text().count("overlapped") == 1


def test_a_second_call_appends_and_named_rungs_are_measured_alone(alone: None, tmp_path: Path) -> None:
    for rung in ("padded", "bucketed"):
        assert gem("--rung", rung, "--csv", str(tmp_path / "rows.csv"), folder=tmp_path).exit_code == 0
    assert [row["rung"] for row in rows_of(tmp_path / "rows.csv")] == ["padded", "bucketed"]


def test_json_is_alone_on_standard_output(alone: None, tmp_path: Path) -> None:
    done = gem("--rung", "padded", "--rung", "fp8", "--json", folder=tmp_path)
    first, second = json.loads(done.stdout)
    assert first["rung"] == "padded"
    assert first["steps"] == 3
    assert second["note"].startswith("cannot be here")
    assert "padded: composing" in done.stderr


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RunFailed("training step 1", "the loss is not finite", "Lower it."), 1, "failed: training step 1: the loss is not finite"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore"), 0, "does not fit into memory: CUDA out of memory. Tried"),
    ],
)
def test_a_rung_that_breaks_off_is_a_row_and_the_next_goes_on(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, said: str
) -> None:
    measure = step_module.measure_steps

    def breaks(run: Any, **how: Any) -> Any:
        if run.config.kernels.use["gdpa"] == "padded":
            raise error
        return measure(run, **how)

    monkeypatch.setattr(step_module, "measure_steps", breaks)
    done = gem("--rung", "padded", "--rung", "bucketed", "--csv", str(tmp_path / "rows.csv"), folder=tmp_path)
    assert done.exit_code == code
    padded, bucketed = rows_of(tmp_path / "rows.csv")
    assert padded["note"].startswith(said)
    assert padded["samples_per_s"] == ""
    assert float(bucketed["samples_per_s"]) > 0


def test_an_error_that_is_no_rungs_own_is_not_caught(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(run: Any, **how: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(step_module, "measure_steps", breaks)
    assert isinstance(gem("--rung", "padded", folder=tmp_path).exception, ZeroDivisionError)


# ---- files ----------------------------------------------------------------------------------------------------------------------------------


def row(rung: str, **values: Any) -> dict[str, Any]:
    figures = {"samples_per_s": 10.0, "mfu_bf16": 0.2, "hfu": 0.25, "steps": 3} if values.pop("measured", True) else {}
    return {"recipe": "toy", "gpu": "cpu", "rung": rung, **figures, "note": "", **values}


def test_a_file_with_other_columns_is_refused_before_anything_is_measured(alone: None, tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("op,ms\n")
    with pytest.raises(RequestError, match="its columns are op, ms"):
        check_columns(tmp_path / "other.csv")
    done = gem("--csv", str(tmp_path / "other.csv"), folder=tmp_path)
    assert isinstance(done.exception, RequestError)
    assert "composing" not in done.output
    with pytest.raises(RequestError, match="Give a file with date, gpu"):
        append_rows(tmp_path / "other.csv", [row("padded")])


def test_the_picture_shows_measured_rungs(tmp_path: Path) -> None:
    rows = [row("padded"), row("balanced", measured=False, note="cannot be here"), row("bucketed", samples_per_s=25.0)]
    draw(rows, tmp_path / "a.svg")
    draw(rows, tmp_path / "b.svg")
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert "padded" in text
    assert "25  (2.50x)" in text
    assert "balanced" not in text
    draw([], tmp_path / "none.svg")
