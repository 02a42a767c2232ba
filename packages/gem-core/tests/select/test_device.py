"""Facts about the machine without torch."""

import ctypes
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gem_core.select import device
from gem_core.select.device import DeviceInfo, cuda_devices, current_device, installed, release


class Driver:
    """A CUDA driver with two Hopper devices; each entry of ``fails`` is a call that returns an error."""

    def __init__(self, fails: tuple[str, ...] = ()) -> None:
        self.fails = fails

    def cuInit(self, flags: int) -> int:
        return 100 if "cuInit" in self.fails else 0

    def cuDeviceGetCount(self, count: object) -> int:
        count._obj.value = 2  # type: ignore[attr-defined]
        return 0

    def cuDeviceGet(self, handle: object, index: int) -> int:
        handle._obj.value = index  # type: ignore[attr-defined]
        return 0

    def cuDeviceGetName(self, name: ctypes.Array[ctypes.c_char], size: int, handle: ctypes.c_int) -> int:
        name.value = f"H{handle.value}".encode()
        return 1 if "cuDeviceGetName" in self.fails else 0

    def cuDeviceGetAttribute(self, value: object, attribute: int, handle: ctypes.c_int) -> int:
        value._obj.value = {75: 9, 76: 0}[attribute]  # type: ignore[attr-defined]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch):
    def put(found: Driver | None) -> None:
        def load(name: str) -> Driver:
            if found is None:
                raise OSError(name)
            return found

        monkeypatch.setattr(device.ctypes, "CDLL", load)
        cuda_devices.cache_clear()

    yield put
    cuda_devices.cache_clear()


def test_devices_come_from_the_driver(driver) -> None:
    driver(Driver())
    assert cuda_devices() == (DeviceInfo(device="cuda", name="H0", arch=90), DeviceInfo(device="cuda", name="H1", arch=90))
    assert current_device().name == "H0"


@pytest.mark.parametrize("found", [None, Driver(("cuInit",)), Driver(("cuDeviceGetName",))])
def test_without_driver_or_device_it_is_the_cpu(driver, found: Driver | None, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(found)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert current_device() == DeviceInfo(device="cpu", name="CPU")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert current_device().device == "interpreter"


def test_the_interpreter_does_not_hide_a_device(driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(Driver())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert current_device().device == "cuda"


def test_versions_come_from_metadata(install) -> None:
    install("acme-gem", version="3.4.5")
    assert installed("acme-gem") == "3.4.5"
    assert installed("not-there-at-all") is None


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("2.13.0+cpu", (2, 13, 0)), ("3.7.1", (3, 7, 1)), ("2.14.0a0+git1", (2, 14, 0)), ("1.8.0.dev2026", (1, 8, 0)), ("unknown", ()), ("", ())],
)
def test_release_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert release(text) == numbers


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=5))
def test_release_reads_plain_versions_back(numbers: list[int]) -> None:
    assert release(".".join(map(str, numbers))) == tuple(numbers)


@pytest.mark.parametrize("module", ["gem_core", "gem_core.select.policy", "gem_core.select.registry", "gem_core.plugins.manager", "gem_core.spec"])
def test_choosing_imports_no_torch(module: str) -> None:
    code = f"import {module}, sys; from gem_core.select.registry import registry; registry(); sys.exit(bool({{'torch', 'numpy'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
