"""The roofline: which of FLOPs and bytes binds, the bandwidth of a copy, and the picture."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gem_core.bench import flops, roofline
from gem_core.bench.roofline import Machine, Point, copy_bandwidth, draw, machine
from gem_core.train.efficiency import Peak

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def known_peaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """8 FLOP/s in bf16, twice that in anything else."""
    monkeypatch.setattr(flops, "peak_of", lambda _, dtype: Peak(flops_per_second=8.0 if dtype == "bf16" else 16.0, dtype=dtype, source="test"))
    flops.unit_peak.cache_clear()
    yield
    flops.unit_peak.cache_clear()


def of(peak: float = 8.0, bandwidth: float = 4.0) -> Machine:
    return Machine(name="test", device=CPU, peak=Peak(flops_per_second=peak, dtype="bf16", source="test"), bandwidth=bandwidth)


@pytest.mark.parametrize(
    ("by_format", "moved", "expected"),
    [
        ({"bf16": 80}, 4, (10.0, "compute")),
        ({"bf16": 80}, 400, (100.0, "bytes")),
        ({"bf16": 80, "fp32": 80}, 4, (15.0, "compute")),  # one after the other, each at its own peak
        ({"bf16": 80}, 40, (10.0, "compute")),  # on the ridge
        ({}, 40, (10.0, "bytes")),
    ],
)
def test_the_floor_is_the_larger_of_flops_and_bytes(by_format: dict[str, int], moved: int, expected: tuple[float, str]) -> None:
    assert of().floor(by_format, moved) == expected


def test_a_copy_counts_what_it_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that moves one second a look, each copy takes a second."""
    seconds = iter(range(100))
    monkeypatch.setattr(roofline, "_COPIED", {"cpu": 1000})
    monkeypatch.setattr(roofline.time, "perf_counter", lambda: float(next(seconds)))
    assert copy_bandwidth(CPU) == 2000.0


def test_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_COPIED", {"cpu": 1 << 22})
    found = machine(CPU, "bf16")
    assert (found.peak.flops_per_second, found.peak.dtype) == (8.0, "bf16")
    assert found.bandwidth > 1e7


POINTS = [
    Point(name="Heads  heads", intensity=10.0, rate=4.0, bound="compute"),
    Point(name="TokenMix  layers.0.ask", intensity=0.5, rate=1.0, bound="bytes"),
]


def test_the_picture_names_every_layer_and_the_roof(tmp_path: Path) -> None:
    path = tmp_path / "new" / "roof.svg"
    draw(POINTS, of(8e12, 4e12), "a title with 12.3 %", path)
    text = path.read_text()
    words = re.findall(r">([^<>]+)</text>", text)
    for word in ("a title with 12.3 %", "1  Heads  heads", "2  TokenMix  layers.0.ask", "8 TFLOP/s bf16", "4 TB/s", "TFLOP/s"):
        assert word in words, word
    before = path.read_bytes()
    draw(POINTS, of(8e12, 4e12), "a title with 12.3 %", path)
    assert path.read_bytes() == before
