"""Rates and peaks."""

from collections.abc import Callable, Iterator

import pytest
import torch
from gem_train_fakes import FakeSource, Probe, ProbeOptions

from gem_core.config.load import LoadedConfig
from gem_core.train import efficiency
from gem_core.train.compose import compose
from gem_core.train.efficiency import TRAIN_OVER_FORWARD, Meter, Peak, Span, peak_of, table_peak
from gem_core.train.progress import Progress
from gem_core.train.world import World


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "tera", "label"),
    [
        ("NVIDIA H200", "bf16", False, 989.4, "bf16"),
        ("NVIDIA H200", "fp32", True, 494.7, "tf32"),
        ("NVIDIA H200", "fp32", False, 66.9, "fp32"),
        ("NVIDIA H100 80GB HBM3", "fp16", False, 989.4, "fp16"),
        ("NVIDIA H100 NVL", "bf16", False, 835.5, "bf16"),
        ("NVIDIA H100 PCIe", "bf16", False, 756.5, "bf16"),
        ("NVIDIA A100-SXM4-80GB", "bf16", True, 312.0, "bf16"),
        ("NVIDIA B200", "bf16", False, 2250.0, "bf16"),
        ("NVIDIA H200", "fp8", False, 1978.9, "fp8"),
    ],
)
def test_peaks_by_name(name: str, dtype: str, tf32: bool, tera: float, label: str) -> None:
    peak = table_peak(name, dtype, tf32=tf32)
    assert peak is not None
    assert (peak.flops_per_second, peak.dtype) == (tera * 1e12, label)
    assert name in peak.source


@pytest.mark.parametrize(("name", "dtype"), [("NVIDIA T4", "bf16"), ("NVIDIA H200", "fp64"), ("NVIDIA A100-SXM4-80GB", "fp8")])
def test_what_the_table_does_not_know_is_measured(name: str, dtype: str) -> None:
    assert table_peak(name, dtype, tf32=False) is None


def test_a_cpu_peak_is_measured_and_says_so() -> None:
    peak = peak_of(torch.device("cpu"), "fp32")
    assert peak.flops_per_second > 1e6
    assert peak.dtype == "fp32"
    assert peak.source.startswith("measured")


@pytest.mark.parametrize(("bf16", "counts"), [(1e9, "fp32"), (1e12, "bf16")])
def test_a_cpu_run_in_16_bits_is_held_against_the_faster_format(monkeypatch: pytest.MonkeyPatch, bf16: float, counts: str) -> None:
    speeds = {"bf16": bf16, "fp32": 1e11}
    monkeypatch.setattr(efficiency, "_measured", lambda _, dtype: Peak(flops_per_second=speeds[dtype], dtype=dtype, source="measured"))
    assert peak_of(torch.device("cpu"), "bf16").dtype == counts


def test_mfu_is_three_forwards_over_time_and_peak() -> None:
    span = Span()
    for _ in range(4):
        span.add(rows=100, forward_flops=1_000, seconds=0.5, data_seconds=0.1, loss=0.7)
    figures = span.figures(peak=12_000.0)
    assert figures["mfu"] == pytest.approx(TRAIN_OVER_FORWARD * 4_000 / 2.0 / 12_000)
    assert figures["samples_per_second"] == pytest.approx(200.0)
    assert (figures["data_seconds"], figures["compute_seconds"]) == pytest.approx((0.4, 1.6))
    assert span.loss / span.steps == pytest.approx(0.7)


def test_a_closed_window_leaves_the_run() -> None:
    meter = Meter()
    meter.add(rows=5, forward_flops=7, seconds=1.0, data_seconds=0.0, loss=1.0)
    first = meter.close_window()
    meter.add(rows=6, forward_flops=7, seconds=1.0, data_seconds=0.0, loss=1.0)
    assert (first.rows, meter.window.rows, meter.run.rows) == (5, 6, 11)


def test_flops_of_the_probe_are_counted_by_hand() -> None:
    source = FakeSource()
    model = Probe(source.schema(), ProbeOptions(hidden=8))
    assert model.flops(source.batch(torch.arange(10))) == 10 * (2 * 7 * 8 + 2 * 8 * 2)


def test_progress_survives_its_state() -> None:
    progress, again = Progress(step=3, epoch=1, next_batch=2, trained_rows=9, stopped="why"), Progress()
    progress.meter.add(rows=9, forward_flops=5, seconds=1.5, data_seconds=0.5, loss=0.25)
    again.load_state_dict(progress.state_dict(World()), World())
    assert again == Progress(step=3, epoch=1, next_batch=2, trained_rows=9, meter=progress.meter)


def test_the_ledger_adds_up_at_every_point() -> None:
    progress = Progress()
    assert progress.ledger(10) == {"offered": 0, "trained": 0, "dropped_uneven": 0, "not_read": 0}
    progress.next_batch, progress.trained_rows = 1, 4
    assert progress.ledger(10) == {"offered": 10, "trained": 4, "dropped_uneven": 0, "not_read": 6}
    progress.trained_rows = 7
    progress.close_epoch(2)
    assert progress.ledger(10) == {"offered": 10, "trained": 7, "dropped_uneven": 2, "not_read": 1}


@pytest.fixture
def matmul_switch() -> Iterator[None]:
    kept = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = kept


@pytest.mark.parametrize("before", [False, True])
def test_a_run_leaves_tf32_as_it_was(configure: Callable[..., LoadedConfig], matmul_switch: None, before: bool) -> None:
    """Whatever its precision recipe has made of it: the next run of the process may ask for full float32."""
    torch.backends.cuda.matmul.allow_tf32 = before
    run = compose(configure())
    torch.backends.cuda.matmul.allow_tf32 = not before
    run.close()
    assert torch.backends.cuda.matmul.allow_tf32 is before
