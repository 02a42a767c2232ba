"""The trainer on a CUDA device: the curve of the CPU, resuming, and figures against the vendor's peak."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import gem_train_fakes
import pytest
import torch

from gem_core.builtin.embedding import TorchEmbeddings
from gem_core.builtin.precision import Fp32
from gem_core.config.load import LoadedConfig, load_config
from gem_core.spec import RunFailed, SparseOptimizer
from gem_core.train import ahead
from gem_core.train.checkpoint.saved import find_checkpoint
from gem_core.train.efficiency import peak_of
from gem_core.train.feed import Feed
from gem_core.train.log import read_log
from gem_core.train.metrics import StreamMetrics
from gem_core.train.run import evaluate_run, train
from gem_core.train.step import Learner, train_step
from gem_core.train.world import World

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CURVE = 1e-3
"""Largest relative difference of the loss curves of CPU and GPU: float32 sums in another order, over 12 steps."""

Configure = Callable[..., LoadedConfig]


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_log(folder) if record["event"] == "train"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_gpu_follows_the_curve_of_the_cpu(configure: Configure, tmp_path: Path, accumulate: int) -> None:
    settings = ("train.log_every=1", f"optim.accumulate={accumulate}")
    train(configure(*settings, out="cpu"))
    summary = train(configure(*settings, "run.device=cuda", out="gpu"))
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=CURVE)
    assert 0 < summary["mfu"] < 1


def test_auto_takes_the_gpu_and_bf16_trains(configure: Configure, tmp_path: Path) -> None:
    train(configure("run.device=auto", "precision.recipe=bf16", "train.ema_decay=0.5"))
    weights = find_checkpoint(tmp_path / "run").read()["dense"]["model"]
    assert all(w.dtype == torch.float32 and w.device.type == "cpu" for w in weights.values())


def test_a_gpu_run_resumes_and_is_evaluated(configure: Configure, tmp_path: Path) -> None:
    straight = train(configure("run.device=cuda", "model.options.dropout=0.3", out="straight"))
    train(configure("run.device=cuda", "model.options.dropout=0.3", "train.epochs=1"))
    resumed = train(configure("run.device=cuda", "model.options.dropout=0.3"), resume=tmp_path / "run")
    assert resumed["test"]["ctr"]["ne"] == pytest.approx(straight["test"]["ctr"]["ne"], rel=CURVE)
    assert evaluate_run(tmp_path / "run")["test"]["ctr"]["ne"] == pytest.approx(resumed["test"]["ctr"]["ne"], rel=1e-6)


def test_a_gpus_peak_is_known_or_measured() -> None:
    peak = peak_of(torch.device("cuda", 0), "bf16")
    assert peak.flops_per_second > 1e12
    assert peak.source.startswith(("vendor", "measured"))


def test_case_E13_a_copy_beside_training_is_that_of_the_moment(tmp_path: Path) -> None:
    """Tables on the GPU change on two streams right before and right after they are handed over."""
    from gem_core.train.checkpoint.pieces import pieces_of
    from gem_core.train.checkpoint.saver import Content, Saver
    from gem_core.train.world import World

    live = {f"tables/t{i}/weight": torch.zeros(1 << 20, 16, device="cuda") for i in range(4)}
    side = torch.cuda.Stream()
    saver = Saver(tmp_path / "checkpoints", World(device=torch.device("cuda", 0)), keep=9, told=lambda step, path: None)
    for step in range(1, 4):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for tensor in live.values():
                tensor.add_(1.0)
        pieces = {name: pieces_of(tensor) for name, tensor in live.items()}
        saver.save(Content(step=step, pieces=pieces, trainer={}, about={}), background=True)
        for tensor in live.values():
            tensor.mul_(2.0).div_(2.0)
    saver.close()
    for step in range(1, 4):
        saved = find_checkpoint(tmp_path / "checkpoints" / f"step-{step}")
        assert all(bool((saved.tensor(name) == step).all()) for name in live)


# ---- one batch ahead, on a stream of its own ----------------------------------------------------------------------------------------------

GPU = World(device=torch.device("cuda", 0))
REPEATS = 100


class Late(TorchEmbeddings):
    """Ids that arrive milliseconds after they were sent, in memory that holds row 0 until then."""

    def prefetch(self, ids: Any) -> Any:
        if not hasattr(self, "memory"):
            self.memory = [torch.zeros_like(ids.values) for _ in range(REPEATS)]
            torch.cuda.synchronize()
        arrived = self.memory.pop()
        torch.cuda._sleep(4_000_000)
        return replace(ids, values=arrived.copy_(ids.values))


def curve(engine: type[TorchEmbeddings]) -> list[float]:
    """Losses of ``REPEATS`` steps on batches of equal size."""
    torch.manual_seed(7)
    source = gem_train_fakes.FakeSource(rows=16 * REPEATS)
    schema, options = source.schema(), gem_train_fakes.ProbeOptions()
    model = gem_train_fakes.Probe(schema, options).to(GPU.device)
    learner = Learner(
        world=GPU,
        tasks=schema.tasks,
        model=model,
        dense=model,
        embeddings=engine(gem_train_fakes.Probe.tables(schema, options), SparseOptimizer(lr=0.1), device=GPU.device, seed=3),
        precision=Fp32(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        dense_lr=0.1,
        sparse_lr=0.1,
        clip_norm=1.0,
        average=None,
        stream=StreamMetrics(schema.tasks, GPU.device),
    )
    feed = Feed(source.batches("train", batch_size=16), GPU, schema, flops=lambda batch: 0)
    return [train_step(learner, work, step=1, lr_factor=1.0, following=feed.peek).loss for work in feed]


def test_case_F14_ids_that_arrive_late_on_another_stream_are_waited_for() -> None:
    assert curve(Late) == pytest.approx(curve(TorchEmbeddings), rel=CURVE)


def test_planted_fault_case_F14_without_the_wait_other_rows_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    want = curve(TorchEmbeddings)

    class Deaf(torch.cuda.Stream):
        """A stream that nobody waits for."""

    waits = torch.cuda.Stream.wait_stream
    monkeypatch.setattr(ahead.torch.cuda, "Stream", Deaf)
    monkeypatch.setattr(torch.cuda.streams.Stream, "wait_stream", lambda self, other: None if isinstance(other, Deaf) else waits(self, other))
    assert curve(Late) != pytest.approx(want, rel=CURVE)


def test_reading_the_loss_late_does_not_wait_for_what_was_queued_after_it() -> None:
    """The forward pass is short, then the GPU is busy for a long time: the loss is there first."""
    from gem_core.train.told import Told

    loss = torch.full((), 3.0, device="cuda")
    told, end = Told(loss), torch.cuda.Event()
    torch.cuda._sleep(400_000_000)
    end.record()
    assert told.value() == 3.0
    assert not end.query()
    torch.cuda.synchronize()


# ---- CUDA graphs --------------------------------------------------------------------------------------------------------------------------

GEM = [
    "model.name=gem", "model.options.dim=32", "model.options.layers=2", "model.options.tokens=8", "model.options.sequence={dim=32, heads=2}",
    "data.options.rows=1600", "data.batch_size=32", "train.log_every=1", "train.epochs=1",
]  # fmt: skip


@pytest.mark.parametrize("blocks", ["off", "default"])
def test_graphs_follow_the_curve_without_them(tmp_path: Path, blocks: str) -> None:
    """Batches of all sizes, some beyond the largest capacity, the last one short."""
    plain = ["run.device=cuda", f"compile.blocks={blocks}", *GEM]
    train(load_config("toy", [*plain, f"run.out='{tmp_path / 'plain'}'"]))
    summary = train(load_config("toy", [*plain, "compile.graphs=3", f"run.out='{tmp_path / 'graphs'}'"]))
    assert losses(tmp_path / "graphs") == pytest.approx(losses(tmp_path / "plain"), rel=CURVE)
    assert summary["graphs"]["graphs"] >= 1
    assert summary["graphs"]["replayed"] >= 10
    assert summary["graphs"]["replayed"] + summary["graphs"]["other"] == summary["steps"]


def test_planted_fault_a_graph_that_is_not_replayed_leaves_the_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: None)
    train(load_config("toy", ["run.device=cuda", *GEM, f"run.out='{tmp_path / 'plain'}'"]))
    with suppress(RunFailed):  # what nobody has computed may be no number
        train(load_config("toy", ["run.device=cuda", *GEM, "compile.graphs=3", f"run.out='{tmp_path / 'graphs'}'"]))
    assert losses(tmp_path / "graphs") != pytest.approx(losses(tmp_path / "plain"), rel=CURVE)
