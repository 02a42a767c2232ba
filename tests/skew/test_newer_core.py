"""A core that is newer than its plugins: pip refuses it by range, and forced in, stale kernels are listed as unfit with the reason."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def newer_core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a core numbered 9.0.0 whose op contracts are all one higher, unpacked beside its wheel."""
    folder = tmp_path_factory.mktemp("newer")
    core = folder / "gem-core"
    shutil.copytree(ROOT / "packages/gem-core", core, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    project = core / "pyproject.toml"
    project.write_text(project.read_text().replace('version = "0.1.0"', 'version = "9.0.0"'))
    kernels = core / "src/gem_core/builtin/kernels.py"
    raised, count = re.subn(r"OpSpec\(name=name, contract=contract,", "OpSpec(name=name, contract=contract + 1,", kernels.read_text())
    assert count == 1, "builtin/kernels.py declares its contract numbers in another way"
    kernels.write_text(raised)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(core)], check=True)
    (wheel,) = folder.glob("gem_core-9.0.0-*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder


def test_pip_refuses_a_core_outside_the_range(newer_core: Path) -> None:
    (wheel,) = newer_core.glob("gem_core-9.0.0-*.whl")
    kernels = str(ROOT / "packages/gem-kernels")
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-build-isolation", str(wheel), kernels]
    done = subprocess.run([word for word in command if word != "--no-build-isolation"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "gem-core" in done.stderr
    assert re.search(r"conflict|incompatible|No matching distribution", done.stderr), done.stderr


def test_forced_in_its_stale_kernels_are_listed_with_the_reason(newer_core: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(newer_core / "site")}
    code = "from gem_core.cli.main import main; main()"
    listed = subprocess.run([sys.executable, "-c", code, "kernels", "list", "--json"], env=env, capture_output=True, text=True, check=True).stdout
    rows = {(row["op"], row["backend"]): row for row in json.loads(listed)}
    assert rows["gdpa", "reference"]["here"] in {"chosen", "fits"}
    stale = rows["gdpa", "triton"]
    assert stale["here"] == "no"
    assert any("contract" in reason for reason in stale["why_not"]), stale
