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
    importlib.import_module(name)
"""


def modules(package: str) -> list[str]:
    root = import_module(package)
    return [package, *(info.name for info in pkgutil.walk_packages(root.__path__, package + ".") if not info.name.endswith("__main__"))]


@pytest.mark.parametrize("package", PACKAGES)
def test_case_A06_imports_with_triton_fbgemm_and_torchrec_blocked(package: str) -> None:
    names = modules(package)
    assert names
    done = subprocess.run([sys.executable, "-c", PROBE, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_planted_import_is_seen() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE, "torchrec"], capture_output=True, text=True)
    assert done.returncode != 0
