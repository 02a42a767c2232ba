"""Every module of every package imports without the native libraries (cases A04, A06)."""

import pkgutil
import subprocess
import sys
from importlib import import_module

import pytest

PACKAGES = ("gem_core", "gem_kernels", "gem_parallel", "gem_precision", "gem_data")
PROBE = """
import importlib, sys
for name in ("triton", "fbgemm_gpu", "torchrec"):
    sys.modules[name] = None
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        if type(error).__name__ != "MachineError" or "triton" not in str(error):
            raise
        print(name)
"""
KERNEL_CODE = {f"gem_kernels.{name}" for name in ("common.activations", "common.language", "common.offsets", "ops.gdpa.triton")}
"""Modules that are Triton code through and through: imported on use, they name what is missing."""


def modules(package: str) -> list[str]:
    root = import_module(package)
    return [package, *(info.name for info in pkgutil.walk_packages(root.__path__, package + ".") if not info.name.endswith("__main__"))]


@pytest.mark.parametrize("package", PACKAGES)
def test_case_A06_imports_with_triton_fbgemm_and_torchrec_blocked(package: str) -> None:
    names = modules(package)
    assert names
    done = subprocess.run([sys.executable, "-c", PROBE, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(done.stdout.split()) <= KERNEL_CODE


def test_planted_import_is_seen() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE, "torchrec"], capture_output=True, text=True)
    assert done.returncode != 0
