"""A wheel holds the sources as they are now."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def plugin_of_wheel(source: Path, out: Path) -> str:
    """Build the wheel of ``source`` and return its ``plugin.py``."""
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out), str(source)], check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.read("gem_precision/plugin.py").decode()


def test_case_A14_an_edit_between_two_builds_is_in_the_second_wheel(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "packages/gem-precision", source, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    plugin = source / "src/gem_precision/plugin.py"
    before = plugin_of_wheel(source, tmp_path / "first")
    assert before == plugin.read_text()
    plugin.write_text(before + "# edited\n")
    assert plugin_of_wheel(source, tmp_path / "second") == before + "# edited\n"
