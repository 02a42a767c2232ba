"""Every module of every package imports without the native libraries (cases A04, A06), and without them a model trains (A10, A11)."""

import os
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

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
BLOCKER = """
import sys
from importlib.abc import MetaPathFinder

class Blocker(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("fbgemm_gpu", "torchrec"):
            raise {refusal}

sys.meta_path.insert(0, Blocker())
"""


def is_kernel_code(module: str) -> bool:
    """Modules that are Triton code through and through: imported on use, they name what is missing."""
    if module.startswith("gem_precision.kernels."):
        return True
    shared = ("activations", "language", "offsets", "tile_lists", "tiles", "hopper")
    names = module.removeprefix("gem_kernels.").split(".")
    own = names[-1] in ("triton", "spans", "rows") or names[-1].startswith("hopper")
    return (names[0] == "common" and names[1] in shared) or (names[0] == "ops" and own)


def modules(package: str) -> list[str]:
    root = import_module(package)
    return [package, *(info.name for info in pkgutil.walk_packages(root.__path__, package + ".") if not info.name.endswith("__main__"))]


@pytest.mark.parametrize("package", PACKAGES)
def test_case_A06_imports_with_triton_fbgemm_and_torchrec_blocked(package: str) -> None:
    names = modules(package)
    assert names
    done = subprocess.run([sys.executable, "-c", PROBE, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [name for name in done.stdout.split() if not is_kernel_code(name)] == []


@pytest.mark.parametrize("case", ["A10", "A11"])
def test_case_A10_A11_a_model_trains_where_the_native_libraries_do_not_load(case: str, tmp_path: Path) -> None:
    """No fbgemm wheel exists for the machine (A10), or its library does not load (A11): the path through plain torch is whole."""
    refusal = {"A10": "ModuleNotFoundError(name, name=name)", "A11": "OSError('Could not load this library: fbgemm_gpu_py.so')"}[case]
    (tmp_path / "sitecustomize.py").write_text(BLOCKER.format(refusal=refusal))
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    gem = [sys.executable, "-m", "gem_core"]
    done = subprocess.run([*gem, "train", "-c", "toy", "--out", "runs/toy"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "runs/toy/summary.json").exists()
    named = [*gem, "train", "-c", "toy", "--out", "runs/named", "--set", "embedding.engine=torchrec"]
    refused = subprocess.run(named, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert refused.returncode == 3, refused.stderr[-3000:]
    assert "torchrec" in refused.stderr


def test_planted_import_is_seen() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE, "torchrec"], capture_output=True, text=True)
    assert done.returncode != 0
