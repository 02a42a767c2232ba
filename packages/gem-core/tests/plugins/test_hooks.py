"""Each hook once, from a stranger's package to the place that uses it."""

import json
import logging
from pathlib import Path

import pytest

from gem_core.cli.main import run
from gem_core.plugins.manager import PluginHost, host
from gem_core.select.policy import choose
from gem_core.select.registry import registry
from gem_core.spec import CheckpointInfo, KernelRequest, RunInfo, StepInfo

RUN = RunInfo(folder=Path("runs/x"), seed=1, config={}, kernels={"gdpa": "reference"}, rank=0, world=1)


def declare(hook: str, declaration: str, rest: str = "") -> str:
    return f"{rest}\n@hookimpl\ndef {hook}():\n    return [{declaration}]\n"


def test_gem_kernel_ops(install) -> None:
    install("acme-gem", declare("gem_kernel_ops", "OpSpec(name='acme_pool', contract=3, features=('w',), reference='m:r', flops='m:f', summary='s')"))
    assert registry().op("acme_pool").contract == 3


def test_gem_kernel_impls(install) -> None:
    impl = "KernelImpl(op='gdpa', contract=1, backend='acme', load='acme_gem:run', devices=('cpu',), dtypes=('fp32',))"
    install("acme-gem", declare("gem_kernel_impls", impl, "def run():\n    return 'ran'\n"))
    choice = choose(KernelRequest(op="gdpa", device="cpu", dtype="fp32"), "acme")
    assert choice.impl.resolve()() == "ran"


LOAD = "def load(*args, **options):\n    return args, options\n"


def test_gem_precision_recipes(install) -> None:
    install("acme-gem", declare("gem_precision_recipes", "PrecisionRecipe(name='acme', summary='s', load='acme_gem:load')", LOAD))
    assert PluginHost().build("precision_recipes", "acme", {"bits": 8}) == ((), {"bits": 8})


def test_gem_parallel_strategies(install) -> None:
    install("acme-gem", declare("gem_parallel_strategies", "ParallelStrategy(name='acme', stage='memory', summary='s', load='acme_gem:load')", LOAD))
    plugins = PluginHost()
    assert plugins.declaration("parallel_strategies", "acme").stage == "memory"
    assert plugins.build("parallel_strategies", "acme", {"k": 1}) == ((), {"k": 1})


def test_gem_embedding_engines(install) -> None:
    install("acme-gem", declare("gem_embedding_engines", "EmbeddingEngine(name='acme', summary='s', load='acme_gem:load')", LOAD))
    built = PluginHost().build("embedding_engines", "acme", {"rows": 2}, "tables", "optimizer", device="cpu", seed=1)
    assert built == (("tables", "optimizer"), {"device": "cpu", "seed": 1, "rows": 2})


def test_gem_data_sources(install) -> None:
    install("acme-gem", declare("gem_data_sources", "DataSource(name='acme', summary='s', load='acme_gem:load')", LOAD))
    assert PluginHost().build("data_sources", "acme", {"path": "p"}) == ((), {"path": "p"})


def test_gem_models(install) -> None:
    options = "import pydantic\nclass Options(pydantic.BaseModel):\n    depth: int = 2\n"
    install(
        "acme-gem", declare("gem_models", "ModelSpec(name='acme', summary='s', load='acme_gem:load', options='acme_gem:Options')", options + LOAD)
    )
    (schema, checked), _ = PluginHost().build("models", "acme", {}, "schema")
    assert (schema, checked.depth) == ("schema", 2)


def test_gem_topology(install) -> None:
    install("acme-gem", "@hookimpl\ndef gem_topology(world):\n    return Topology(world=world, device='cpu', source='acme')\n")
    found = PluginHost().first("gem_topology", world=4)
    assert found is not None
    assert (found[0].name, found[1].world) == ("acme-gem", 4)


def test_gem_topology_of_core_is_the_fallback(clean_host: None) -> None:
    found = host().first("gem_topology", world=2)
    assert found is not None
    assert (found[0].name, found[1].world) == ("gem-core", 2)


def test_gem_cli_commands(install, capsys: pytest.CaptureFixture[str]) -> None:
    code = "import typer\napp = typer.Typer()\n@app.command()\ndef main() -> None:\n    print('from acme')\n"
    install("acme-gem", declare("gem_cli_commands", "CliCommand(name='acme', load='acme_gem:app', summary='s')", code))
    assert run(["acme"]) == 0
    assert capsys.readouterr().out == "from acme\n"


def listen(install, hook: str, argument: str) -> PluginHost:
    """A host with one listener that writes down what it hears and one that breaks."""
    install("acme-gem", f"heard = []\n@hookimpl\ndef {hook}({argument}):\n    heard.append({argument})\n")
    install("sick-gem", f"@hookimpl\ndef {hook}({argument}):\n    raise ValueError('sick')\n")
    return PluginHost()


def heard(plugins: PluginHost) -> list[object]:
    return next(p for p in plugins.plugins if p.name == "acme-gem").plugin.heard


def test_gem_run_started(install, caplog: pytest.LogCaptureFixture) -> None:
    plugins = listen(install, "gem_run_started", "run")
    with caplog.at_level(logging.ERROR):
        plugins.notify("gem_run_started", run=RUN)
    assert heard(plugins) == [RUN]
    assert "sick-gem" in caplog.text


def test_gem_step_finished(install) -> None:
    plugins = listen(install, "gem_step_finished", "step")
    step = StepInfo(step=3, epoch=0, loss=0.5, rows=8, seconds=0.1, flops=10)
    plugins.notify("gem_step_finished", run=RUN, step=step)
    assert heard(plugins) == [step]


def test_gem_checkpoint_saved(install) -> None:
    plugins = listen(install, "gem_checkpoint_saved", "checkpoint")
    checkpoint = CheckpointInfo(step=3, path=Path("c"))
    plugins.notify("gem_checkpoint_saved", run=RUN, checkpoint=checkpoint)
    assert heard(plugins) == [checkpoint]


def test_gem_run_finished(install) -> None:
    plugins = listen(install, "gem_run_finished", "summary")
    plugins.notify("gem_run_finished", run=RUN, summary={"test": {}})
    assert heard(plugins) == [{"test": {}}]


def test_all_hooks_of_core_are_listed(clean_host: None, capsys: pytest.CaptureFixture[str]) -> None:
    run(["plugins", "list", "--json"])
    hooks = {row["name"]: row["hooks"] for row in json.loads(capsys.readouterr().out)}["gem-core"]
    assert len(hooks) == 8
