"""Missing and mismatched fbgemm and torchrec: what a user is told, and that nothing else of the package breaks."""

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import gem_parallel
from gem_core.spec import MachineError, SparseOptimizer, TableSpec
from gem_parallel.sparse import native
from gem_parallel.sparse.engine import TorchRecEmbeddings

TABLE = TableSpec(name="t", rows=3, dim=4, features=("f",), init_scale=1.0)


def fail_with(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def broken(name: str) -> Any:
        raise error

    monkeypatch.setattr(native, "import_module", broken)


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'fbgemm_gpu'"),
        OSError("fbgemm_gpu_tbe_utils.so: undefined symbol: _ZN3c104impl3cow23materialize"),
        RuntimeError("Could not load this library: fbgemm_gpu_config.so"),
        ImportError("libtorch_cuda.so: cannot open shared object file"),
    ],
)
def test_case_A01_A02_A03_a_native_library_that_does_not_load(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    fail_with(monkeypatch, error)
    with pytest.raises(MachineError) as caught:
        TorchRecEmbeddings((TABLE,), SparseOptimizer(), device="cpu", seed=1)
    assert caught.value.exit_code == 3
    assert "torch 2." in caught.value.so
    assert "fbgemm-gpu-cpu" in caught.value.so
    assert str(error).splitlines()[0] in caught.value.so


def test_case_A03_the_misleading_operator_message_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, AttributeError("'_OpNamespace' 'fbgemm' object has no attribute 'jagged_2d_to_dense'"))
    with pytest.raises(MachineError) as caught:
        native.load_fbgemm("cpu")
    assert "_OpNamespace" not in str(caught.value)
    assert "not registered" in str(caught.value)


def test_case_A03_a_package_whose_library_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python files import, no operator is registered."""
    monkeypatch.setattr(native, "import_module", lambda name: types.ModuleType(name))
    monkeypatch.setattr(native, "_PROBE", "an_operator_that_nobody_registered")
    with pytest.raises(MachineError, match="native library did not load"):
        native.load_fbgemm("cpu")


def test_case_A01_the_cpu_wheel_on_a_gpu_and_the_other_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda op, key: False)
    with pytest.raises(MachineError, match="no cuda kernels") as caught:
        native.load_fbgemm("cuda")
    assert "pip uninstall -y fbgemm-gpu-cpu" in caught.value.do
    with pytest.raises(MachineError, match="no cpu kernels") as caught:
        native.load_fbgemm("cpu")
    assert "pip uninstall -y fbgemm-gpu`" in caught.value.do


def test_the_healthy_package_loads() -> None:
    assert native.load_fbgemm("cpu").SplitTableBatchedEmbeddingBagsCodegen


def test_torchrec_alone_can_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, ModuleNotFoundError("No module named 'torchrec'"))
    with pytest.raises(MachineError, match="torchrec does not load"):
        native.load_torchrec("cpu")


@pytest.mark.parametrize(("torch_version", "fbgemm", "torchrec"), [("2.13.0+cpu", "1.8.0", "1.8.0"), ("2.11.0+cu130", "1.6.0", "1.6.1")])
def test_case_A02_the_repair_lines_fit_the_installed_torch(monkeypatch: pytest.MonkeyPatch, torch_version: str, fbgemm: str, torchrec: str) -> None:
    monkeypatch.setattr(torch, "__version__", torch_version)
    assert f"fbgemm-gpu-cpu=={fbgemm} torchrec=={torchrec}" in native.repair_lines("cpu")
    assert f" fbgemm-gpu=={fbgemm} torchrec=={torchrec}" in native.repair_lines("cuda")


def test_case_A02_an_unknown_torch_is_not_given_a_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.1")
    text = native.repair_lines("cpu")
    assert "no fbgemm release is known for torch 2.99" in text.lower()
    assert "pip" not in text


def test_the_versions_in_the_docs_are_those_in_the_code() -> None:
    docs = (Path(__file__).parents[3] / "docs" / "parallelism.md").read_text()
    for minor, (fbgemm, torchrec) in native.RELEASES.items():
        assert f"| {minor} | {fbgemm} | {torchrec} |" in docs


def test_case_A04_A06_A10_every_module_imports_without_fbgemm_torchrec_and_triton() -> None:
    """In a fresh interpreter; the plugin module does without torch and pydantic as well."""
    source = Path(gem_parallel.__file__).parent
    paths = [path.relative_to(source).with_suffix("") for path in source.rglob("*.py")]
    modules = sorted(".".join(("gem_parallel", *path.parts)).removesuffix(".__init__") for path in paths)
    assert "gem_parallel.sparse.engine" in modules
    code = f"""
import sys
heavy = ["fbgemm_gpu", "torchrec", "triton"]
sys.modules.update(dict.fromkeys(heavy))  # an import of any of them raises
import gem_parallel.plugin
assert gem_parallel.plugin.gem_embedding_engines()[0].name == "torchrec"
assert "ddp" in [strategy.name for strategy in gem_parallel.plugin.gem_parallel_strategies()]
assert not {{"torch", "pydantic"}} & set(sys.modules)
import importlib
for name in {modules!r}:
    importlib.import_module(name)
from gem_core.spec import MachineError, SparseOptimizer, TableSpec
from gem_parallel.sparse.engine import TorchRecEmbeddings
table = TableSpec(name="t", rows=3, dim=4, features=("f",), init_scale=1.0)
try:
    TorchRecEmbeddings((table,), SparseOptimizer(), device="cpu", seed=1)
except MachineError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "fbgemm does not load here" in done.stdout
    assert "pip" in done.stdout


def test_case_A04_fbgemm_and_torchrec_are_imported_inside_functions_only() -> None:
    source = Path(gem_parallel.__file__).parent
    for path in source.rglob("*.py"):
        for line in path.read_text().splitlines():
            assert not line.startswith(("import fbgemm_gpu", "from fbgemm_gpu", "import torchrec", "from torchrec")), (path.name, line)
