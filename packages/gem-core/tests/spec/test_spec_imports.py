"""What the contract may import, and that nothing of core needs triton, fbgemm or torchrec to be imported."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gem_core.spec

SPEC = Path(gem_core.spec.__file__).parent
ALLOWED = {"pluggy", "gem_core"}


def foreign(source: str) -> list[str]:
    """Imports of a module that are neither standard library, pluggy, nor the contract itself."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or ".")
    roots = sys.stdlib_module_names | ALLOWED
    return [name for name in names if name.split(".")[0] not in roots or (name.startswith("gem_core") and not name.startswith("gem_core.spec"))]


@pytest.mark.parametrize("module", sorted(path.name for path in SPEC.glob("*.py")))
def test_the_contract_imports_the_standard_library_and_pluggy(module: str) -> None:
    assert foreign((SPEC / module).read_text()) == []


@pytest.mark.parametrize(
    "planted", ["import torch", "from pydantic import BaseModel", "import gem_core.plugins", "def f():\n    import numpy.linalg"]
)
def test_planted_import_is_seen(planted: str) -> None:
    assert foreign(planted) != []


IMPORT_ALL = """
import importlib, pkgutil, sys
for name in {blocked!r}:
    sys.modules[name] = None
root = importlib.import_module({root!r})
failed = {{}}
for info in pkgutil.walk_packages(root.__path__, {root!r} + ".", onerror=lambda name: failed.update({{name: "package"}})):
    if info.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(info.name)
    except ImportError as error:
        failed[info.name] = str(error)
print(failed or "")
"""


def failures(*blocked: str, root: str = "gem_core") -> str:
    """What could not be imported below ``root`` in a fresh interpreter, with the reason; empty when all could."""
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL.format(blocked=blocked, root=root)], capture_output=True, text=True)
    return done.stdout.strip() + done.stderr.strip() if done.returncode else done.stdout.strip()


def test_case_A06_every_module_imports_without_triton_fbgemm_and_torchrec() -> None:
    assert failures("triton", "fbgemm_gpu", "torchrec") == ""


def test_case_A06_planted_missing_module_is_seen() -> None:
    assert "gem_core.config.schema" in failures("pydantic", root="gem_core.config")


def test_case_A06_the_missing_module_is_named_on_use(install) -> None:
    from gem_core.select.policy import choose
    from gem_core.spec import KernelRequest, KernelUnavailable

    impl = "KernelImpl(op='gdpa', contract=1, backend='acme', load='m:f', devices=('cpu',), dtypes=('fp32',), requires=('not_there',))"
    install("acme-gem", f"@hookimpl\ndef gem_kernel_impls():\n    return [{impl}]\n")
    with pytest.raises(KernelUnavailable, match="needs the module not_there, which is not installed"):
        choose(KernelRequest(op="gdpa", device="cpu", dtype="fp32"), "acme")


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, gem_core, gem_core.spec; sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'pydantic', 'typer', 'rich')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
