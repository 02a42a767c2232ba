"""Installing small distributions for one test: a dist-info folder and a module in a folder on ``sys.path``."""

import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest

from gem_core.plugins import loader
from gem_core.plugins.manager import reset_host
from gem_core.select import device, registry

Install = Callable[..., Path]

HEADER = "from gem_core.spec import *\n"


@pytest.fixture
def clean_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process-wide host before and after the test; no variable of the user's shell and no plugin but core's and those that the test installs."""

    def core_and_installed_here(*, group: str) -> list[EntryPoint]:
        return [
            e for e in entry_points(group=group) if e.dist and (e.dist.name == "gem-core" or str(e.dist.locate_file("")).startswith(str(tmp_path)))
        ]

    monkeypatch.setattr(loader, "entry_points", core_and_installed_here)
    for name in ("GEM_PLUGINS_AUTOLOAD", "GEM_PLUGINS_BLOCK", "GEM_PLUGINS_TRACE", "GEM_KERNELS", "GEM_KERNELS_PREFER", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)

    def forget() -> None:
        reset_host()
        device.installed.cache_clear()
        registry.importable.cache_clear()

    forget()
    yield
    forget()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_host: None) -> Iterator[Install]:
    """``install("acme-gem", source)`` puts a distribution with one plugin, ``acme_gem``, on the path; returns the folder."""
    site, modules = tmp_path / "site", []
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def put(distribution: str, source: str | None = None, *, plugin: str | None = None, version: str = "1.0", module: str | None = None) -> Path:
        module = module or distribution.replace("-", "_")
        if source is not None:
            (site / f"{module}.py").write_text(HEADER + textwrap.dedent(source))
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        if source is not None:
            (info / "entry_points.txt").write_text(f"[gem_core.plugins]\n{plugin or distribution} = {module}\n")
        if source is not None:  # metadata alone, of torch for example, brings no module to forget
            modules.append(module)
        importlib.invalidate_caches()
        reset_host()
        return site

    yield put
    for module in modules:
        sys.modules.pop(module, None)
