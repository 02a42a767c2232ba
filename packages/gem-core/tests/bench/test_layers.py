"""Layers alone: which ones, on what, how their figures add up, and that measuring changes nothing."""

import csv
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gem_core.bench import flops, layers
from gem_core.bench.flops import step_flops
from gem_core.bench.layers import LocalMfu, Measured, _Alone, _Call, _timed, _timed_on_gpu, layers_of, measure_layers
from gem_core.bench.roofline import Machine
from gem_core.cli.main import run as gem
from gem_core.config.load import load_config
from gem_core.ops.products import linear_flops, own_flops
from gem_core.spec import RequestError
from gem_core.train.compose import compose
from gem_core.train.composed import Run
from gem_core.train.efficiency import Peak
from gem_core.train.loop import epoch_feed

CPU = torch.device("cpu")
MACHINE = Machine(name="test", device=CPU, peak=Peak(flops_per_second=1e11, dtype="fp32", source="test"), bandwidth=1e10)
SMALL = ["run.device=cpu", "data.batch_size=24", "data.options.rows=64", "model.options.dim=8", "model.options.sequence.dim=8"]


@pytest.fixture(autouse=True, scope="module")
def known_peak() -> Iterator[None]:
    flops.unit_peak.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flops, "peak_of", lambda _, dtype: Peak(flops_per_second=1e11, dtype=dtype, source="test"))
        yield
    flops.unit_peak.cache_clear()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    composed = compose(load_config("toy", [*SMALL, f"run.out='{tmp_path_factory.mktemp('layers') / 'run'}'"]))
    yield composed
    composed.close()


@pytest.fixture(scope="module")
def found(run: Run) -> LocalMfu:
    return measure_layers(run, MACHINE, repeats=1)


def test_layers_are_all_of_the_models_work_each_counted_once(run: Run, found: LocalMfu) -> None:
    """Parts inside layers are shown, and would be counted twice if they were layers of their own."""
    work = epoch_feed(run, 0).peek()
    assert work is not None
    assert sum(row.count * row.flops for row in found.counted) == found.flops == step_flops(run.model, work.batches[0]).model
    assert found.covered == 1.0
    assert sum(row.count * row.flops for row in found.rows) > found.flops
    assert {row.part_of for row in found.rows if row.layer == "WukongExpert"} == {"Ensemble"}


def test_every_kind_of_layer_is_there(found: LocalMfu) -> None:
    kinds = {row.layer for row in found.rows}
    assert kinds == {
        "FeatureTokens", "EventTokens", "WeightGen", "PersonalFfn", "SelfAttention", "SeedPooling", "TokenMix", "Ensemble", "WukongExpert", "Heads"
    }  # fmt: skip


def test_equal_layers_are_measured_once_and_unequal_ones_are_not_merged(run: Run, found: LocalMfu) -> None:
    attention = {row.module: row.count for row in found.rows if row.layer == "SelfAttention"}
    assert attention == {"layers.0.steps.0.attention": 2, "layers.0.steps.1.attention": 2}  # two layers, two groups of events
    assert sum(row.count for row in found.rows) == len(layers_of(run.model))


def test_a_layer_gets_the_inputs_of_the_batch(run: Run) -> None:
    work = epoch_feed(run, 0).peek()
    assert work is not None
    events = int(work.batches[0].event_offsets["views"].offsets[-1])
    calls = {call.name: call for call in layers._captured(run, work.batches[0])}
    values = calls["layers.0.steps.0.attention"].args[0].values
    assert values.shape == (events, 8)
    assert values.requires_grad
    assert values.grad_fn is None
    assert not calls["layers.0.steps.0.attention"].args[0].angles.requires_grad


def test_measuring_changes_no_weight_and_leaves_no_gradient(run: Run) -> None:
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    tables = {s.table + s.name: s.tensor.detach().clone() for s in run.embeddings.table_slices()}
    measure_layers(run, MACHINE, repeats=1)
    for name, p in run.model.named_parameters():
        assert torch.equal(p, before[name])
        assert p.grad is None
    assert all(torch.equal(s.tensor, tables[s.table + s.name]) for s in run.embeddings.table_slices())
    assert not any(module._forward_pre_hooks for module in run.model.modules())


# ---- figures ---------------------------------------------------------------------------------------------------------------------------------


def row(**changed: Any) -> Measured:
    plain = Measured(layer="A", module="a", count=1, part_of="", forward=1.0, backward=2.0, host=3.0, flops=30, moved=10, floor=1.0, bound="compute")
    return replace(plain, **changed)


def test_local_mfu_is_all_flops_over_all_time() -> None:
    """Not the mean of the layers' MFUs: the slow layer weighs by its time."""
    peak = Machine(name="test", device=CPU, peak=Peak(flops_per_second=20.0, dtype="fp32", source="test"), bandwidth=1.0)
    rows = [row(), row(module="b", count=2, forward=0.5, backward=0.5), row(module="c", part_of="A", flops=99, forward=9.0)]
    found = LocalMfu(rows=rows, flops=100, machine=peak, samples=1)
    assert [found.mfu_of(r) for r in found.counted] == [0.5, 1.5]
    assert found.seconds == 5.0
    assert found.covered == 0.9
    assert found.mfu == pytest.approx(90 / 5.0 / 20.0)
    assert rows[0].intensity == 3.0


class Timed(nn.Module):
    """Takes 10 s forward and 30 s backward, by its own clock."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 5))
        self.spare = nn.Parameter(torch.ones(100))
        self.now = 0.0

    def _passes(self, seconds: float) -> None:
        self.now += seconds

    def forward(self, x: Tensor, others: dict[str, Tensor], *, offsets: Tensor) -> dict[str, Tensor]:
        self._passes(10)
        out = x @ self.weight
        out.register_hook(lambda _: self._passes(30))
        return {"out": out}


def alone(module: nn.Module) -> _Alone:
    x, unused = torch.ones(7, 3, requires_grad=True), torch.ones(1000, requires_grad=True)
    return _Alone(_Call("a", module, (x, {"other": unused}), {"offsets": torch.zeros(4, dtype=torch.int64)}), nullcontext)


def test_forward_and_backward_are_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Timed()
    layer = alone(module)
    monkeypatch.setattr(layers.time, "perf_counter", lambda: module.now)
    assert _timed(layer, 3) == (10, 30, 40)


def test_bytes_are_what_must_be_moved_once() -> None:
    """Weights, inputs and outputs with their gradients, and the offsets; neither an unused vector nor an unused weight."""
    assert alone(Timed()).moved == 4 * (2 * 7 * 3 + 2 * 3 * 5 + 2 * 7 * 5) + 8 * 4


def test_a_layer_far_above_its_floor_says_what_binds_it(found: LocalMfu) -> None:
    for measured in found.rows:
        compute, memory = measured.flops / 1e11, measured.moved / 1e10
        assert measured.floor == pytest.approx(max(compute, memory))
        assert measured.bound == ("compute" if compute >= memory else "bytes")
        assert measured.seconds > 0
        assert math.isfinite(found.mfu_of(measured))


# ---- refusals --------------------------------------------------------------------------------------------------------------------------------


def stand_in(run: Run, **changed: Any) -> Any:
    kept = ("world", "config", "source", "schema", "ids", "progress", "precision", "decisions", "strategies", "embeddings", "dense", "model")
    return SimpleNamespace(**{name: getattr(run, name) for name in kept} | changed)


def test_several_ranks_are_refused(run: Run) -> None:
    with pytest.raises(RequestError, match="2 ranks"):
        measure_layers(stand_in(run, world=replace(run.world, size=2)), MACHINE)


def test_sharded_weights_are_refused(run: Run) -> None:
    class Sharded(nn.Parameter):
        pass

    model = nn.Linear(2, 2)
    model.weight = Sharded(torch.ones(2, 2))
    with pytest.raises(RequestError, match="shard the weights"):
        measure_layers(stand_in(run, model=model), MACHINE)


def test_compiled_blocks_are_refused(run: Run) -> None:
    config = run.config.model_copy(update={"compile": run.config.compile.model_copy(update={"blocks": "default"})})
    with pytest.raises(RequestError, match="blocks = 'default'"):
        measure_layers(stand_in(run, config=config), MACHINE)


def test_a_model_that_counts_only_a_whole_is_refused(run: Run) -> None:
    class Foreign(nn.Linear):
        def flops(self, batch: Any) -> int:
            return 1000

    with pytest.raises(RequestError, match="counts FLOPs as a whole"):
        measure_layers(stand_in(run, model=Foreign(2, 2)), MACHINE)


class Stranger(nn.Module):
    """A model of somebody else's that counts by layer, and something of its own beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 5), nn.Linear(5, 3)

    def forward(self, batch: Any, embedded: Any) -> Any:
        return self.second(self.first(batch.dense["price"]))

    def flops(self, batch: Any) -> int:
        layers_only = linear_flops(self.first, batch.rows, input_gradient=False) + linear_flops(self.second, batch.rows)
        return layers_only + own_flops(self, 1000)


class Twice(Stranger):
    """Calls a layer twice, and has one without anything to learn."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.second, self.idle = times, nn.Linear(5, 5), nn.Identity()

    def forward(self, batch: Any, embedded: Any) -> Any:
        x = self.first(self.idle(batch.dense["price"]))
        for _ in range(self.times):
            x = self.second(x)
        return x


def test_a_layer_that_is_called_twice_is_refused(run: Run) -> None:
    once, twice = Twice(1), Twice(2)
    with pytest.raises(RequestError, match="'second' alone: a forward pass calls it several times"):
        measure_layers(stand_in(run, model=twice, dense=twice), MACHINE)
    assert not twice.second._forward_pre_hooks
    idle = measure_layers(stand_in(run, model=once, dense=once), MACHINE, repeats=1).rows[-1]
    assert (idle.module, idle.flops, idle.bound) == ("idle", 0, "bytes")


@pytest.mark.parametrize(
    ("overrides", "outside"),
    [
        (["model.name=hstu", "model.options={dim = 8}"], False),
        (["model.name=dlrm", "model.options={dim = 8}"], True),  # its dot products are the model's own
        (["precision.recipe=bf16"], False),
        (["model.options.experts=[{kind = 'wukong'}, {kind = 'cross'}, {kind = 'deep'}]", "model.options.comp_skip=pool_first"], False),
    ],
)
def test_every_model_and_precision_can_be_measured(overrides: list[str], outside: bool, tmp_path: Path) -> None:
    own = [word for word in SMALL if not (word.startswith("model.") and "model.name" in overrides[0])]
    other = compose(load_config("toy", [*own, *overrides, f"run.out='{tmp_path / 'run'}'"]))
    try:
        found = measure_layers(other, MACHINE, repeats=1)
    finally:
        other.close()
    assert (found.covered < 1) == outside
    assert 0 < found.mfu < 1


def test_the_children_of_any_other_model_are_its_layers(run: Run) -> None:
    model = Stranger()
    found = measure_layers(stand_in(run, model=model, dense=model), MACHINE, repeats=1)
    rows = found.samples
    assert [(r.module, r.flops) for r in found.rows] == [("first", 2 * 2 * rows * 5), ("second", 3 * 2 * rows * 15)]
    assert found.flops == sum(r.flops for r in found.rows) + 3000
    assert found.covered == pytest.approx(1 - 3000 / found.flops)
    assert found.mfu == pytest.approx((found.flops - 3000) / found.seconds / 1e11)


# ---- the command -----------------------------------------------------------------------------------------------------------------------------

COLUMNS = "date,device,torch,recipe,layer,module,count,part_of,flops,moved,bound,forward_ms,backward_ms,host_ms,floor_ms,ms,intensity,mfu,over_floor"


def test_gem_bench_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gem_core.bench.roofline._COPIED", {"cpu": 1 << 20})
    sets = [word for override in SMALL for word in ("--set", override)]
    command = ["bench", "layers", "--recipe", "toy", *sets, "--repeats", "1", "--csv", "out/layers.csv", "--plot", "out/layers.svg"]
    assert gem(command) == 0
    said = capsys.readouterr().out
    assert "local MFU" in said
    assert "100.0 % of the model's FLOPs are in layers" in said
    with Path("out/layers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert ",".join(rows[0]) == COLUMNS
    assert {r["recipe"] for r in rows} == {"toy"}
    heads = next(r for r in rows if r["layer"] == "Heads")
    assert float(heads["mfu"]) == pytest.approx(float(heads["flops"]) / float(heads["ms"]) * 1e3 / 1e11, rel=1e-2)
    assert float(heads["over_floor"]) == pytest.approx(float(heads["ms"]) / float(heads["floor_ms"]), rel=1e-2)
    assert "toy on CPU" in Path("out/layers.svg").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]  # the run folder is gone


def test_gem_bench_layers_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("gem_core.bench.roofline._COPIED", {"cpu": 1 << 20})
    assert gem(["bench", "layers", "-c", "toy", *(w for o in SMALL for w in ("--set", o)), "--repeats", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    total = sum(r["count"] * r["flops"] for r in told["layers"] if not r["part_of"])
    assert told["local_mfu"] == pytest.approx(total / told["ms"] * 1e3 / told["peak"]["flops_per_second"])
    assert told["model_flops"] == total


def test_help_needs_no_torch() -> None:
    check = "import sys; from gem_core.cli.main import run; run(['bench', 'layers', '--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], stdout=subprocess.DEVNULL, check=False).returncode == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_matmul_on_a_gpu_takes_between_its_floor_and_ten_times_that() -> None:
    linear = nn.Linear(4096, 4096, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    forward, backward, host = _timed_on_gpu(_Alone(_Call("a", linear, (x,), {}), nullcontext), 20)
    floor = 2 * 8192 * 4096**2 / flops.unit_peak("bf16", torch.device("cuda")).flops_per_second
    assert floor < forward < 10 * floor
    assert 2 * floor < backward < 20 * floor
    assert host < 0.01
