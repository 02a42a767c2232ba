"""Fixtures of the trainer's tests: core and the fake plugin are the only plugins, torch has one thread."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the fake plugin is named by strings, so it must be importable

import gem_train_fakes

from gem_core.config.load import LoadedConfig, load_config
from gem_core.plugins import LoadedPlugin, load_plugins, manager, reset_host

RECIPE = """
[run]
out = "OUT"
device = "cpu"
[data]
source = "fake"
batch_size = 16
eval_batch_size = 10
[model]
name = "probe"
[train]
epochs = 2
log_every = 4
"""


def only_fakes(*modules: Any) -> list[LoadedPlugin]:
    """Core's own plugin and these modules, as the loader would report them."""
    core = [plugin for plugin in load_plugins() if plugin.name == "gem-core"]
    return core + [
        LoadedPlugin(name=m.__name__, module=m.__name__, distribution="gem-train-fakes", version="1.0", status="loaded", plugin=m) for m in modules
    ]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Install modules as plugins beside core and the fakes; the fakes are there from the start."""

    def install(*modules: Any) -> None:
        found = only_fakes(gem_train_fakes, *modules)
        monkeypatch.setattr(manager, "load_plugins", lambda *, required=(): found)
        reset_host()

    install()
    yield install
    reset_host()


def write_recipe(folder: Path, out: str = "run") -> Path:
    """The configuration of the fakes as a file in ``folder``, for a run in ``folder / out``."""
    file = folder / "fakes.toml"
    file.write_text(RECIPE.replace("OUT", str(folder / out)))
    return file


@pytest.fixture
def configure(tmp_path: Path, plugins: Any) -> Callable[..., LoadedConfig]:
    """A configuration of the fakes that writes to ``tmp_path / out``."""
    return lambda *overrides, out="run": load_config(write_recipe(tmp_path, out), overrides)


@pytest.fixture
def recipe(tmp_path: Path, plugins: Any) -> str:
    """The path of a configuration file of the fakes that writes to ``tmp_path / "run"``."""
    return str(write_recipe(tmp_path))


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one finished run, made once; copy it before changing it."""
    from gem_core.train.run import train

    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        found = only_fakes(gem_train_fakes)
        patch.setattr(manager, "load_plugins", lambda *, required=(): found)
        reset_host()
        train(load_config(write_recipe(folder), ["train.eval_every=4", "optim.lr=0.25", "precision.recipe=bf16"]))
    reset_host()
    return folder / "run"


@pytest.fixture
def source() -> gem_train_fakes.FakeSource:
    return gem_train_fakes.FakeSource()
