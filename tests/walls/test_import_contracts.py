"""The import walls of ARCHITECTURE.md hold, and each check goes red on a planted fault."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("gem-core", "gem-data", "gem-kernels", "gem-parallel", "gem-precision")
CORE_FOR_SIBLINGS = ("gem_core.spec", "gem_core.ops", "gem_core.batch")


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(tree / "packages" / name / "src") for name in PACKAGES)}
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)


def imports_of(path: Path) -> set[str]:
    """Dotted names of every module that a file imports, at any depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
    return found


def foreign_to_spec(folder: Path) -> list[str]:
    """Imports under ``spec`` that are neither standard library, pluggy nor spec itself."""
    allowed = {*sys.stdlib_module_names, "pluggy"}
    return sorted(
        f"{path.name}: {name}"
        for path in folder.glob("*.py")
        for name in imports_of(path)
        if name.split(".")[0] not in allowed and not name.startswith("gem_core.spec")
    )


def strays_in_tests(package: str, tree: Path) -> list[str]:
    """Imports in a sibling's tests that reach past core's contract and ``gem_core.testing``, or into another sibling."""
    own = package.replace("-", "_")
    strays = []
    for path in (tree / "packages" / package / "tests").rglob("*.py"):
        for name in imports_of(path):
            if name.startswith("gem_core.") and not name.startswith((*CORE_FOR_SIBLINGS, "gem_core.testing")):
                strays.append(f"{path.name}: {name}")
            if name.startswith("gem_") and not name.startswith(("gem_core", own)):
                strays.append(f"{path.name}: {name}")
    return strays


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the sources to plant faults in."""
    for package in PACKAGES:
        shutil.copytree(ROOT / "packages" / package / "src", tmp_path / "packages" / package / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_import_contracts_hold() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("gem-core/src/gem_core/batch.py", "import gem_data", "core never imports a sibling"),
        ("gem-data/src/gem_data/plugin.py", "import gem_kernels", "no sibling imports another"),
        ("gem-data/src/gem_data/plugin.py", "import gem_core.train.loop", "siblings see only core's contract"),
        ("gem-core/src/gem_core/spec/kernels.py", "import gem_core.batch", "the spec stands below the rest of core"),
    ],
)
def test_planted_import_breaks_its_contract(copy: Path, file: str, line: str, contract: str) -> None:
    path = copy / "packages" / file
    path.write_text(path.read_text() + f"\n{line}\n")
    done = lint_imports(copy)
    assert done.returncode != 0
    broken = [row for row in done.stdout.splitlines() if contract in row and "BROKEN" in row]
    assert broken, done.stdout


def test_spec_imports_only_the_standard_library_and_pluggy() -> None:
    assert foreign_to_spec(ROOT / "packages/gem-core/src/gem_core/spec") == []


def test_planted_torch_import_in_spec_is_seen(copy: Path) -> None:
    spec = copy / "packages/gem-core/src/gem_core/spec"
    (spec / "markers.py").write_text("def late() -> None:\n    import torch\n")
    assert foreign_to_spec(spec) == ["markers.py: torch"]


@pytest.mark.parametrize("package", [name for name in PACKAGES if name != "gem-core"])
def test_sibling_tests_stay_on_their_side(package: str) -> None:
    assert strays_in_tests(package, ROOT) == []


def test_planted_stray_in_tests_is_seen(tmp_path: Path) -> None:
    folder = tmp_path / "packages/gem-data/tests"
    folder.mkdir(parents=True)
    (folder / "test_x.py").write_text("from gem_core.train import loop\nimport gem_kernels\n")
    assert sorted(strays_in_tests("gem-data", tmp_path)) == ["test_x.py: gem_core.train", "test_x.py: gem_kernels"]
