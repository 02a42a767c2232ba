"""Whole runs of the fakes: order of composing, resuming to the bit, stopping, what the folder holds."""

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import gem_train_fakes
import pytest
import torch
from gem_train_fakes import FakeSource, Probe
from gem_train_ranks import run_ranks
from torch import Tensor, nn

from gem_core.batch import Batch
from gem_core.builtin.embedding import TorchEmbeddings
from gem_core.config.load import LoadedConfig, load_config
from gem_core.spec import CheckpointInfo, ParallelContext, ParallelStrategy, PluginError, RequestError, RunFailed, RunInfo, StepInfo, hookimpl
from gem_core.train import compose as composing
from gem_core.train import loop
from gem_core.train.checkpoint.saved import Saved, checkpoints, find_checkpoint
from gem_core.train.compose import STAGES, compose
from gem_core.train.composed import Run
from gem_core.train.log import read_log
from gem_core.train.run import evaluate_run, train
from gem_core.train.step import train_step
from gem_core.train.world import World

Configure = Callable[..., LoadedConfig]

ORDER = (
    "configuration",
    "plugins",
    "topology",
    "mesh",
    "data source and schema",
    "model on meta",
    "precision",
    "strategies by stage",
    "materialise",
    "kernels bound",
    "compile per block",
    "optimisers",
    "restore",
    "manifest",
    "run started",
)


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes twice as long as these runs; test_train_report.py draws."""
    monkeypatch.setattr("gem_core.train.run.write_report", lambda folder: folder)


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    return [record for record in read_log(folder) if record["event"] == name]


def tensors(value: Any, name: str = "") -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, Mapping):
        return {k: t for key, item in value.items() for k, t in tensors(item, f"{name}/{key}").items()}
    if isinstance(value, list):
        return {k: t for i, item in enumerate(value) for k, t in tensors(item, f"{name}/{i}").items()}
    return {}


def assert_same(first: Saved, second: Saved) -> None:
    """Two checkpoints agree to the bit in all that is not time."""
    a, b = first.read(), second.read()
    one, two = tensors(a), tensors(b)
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
    timeless = [{k: v for k, v in content["trainer"]["progress"].items() if k not in ("meter", "eval_seconds")} for content in (a, b)]
    assert timeless[0] == timeless[1]
    assert a["trainer"]["progress"]["meter"]["run"]["loss"] == b["trainer"]["progress"]["meter"]["run"]["loss"]


def without_times(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    times = ("seconds", "data_seconds", "compute_seconds", "samples_per_second", "mfu", "time")
    return [{key: value for key, value in record.items() if key not in times} for record in records]


# ---- composing --------------------------------------------------------------------------------------------------------------------------


def test_the_order_of_composing_is_pinned() -> None:
    assert tuple(stage.name for stage in STAGES) == ORDER


def test_the_order_is_printed_at_debug(configure: Configure, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="gem_core.train"):
        compose(configure()).close()
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("compose: ")]
    assert said == [f"compose: {name}" for name in ORDER]


def test_everything_is_on_the_device_and_weights_depend_on_the_seed_alone(configure: Configure) -> None:
    runs = [compose(configure(f"run.seed={seed}", out=f"run{i}")) for i, seed in enumerate((1, 1, 2))]
    for run in runs:
        run.close()
        assert not any(t.is_meta for t in [*run.model.parameters(), *run.model.buffers()])
        assert float(run.model.get_buffer("scale")) == 0.5  # not part of a state dict
    weights = [{name: p.detach() for name, p in run.model.named_parameters()} for run in runs]
    assert all(torch.equal(p, weights[1][name]) for name, p in weights[0].items())
    assert not torch.equal(weights[0]["first.weight"], weights[2]["first.weight"])


def test_case_A07_a_single_process_needs_no_process_group(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    train(configure("train.epochs=1", "run.device=auto" if not torch.cuda.is_available() else "run.device=cpu"))
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.name=prob", "Did you mean 'probe'"),
        ("data.source=fak", "Did you mean 'fake'"),
        ("model.options.hiden=3", "Did you mean 'hidden'"),
        ("data.options.row=3", "Did you mean 'rows'"),
        ("plugins.require=['no-such']", "plugin 'no-such'"),
        ("parallel.strategies=['sinlge']", "Did you mean 'single'"),
        ("embedding.engine=torc", "Did you mean 'torch'"),
        ("precision.recipe=fp31", "Did you mean 'fp32'"),
        ("kernels.use.gdqa='reference'", "Did you mean 'gdpa'"),
        ("data.options.rows=0", "no rows"),
    ],
)
def test_a_wrong_request_leaves_no_run_folder(configure: Configure, tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        train(configure(override))
    assert not (tmp_path / "run").exists()


class HasPlainTensor(Probe):
    def __init__(self, schema: Any, options: Any) -> None:
        super().__init__(schema, options)
        self.table = torch.zeros(3)


def test_a_tensor_outside_of_buffers_is_named(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gem_train_fakes, "Probe", HasPlainTensor)
    with pytest.raises(PluginError, match="keeps the tensor 'table' as a plain attribute"):
        compose(configure())


class AsksForValues(Probe):
    def __init__(self, schema: Any, options: Any) -> None:
        super().__init__(schema, options)
        self.total = float(self.first.weight.sum())


def test_a_model_that_needs_values_to_be_built_is_named(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gem_train_fakes, "Probe", AsksForValues)
    with pytest.raises(PluginError, match="model 'probe': it cannot be built on the meta device"):
        compose(configure())


class OnMeta:
    """A strategy that looks at what it is given."""

    seen: ClassVar[list[tuple[str, bool]]] = []

    def __init__(self, name: str) -> None:
        self.name = name

    def apply(self, module: nn.Module, context: ParallelContext) -> nn.Module:
        self.seen.append((self.name, any(p.is_meta for p in module.parameters())))
        return module

    def describe(self) -> Mapping[str, Any]:
        return {"name": self.name}


def test_strategies_go_by_stage_and_those_on_meta_before_the_weights(
    configure: Configure, plugins: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = [
        ParallelStrategy(name=name, stage=stage, summary="", load=f"gem_train_fakes:{name}", on_meta=meta)
        for name, stage, meta in (("late", "memory", False), ("early", "experts", True), ("dense", "dense", False), ("shard", "dense", True))
    ]
    for declaration in declared:
        monkeypatch.setattr(gem_train_fakes, declaration.name, partial(OnMeta, declaration.name), raising=False)
    module = ModuleType("strategies")
    module.gem_parallel_strategies = hookimpl(lambda: declared, specname="gem_parallel_strategies")  # type: ignore[attr-defined]
    loaded = configure("parallel.strategies=['late', 'dense', 'shard', 'early']")
    plugins(module)
    OnMeta.seen.clear()
    run = compose(loaded)
    run.close()
    assert OnMeta.seen == [("early", True), ("shard", True), ("dense", False), ("late", False)]
    assert run.manifest["parallel"] == {name: {"name": name} for name in ("early", "dense", "shard", "late")}


def test_several_processes_need_a_strategy_for_the_dense_part(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(configure("parallel.strategies=[]"))
    for stage in STAGES[:7]:
        assert stage.do is not None
        stage.do(run)
    run.world = World(rank=0, size=2)
    with pytest.raises(RequestError, match="none of the strategies"):
        composing._strategies(run)


# ---- what a run leaves ------------------------------------------------------------------------------------------------------------------


def test_a_run_folder_holds_everything(configure: Configure, tmp_path: Path) -> None:
    summary = train(configure("train.eval_every=5"))
    folder = tmp_path / "run"
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.toml", "manifest.json", "log.jsonl", "summary.json", "tensorboard", "checkpoints"}
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert [path.name for path in checkpoints(folder / "checkpoints")] == ["step-12"]
    assert any((folder / "tensorboard").iterdir())
    assert [record["step"] for record in events(folder, "train")] == [4, 8, 12]
    assert [record["step"] for record in events(folder, "eval")] == [5, 10, 12]


def test_case_H10_unknown_ids_that_a_source_counts_are_in_the_log_and_the_summary(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(configure())["unknown_ids"] == {}
    assert events(tmp_path / "run", "unknown_ids") == []
    shutil.rmtree(tmp_path / "run")
    counts = {"train": {}, "test": {"item": 3}}
    monkeypatch.setattr(FakeSource, "unknown_ids", lambda self, split: counts[split], raising=False)
    assert train(configure())["unknown_ids"] == counts
    assert events(tmp_path / "run", "unknown_ids") == [{"event": "unknown_ids", "step": 0, **counts}]
    assert [record["event"] for record in read_log(tmp_path / "run")][:2] == ["started", "unknown_ids"]


def test_the_summary_has_the_promised_keys(configure: Configure) -> None:
    summary = train(configure())
    assert summary["test"].keys() == {"ctr", "cvr"}
    assert {"auc", "ne", "calibration", "rows"} <= summary["test"]["ctr"].keys()
    assert {"train_seconds", "eval_seconds", "rows", "samples_per_second", "mfu", "kernels", "seed", "baseline"} <= summary.keys()
    assert summary["baseline"] == {"constant": {"auc": 0.5, "ne": 1.0}}
    assert (summary["rows"], summary["steps"], summary["seed"]) == (192, 12, 1)
    assert summary["samples_per_second"] == pytest.approx(192 / summary["train_seconds"])
    flops = 3 * 192 * (2 * 7 * 8 + 2 * 8 * 2)
    assert summary["train_flops"] == flops
    assert summary["mfu"] == pytest.approx(flops / summary["train_seconds"] / summary["peak"]["flops_per_second"])
    assert summary["ledger"]["train"] == {"offered": 192, "trained": 192, "dropped_uneven": 0, "not_read": 0}
    assert summary["ledger"]["source"] == {"read": 128, "train": 96, "test": 32}


def test_the_manifest_says_what_the_run_was_made_of(configure: Configure, tmp_path: Path) -> None:
    train(configure("optim.lr=0.5"))
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    origins = {row["path"]: row["origin"] for row in manifest["config"]}
    assert origins["optim.lr"] == "--set"
    assert origins["data.source"].endswith("fakes.toml")
    assert origins["optim.eps"] == "default"
    assert {"python", "torch", "gem-core", "numpy"} <= manifest["versions"].keys()
    assert [p["name"] for p in manifest["plugins"]] == ["gem-core", "gem_train_fakes"]
    assert {d["module"]: d["format"] for d in manifest["precision"]}["first"] == "fp32"
    assert manifest["parallel"] == {"single": {"strategy": "single"}}
    assert manifest["parameters"] == {"dense": 7 * 8 + 8 + 16 + 16 + 2, "tables": 80}
    assert manifest["tables"][0]["name"] == "item"


def test_the_written_configuration_gives_the_same_run(configure: Configure, tmp_path: Path) -> None:
    first = configure("model.options.hidden=5", "optim.betas=[0.8, 0.9]", 'kernels.use={gdpa="reference"}', "data.options.shares={}")
    train(first)
    again = load_config(tmp_path / "run" / "config.toml")
    assert again.config == first.config


def test_training_improves_on_the_first_evaluation(configure: Configure, tmp_path: Path) -> None:
    train(configure("train.epochs=8", "train.eval_every=6", "optim.lr=0.02", "data.options.rows=480", "data.batch_size=32"))
    ne = [record["test"]["ctr"]["ne"] for record in events(tmp_path / "run", "eval")]
    assert ne[-1] < 0.8
    assert ne[-1] < ne[0]


def test_case_E07_checkpoints_at_every_so_many_steps_and_at_the_end(configure: Configure, tmp_path: Path) -> None:
    train(configure("train.checkpoint_every=5", "train.keep_checkpoints=9"))
    assert [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["step-5", "step-10", "step-12"]
    assert [record["step"] for record in events(tmp_path / "run", "checkpoint")] == [5, 10, 12]


def test_a_run_for_measuring_leaves_no_last_checkpoint(configure: Configure, tmp_path: Path) -> None:
    summary = train(configure("train.checkpoint_every=5", "train.checkpoint_last=false", "train.keep_checkpoints=9"))
    assert [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["step-5", "step-10"]
    assert summary["steps"] == 12


def test_max_steps_ends_the_run(configure: Configure) -> None:
    summary = train(configure("train.max_steps=7", "train.epochs=9"))
    assert (summary["steps"], summary["rows"]) == (7, 112)
    assert summary["ledger"]["train"] == {"offered": 192, "trained": 112, "dropped_uneven": 0, "not_read": 80}


def test_a_baseline_that_is_not_finite_does_not_cost_the_summary(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeSource, "baselines", lambda self: {"odd": {"ctr": {"auc": float("nan"), "ne": 1.0}}})
    assert train(configure())["baseline"] == {"odd": {"auc": None, "ne": 1.0}}


def test_a_source_that_gives_other_rows_than_it_says_is_told(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = FakeSource.rows
    monkeypatch.setattr(FakeSource, "rows", lambda self, split: rows(self, split) + (split == "test"))
    train(configure("train.epochs=1"))
    assert "test: the source says it has 33 rows and gave 32" in [record.getMessage() for record in caplog.records]


def test_shuffling_is_by_seed_and_can_be_off(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int | None] = []
    batches = FakeSource.batches

    def spy(self: FakeSource, split: str, **keywords: Any) -> Any:
        if split == "train":
            seeds.append(keywords["seed"])
        return batches(self, split, **keywords)

    monkeypatch.setattr(FakeSource, "batches", spy)
    train(configure("train.epochs=1", "run.seed=5"))
    train(configure("train.epochs=1", "train.shuffle=false"))
    assert seeds == [5, None]


def test_case_D12_one_class_in_the_test_split_is_reported_not_fatal(configure: Configure) -> None:
    summary = train(configure("data.options.one_class=true"))
    assert summary["test"]["ctr"]["auc"] is None
    assert summary["test"]["ctr"]["reasons"]["auc"] == "one class: no positive row"
    assert summary["test"]["cvr"]["rows"] == 0


def test_averaged_weights_are_used_for_evaluation_only(configure: Configure, tmp_path: Path) -> None:
    plain = train(configure("optim.lr=0.05"))
    averaged = train(configure("optim.lr=0.05", "train.ema_decay=0.9", out="averaged"))
    a, b = (find_checkpoint(tmp_path / name).read()["dense"] for name in ("run", "averaged"))
    assert all(torch.equal(t, b["model"][name]) for name, t in a["model"].items())
    assert averaged["test"]["ctr"]["ne"] != plain["test"]["ctr"]["ne"]
    assert evaluate_run(tmp_path / "averaged")["test"] == averaged["test"]


# ---- the folder of an earlier run -------------------------------------------------------------------------------------------------------


def test_an_earlier_run_is_moved_aside_and_one_is_kept(configure: Configure, tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        train(configure(f"run.seed={seed}", "train.epochs=1"))
    seeds = {path.name: json.loads((path / "summary.json").read_text())["seed"] for path in tmp_path.iterdir() if path.is_dir()}
    assert seeds == {"run": 3, "run.previous": 2}


@pytest.mark.parametrize("name", ["run", "run.previous"])
@pytest.mark.parametrize("content", [None, "[1, 2", '{"other": 1}', "7"])
def test_somebody_elses_folder_is_left_alone(configure: Configure, tmp_path: Path, name: str, content: str | None) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.txt").write_text("years of work")
    if content is not None:
        (tmp_path / name / "manifest.json").write_text(content)
    with pytest.raises(RequestError, match="Choose another one with --out"):
        train(configure())
    assert (tmp_path / name / "thesis.txt").read_text() == "years of work"


def test_a_file_in_the_way_is_refused(configure: Configure, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(RequestError, match="is no folder"):
        train(configure())


# ---- resuming ---------------------------------------------------------------------------------------------------------------------------


def interrupt_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Kill the run, as a person does, right after the optimiser step of that number."""

    def deadly(*args: Any, step: int, **keywords: Any) -> Any:
        result = train_step(*args, step=step, **keywords)
        if step == deadly_step:
            raise KeyboardInterrupt
        return result

    deadly_step = step
    monkeypatch.setattr(loop, "train_step", deadly)


@pytest.mark.parametrize(
    "extra",
    [
        (),
        ("model.options.dropout=0.3", "train.ema_decay=0.8", "optim.schedule=cosine", "optim.warmup_steps=3"),
        ("optim.accumulate=2", "embedding.optimizer=adam", "data.options.rows=100"),
    ],
)
@pytest.mark.parametrize("killed", [5, 9])
def test_a_killed_run_resumes_to_the_bit(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: tuple[str, ...], killed: int
) -> None:
    """Two epochs straight, against the same killed between checkpoints (in mid epoch and mid window) and resumed."""
    settings = ("train.checkpoint_every=3", "train.eval_every=4", "train.epochs=4", *extra)
    straight = train(configure(*settings, out="straight"))
    with monkeypatch.context() as patch:
        interrupt_after(patch, killed)
        with pytest.raises(KeyboardInterrupt):
            train(configure(*settings))
    resumed = train(configure(*settings), resume=tmp_path / "run")
    assert resumed["test"] == straight["test"]
    assert (resumed["rows"], resumed["steps"], resumed["ledger"]) == (straight["rows"], straight["steps"], straight["ledger"])
    assert_same(find_checkpoint(tmp_path / "run"), find_checkpoint(tmp_path / "straight"))
    for name in ("train", "eval", "checkpoint"):  # case D16: windows of metrics go on as well
        assert without_times(events(tmp_path / "run", name)) == without_times(events(tmp_path / "straight", name))


@pytest.mark.parametrize("flush", [7, 10, 11])
def test_a_run_killed_while_it_writes_a_checkpoint_resumes_to_the_bit(configure: Configure, tmp_path: Path, flush: int) -> None:
    """Signal 9 after the tensors, after all four files, and after the folder of the second checkpoint: the first one counts."""
    settings = ("train.checkpoint_every=4", "model.options.dropout=0.3")
    train(configure(*settings, out="straight"))
    configure()  # the file that the killed process reads
    words = " ".join(f"--set {setting}" for setting in settings)
    killed = run_ranks(1, tmp_path, f"train -c {tmp_path / 'fakes.toml'} {words}", kill_at_flush=flush)
    assert killed.codes == [-9]
    assert find_checkpoint(tmp_path / "run").about["step"] == 4
    assert (tmp_path / "run" / "checkpoints" / ".writing-step-8").is_dir()
    train(configure(*settings), resume=tmp_path / "run")
    assert_same(find_checkpoint(tmp_path / "run"), find_checkpoint(tmp_path / "straight"))
    assert not (tmp_path / "run" / "checkpoints" / ".writing-step-8").exists()


def test_planted_fault_without_the_random_state_a_resume_differs(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twin: the comparison above goes red when a part of the state is forgotten."""
    settings = ("train.checkpoint_every=3", "model.options.dropout=0.3")
    train(configure(*settings, out="straight"))
    with monkeypatch.context() as patch:
        interrupt_after(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            train(configure(*settings))
    monkeypatch.setattr("gem_core.train.checkpoint.values.restore_random_state", lambda states, world: None)
    train(configure(*settings), resume=tmp_path / "run")
    with pytest.raises(AssertionError):
        assert_same(find_checkpoint(tmp_path / "run"), find_checkpoint(tmp_path / "straight"))


def test_a_finished_run_can_be_made_longer(configure: Configure, tmp_path: Path) -> None:
    train(configure("train.epochs=1"))
    longer = train(configure("train.epochs=2"), resume=tmp_path / "run")
    straight = train(configure("train.epochs=2", out="straight"))
    assert longer["test"] == straight["test"]
    one, two = (tensors(find_checkpoint(tmp_path / name).read()["dense"]) for name in ("run", "straight"))
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["resumed"] == [6]


def test_a_resumed_run_writes_where_it_was(configure: Configure, tmp_path: Path) -> None:
    train(configure("train.epochs=1"))
    train(configure("train.epochs=2", out="elsewhere"), resume=tmp_path / "run")
    assert find_checkpoint(tmp_path / "run").about["step"] == 12
    assert not (tmp_path / "elsewhere").exists()


def test_resuming_a_finished_run_only_evaluates(configure: Configure, tmp_path: Path) -> None:
    first = train(configure())
    again = train(configure(), resume=tmp_path / "run")
    assert (again["test"], again["steps"]) == (first["test"], first["steps"])
    assert len(checkpoints(tmp_path / "run" / "checkpoints")) == 1


def test_a_resume_that_would_choose_other_kernels_stops(configure: Configure, tmp_path: Path) -> None:
    train(configure("train.epochs=1"))
    about = find_checkpoint(tmp_path / "run").path / "about.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "kernels": {"gdpa": "triton"}}))
    with pytest.raises(RequestError, match=r"started with \{'gdpa': 'triton'\} and would go on with \{\}"):
        train(configure("train.epochs=2"), resume=tmp_path / "run")


def test_resuming_with_another_seed_is_refused(configure: Configure, tmp_path: Path) -> None:
    train(configure("train.epochs=1"))
    with pytest.raises(RequestError, match=r"resuming with run.seed = 2: the run was started with 1"):
        train(configure("run.seed=2"), resume=tmp_path / "run")


def test_resuming_nothing_is_refused(configure: Configure, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no manifest.json of a run"):
        train(configure(), resume=tmp_path)


def test_origins_survive_a_resume(configure: Configure, tmp_path: Path) -> None:
    train(configure("optim.lr=0.5", "train.epochs=1"))
    loaded = load_config(tmp_path / "run" / "config.toml", ["train.epochs=2"])
    train(loaded, resume=tmp_path / "run")
    origins = {row["path"]: row["origin"] for row in json.loads((tmp_path / "run" / "manifest.json").read_text())["config"]}
    assert (origins["optim.lr"], origins["train.epochs"], origins["optim.eps"]) == ("--set", "--set", "default")


# ---- evaluating a run -------------------------------------------------------------------------------------------------------------------


def test_case_E10_a_run_is_evaluated_without_an_optimiser(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = train(configure())
    before = sorted(path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*"))
    monkeypatch.setattr(composing, "adamw", lambda *args, **keywords: pytest.fail("an optimiser was made"))
    done = evaluate_run(tmp_path / "run")
    assert done["test"] == summary["test"]
    assert done["step"] == 12
    assert sorted(path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")) == before


def test_case_J06_train_dump_load_evaluate_elsewhere(configure: Configure, tmp_path: Path) -> None:
    """The example in one test: train, copy the folder away, evaluate the copy, go on from it."""
    summary = train(configure())
    shutil.copytree(tmp_path / "run", tmp_path / "elsewhere" / "copy")
    shutil.rmtree(tmp_path / "run")
    copy = tmp_path / "elsewhere" / "copy"
    assert evaluate_run(copy)["test"] == summary["test"]
    longer = train(load_config(copy / "config.toml", ["train.epochs=3", f'run.out="{copy}"']), resume=copy)
    assert longer["steps"] == 18


# ---- failing ----------------------------------------------------------------------------------------------------------------------------


class Spoiled(Probe):
    """Its second layer turns its output into NaN at the sixth training step."""

    def forward(self, batch: Batch, embedded: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.training and len(self.seen) >= 5:
            with torch.no_grad():
                self.get_parameter("last.weight")[0, 0] = float("nan")
        return super().forward(batch, embedded)


def test_a_nan_loss_ends_the_run_and_keeps_the_last_good_checkpoint(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gem_train_fakes, "Probe", Spoiled)
    with pytest.raises(RunFailed, match=r"training step 6: the loss is not finite: parameter 'last.weight' is not finite") as caught:
        train(configure("train.checkpoint_every=2", "train.keep_checkpoints=1"))
    assert caught.value.exit_code == 1
    folder = tmp_path / "run"
    assert [path.name for path in checkpoints(folder / "checkpoints")] == ["step-4"]
    assert all(torch.isfinite(t).all() for t in tensors(find_checkpoint(folder).read()).values() if t.is_floating_point())
    assert not (folder / "summary.json").exists()
    assert "not finite" in events(folder, "failed")[0]["error"]


@pytest.mark.parametrize("background", [True, False])
def test_a_weight_that_turned_nan_after_the_loss_is_never_saved(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, background: bool
) -> None:
    """The loss of step 4 is finite and its update spoils a weight: the checkpoint of that step is refused, that of step 2 stays.

    Beside training, the loss of the next step is the first to stop the run, and the refusal is in the log.
    """

    def spoil(learner: Any, *args: Any, step: int, **keywords: Any) -> Any:
        result = train_step(learner, *args, step=step, **keywords)
        if step == 4:
            nn.init.constant_(learner.model.get_parameter("last.bias"), float("inf"))
        return result

    monkeypatch.setattr(loop, "train_step", spoil)
    refusal = "checkpoint of step 4: dense/model/last.bias holds a value that is not finite"
    with pytest.raises(RunFailed, match="training step 5: the loss is not finite" if background else refusal):
        train(configure("train.checkpoint_every=2", f"train.checkpoint_background={str(background).lower()}"))
    assert any(refusal in record.getMessage() for record in caplog.records) == background
    assert [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["step-2"]


def test_checkpoints_beside_training_equal_those_written_at_once(configure: Configure, tmp_path: Path) -> None:
    """Case E13 on whole runs: every file of tensors has the same hash."""
    settings = ("train.checkpoint_every=5", "train.keep_checkpoints=9", "model.options.dropout=0.3", "train.ema_decay=0.9")
    train(configure(*settings))
    train(configure(*settings, "train.checkpoint_background=false", out="at once"))
    for step in (5, 10, 12):
        one, other = (find_checkpoint(tmp_path / name / "checkpoints" / f"step-{step}") for name in ("run", "at once"))
        names = [name for name in one.about["files"] if name != "trainer.pt"]  # which holds times
        assert len(names) > 1
        assert {name: one.about["files"][name] for name in names} == {name: other.about["files"][name] for name in names}


def test_an_engine_that_cannot_be_saved_is_refused_before_training(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(TorchEmbeddings, "table_slices")
    with pytest.raises(PluginError, match="embedding engine 'torch': it lacks table_slices"):
        train(configure())
    assert not (tmp_path / "run").exists()


def test_a_run_does_not_start_from_a_harmed_checkpoint(configure: Configure, tmp_path: Path) -> None:
    train(configure("train.epochs=1"))
    file = find_checkpoint(tmp_path / "run").path / "tensors-0-0.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(RunFailed, match=r"file tensors-0-0\.safetensors holds other bytes than were written"):
        train(configure("train.epochs=2"), resume=tmp_path / "run")
    with pytest.raises(RunFailed, match=r"tensors-0-0\.safetensors"):
        evaluate_run(tmp_path / "run")


def test_settings_of_the_optimiser_are_those_of_the_resumed_configuration(configure: Configure, tmp_path: Path) -> None:
    train(configure("train.epochs=1", "optim.weight_decay=0.1"))
    run = compose(configure("train.epochs=2", "optim.weight_decay=0.3", "optim.betas=[0.5, 0.6]"), resume=tmp_path / "run")
    try:
        assert {group["weight_decay"] for group in run.learner.optimizer.param_groups} == {0.3, 0.0}
        assert {tuple(group["betas"]) for group in run.learner.optimizer.param_groups} == {(0.5, 0.6)}
        assert {float(state["step"]) for state in run.learner.optimizer.state.values()} == {6.0}
    finally:
        run.close()


def test_a_label_outside_zero_and_one_is_a_wrong_request(configure: Configure) -> None:
    with pytest.raises(RequestError, match=r"label 'ctr': it holds 2.0") as caught:
        train(configure("data.options.bad_label=40"))
    assert caught.value.exit_code == 2


# ---- notices ----------------------------------------------------------------------------------------------------------------------------


def listener(heard: list[Any], *, broken: bool = False) -> ModuleType:
    module = ModuleType("listener")

    @hookimpl
    def gem_run_started(run: RunInfo) -> None:
        heard.append(run)
        if broken:
            raise ValueError("a listener's bug")

    @hookimpl
    def gem_step_finished(run: RunInfo, step: StepInfo) -> None:
        heard.append(step)

    @hookimpl
    def gem_checkpoint_saved(run: RunInfo, checkpoint: CheckpointInfo) -> None:
        assert (checkpoint.path / "about.json").is_file()
        heard.append(checkpoint)

    @hookimpl
    def gem_run_finished(run: RunInfo, summary: Mapping[str, Any]) -> None:
        heard.append(summary)

    for hook in (gem_run_started, gem_step_finished, gem_checkpoint_saved, gem_run_finished):
        setattr(module, hook.__name__, hook)
    return module


def test_listeners_hear_of_the_run(configure: Configure, plugins: Callable[..., None], tmp_path: Path) -> None:
    heard: list[Any] = []
    loaded = configure("train.checkpoint_every=6")
    plugins(listener(heard))
    summary = train(loaded)
    started, *middle, finished = heard
    assert (started.folder, started.seed, started.world) == (tmp_path / "run", 1, 1)
    assert finished == summary
    steps = [item for item in middle if isinstance(item, StepInfo)]
    assert [(s.step, s.epoch, s.rows) for s in steps] == [(4, 0, 16), (8, 1, 16), (12, 1, 16)]
    assert steps[0].flops == 3 * 16 * (2 * 7 * 8 + 2 * 8 * 2)
    assert [item.step for item in middle if isinstance(item, CheckpointInfo)] == [6, 12]


def test_a_listener_that_raises_does_not_stop_the_run(configure: Configure, plugins: Callable[..., None]) -> None:
    heard: list[Any] = []
    loaded = configure()
    plugins(listener(heard, broken=True))
    assert train(loaded)["steps"] == 12
    assert len(heard) == 1
