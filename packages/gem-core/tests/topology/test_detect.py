"""The machine at hand: what the environment, the driver and nvidia-ml say, without one of them being here."""

import ctypes
from typing import Any

import pytest

from gem_core.select.device import DeviceInfo
from gem_core.spec import RequestError
from gem_core.topology import detect as module
from gem_core.topology.detect import detect, device_memory, nvlink_bandwidth, ranks_a_host


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``gpu(name, devices, link)``: this machine has so many of them."""

    def set_up(name: str, devices: int = 8, link: float | None = None) -> None:
        info = DeviceInfo(device="cuda", name=name)
        for variable in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setattr(module, "current_device", lambda: info)
        monkeypatch.setattr(module, "cuda_devices", lambda: (info,) * devices)
        monkeypatch.setattr(module, "nvlink_bandwidth", lambda: link)

    return set_up


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, 4),
        ({"LOCAL_WORLD_SIZE": "2", "SLURM_NTASKS_PER_NODE": "8"}, 2),
        ({"SLURM_NTASKS_PER_NODE": "8"}, 8),
        ({"SLURM_TASKS_PER_NODE": "8(x4),2"}, 8),
        ({"SLURM_TASKS_PER_NODE": "16"}, 16),
    ],
)
def test_ranks_of_a_host(environment: dict[str, str], ranks: int) -> None:
    assert ranks_a_host(environment, 4) == ranks


@pytest.mark.parametrize("said", ["", "0", "-1", "eight", "8x4", "8.0"])
def test_a_variable_that_is_no_number_is_refused(said: str) -> None:
    with pytest.raises(RequestError, match="LOCAL_WORLD_SIZE"):
        ranks_a_host({"LOCAL_WORLD_SIZE": said}, 4)


def test_no_device_no_ranks() -> None:
    assert ranks_a_host({}, 0) == 1


def test_a_cpu_has_no_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "current_device", lambda: DeviceInfo(device="interpreter", name="CPU"))
    found = detect(4)
    assert (found.world, found.device, found.tiers, found.memory) == (4, "cpu", (), None)


def test_a_known_device_in_one_host(gpu: Any) -> None:
    gpu("NVIDIA H200", devices=4, link=300e9)
    found = detect(4)
    assert [(tier.name, tier.size, tier.bandwidth) for tier in found.tiers] == [("host", 4, 300e9)]
    assert (found.memory, found.peak_flops["bf16"]) == (141 * 10**9, 989.4e12)
    assert "nvidia-ml" in found.source
    assert "network" not in found.source


def test_beyond_the_host_the_network_is_the_described_one(gpu: Any) -> None:
    gpu("NVIDIA B200")
    found = detect(64)
    assert [(tier.name, tier.size, tier.bandwidth) for tier in found.tiers] == [("host", 8, 900e9), ("zone", 3072, 50e9), ("region", 24576, 50e9)]
    assert "a described network between hosts" in found.source


def test_an_unknown_device(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "device_memory", lambda: 24 * 10**9)
    gpu("NVIDIA L4", devices=2)
    assert (detect(2).tiers, detect(2).memory) == ((), 24 * 10**9)
    gpu("NVIDIA X9", devices=2, link=100e9)
    assert [tier.bandwidth for tier in detect(2).tiers] == [100e9]
    assert detect(4).tiers == ()  # nobody knows the network
    assert detect(4).peak_flops == {}


class FakeNvml:
    """18 links of which every third is off, of version 4; one of an unknown version."""

    def __init__(self, start: int = 0, links: int = 18) -> None:
        self.start, self.links, self.closed = start, links, False

    def nvmlInit_v2(self) -> int:
        return self.start

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        return 0

    def nvmlDeviceGetNvLinkState(self, handle: Any, index: int, active: Any) -> int:
        active._obj.value = index % 3 != 0
        return 0 if index < self.links else 3

    def nvmlDeviceGetNvLinkVersion(self, handle: Any, index: int, version: Any) -> int:
        version._obj.value = 99 if index == 1 else 4
        return 0

    def nvmlShutdown(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("library", "want"), [(FakeNvml(), 11 * 25e9), (FakeNvml(start=1), None), (FakeNvml(links=0), None)])
def test_active_links_are_counted(monkeypatch: pytest.MonkeyPatch, library: FakeNvml, want: float | None) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    nvlink_bandwidth.cache_clear()
    assert nvlink_bandwidth() == want
    assert library.closed == (library.start == 0)
    nvlink_bandwidth.cache_clear()


def test_without_libraries_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    nvlink_bandwidth.cache_clear()
    assert nvlink_bandwidth() is None
    assert device_memory() is None
    nvlink_bandwidth.cache_clear()
