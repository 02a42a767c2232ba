"""Hard requirements stay light, versions agree, and shipped files hold nothing of one machine."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
METADATA = {path.parent.name: tomllib.loads(path.read_text())["project"] for path in sorted(ROOT.glob("packages/*/pyproject.toml"))}
HEAVY = ("torchrec", "fbgemm", "triton")


def heavy_requirements(name: str, metadata: dict[str, object]) -> list[str]:
    """Hard requirements on torchrec, fbgemm or triton; gem-kernels may require triton."""
    dependencies = metadata["dependencies"]
    assert isinstance(dependencies, list)
    return [dep for dep in dependencies if dep.startswith(HEAVY) and not (name == "gem-kernels" and dep.startswith("triton"))]


def absolute_paths(text: str) -> list[str]:
    """Home folders and work folders of one machine."""
    return re.findall(r"(?:/home/\w+|/Users/\w+|/root\b|/work/\w+)", text)


@pytest.mark.parametrize("name", METADATA)
def test_no_heavy_hard_requirement(name: str) -> None:
    assert heavy_requirements(name, METADATA[name]) == []


def test_planted_heavy_requirement_is_seen() -> None:
    assert heavy_requirements("gem-core", {"dependencies": ["torch>=2.11", "torchrec>=1.6"]}) == ["torchrec>=1.6"]
    assert heavy_requirements("gem-kernels", {"dependencies": ["triton>=3.6", "fbgemm-gpu"]}) == ["fbgemm-gpu"]


def test_case_A12_no_requirement_is_a_direct_url() -> None:
    assert [dep for project in METADATA.values() for dep in project["dependencies"] if "@" in dep or "://" in dep] == []


def unbounded(dependencies: list[str]) -> list[str]:
    """Requirements without a lowest version, which ``floors`` could not install, and polars without the bound that its 2.0 needs."""
    plain = [dep.split(";")[0].strip() for dep in dependencies]
    return [dep for dep in plain if ">=" not in dep or (dep.startswith("polars") and "<2" not in dep)]


@pytest.mark.parametrize("name", METADATA)
def test_case_A08_A13_requirements_have_bounds_that_sessions_try(name: str) -> None:
    """``tests`` installs the newest releases that the bounds allow, ``floors`` the oldest."""
    assert unbounded(METADATA[name]["dependencies"]) == []


def test_planted_missing_bound_is_seen() -> None:
    assert unbounded(["numpy", "polars>=1.0", "torch>=2.11"]) == ["numpy", "polars>=1.0"]


@pytest.mark.parametrize("name", METADATA)
def test_each_package_has_its_own_papers(name: str) -> None:
    folder = ROOT / "packages" / name
    module = name.replace("-", "_")
    for file in ("README.md", "CHANGELOG.md", "LICENSE", f"src/{module}/py.typed"):
        assert (folder / file).exists(), f"{name} lacks {file}"
    version = METADATA[name]["version"]
    assert f"## {version}" in (folder / "CHANGELOG.md").read_text(), f"CHANGELOG of {name} has no heading for {version}"


def test_case_J10_no_shipped_file_names_a_folder_of_one_machine() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    names = [name for name in listed if name.endswith((".py", ".toml", ".md", ".txt", ".sh")) and name != "tests/walls/test_requirements.py"]
    assert len(names) > 50
    found = {name: absolute_paths((ROOT / name).read_text()) for name in names if (ROOT / name).exists()}
    assert {name: paths for name, paths in found.items() if paths} == {}


def test_planted_absolute_path_is_seen() -> None:
    assert absolute_paths('out = "/home/ann/runs"') == ["/home/ann"]
