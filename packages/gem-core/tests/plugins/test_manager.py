"""The host: owners, names, clashes, broken hooks, options, and guarded notices."""

import logging

import pytest

from gem_core.plugins.manager import PluginHost, host, reset_host
from gem_core.spec import MachineError, PluginError, RequestError

MODEL = """
@hookimpl
def gem_models():
    return [ModelSpec(name="{name}", summary="s", load="{module}:Model", options="{module}:Options")]
"""
SOURCE = """
import pydantic

class Options(pydantic.BaseModel):
    rows: int = 7
    label: str = "x"

def load(**options):
    return options

def strict(*, rows=1, path):
    return rows, path

@hookimpl
def gem_data_sources():
    return [
        DataSource(name="acme", summary="s", load="acme_gem:load", options="acme_gem:Options"),
        DataSource(name="acme-strict", summary="s", load="acme_gem:strict"),
        DataSource(name="acme-gone", summary="s", load="acme_gem:nothing"),
        DataSource(name="acme-extra", summary="s", load="acme_gem_missing:load", options="acme_gem_missing:Options"),
    ]
"""


def status(of: PluginHost, name: str) -> tuple[str, str]:
    (plugin,) = [p for p in of.plugins if p.name == name]
    return plugin.status, plugin.error


def test_host_is_made_once_and_forgotten_on_request(clean_host: None) -> None:
    first = host()
    assert host() is first
    reset_host()
    assert host() is not first


def test_hooks_of_a_plugin_are_listed(install) -> None:
    install("acme-gem", SOURCE)
    (acme,) = [p for p in PluginHost().plugins if p.name == "acme-gem"]
    assert acme.hooks == ("gem_data_sources",)


def test_get_gives_the_owner_and_names_are_sorted(install) -> None:
    install("acme-gem", SOURCE)
    plugins = PluginHost()
    owner, declaration = plugins.get("data_sources", "acme")
    assert (owner.name, declaration.load) == ("acme-gem", "acme_gem:load")
    names = plugins.names("data_sources")
    assert names == sorted(names)
    assert {"acme", "acme-strict"} <= set(names)


def test_an_unknown_name_offers_the_nearest_and_names_what_did_not_load(install) -> None:
    install("acme-gem", SOURCE)
    install("sick-gem", "1 / 0")
    with pytest.raises(PluginError, match="Did you mean 'acme-strict'") as caught:
        PluginHost().declaration("data_sources", "acme-strick")
    assert "sick-gem" in caught.value.do


def test_one_name_of_two_plugins_is_an_error_that_names_both_owners(install) -> None:
    install("one-gem", MODEL.format(name="twin", module="one_gem"))
    install("two-gem", MODEL.format(name="twin", module="two_gem"))
    plugins = PluginHost()
    with pytest.raises(PluginError, match=r"one-gem \(one-gem 1.0\) and two-gem \(two-gem 1.0\)"):
        plugins.get("models", "twin")
    assert plugins.declaration("models", "gem").name == "gem"


def test_what_is_left_out_is_said_once_in_the_log(install, caplog: pytest.LogCaptureFixture) -> None:
    install("sick-gem", "1 / 0")
    plugins = PluginHost()
    plugins.names("models")
    assert [r.getMessage() for r in caplog.records] == [
        "plugin sick-gem (sick-gem 1.0) is left out: import raised ZeroDivisionError: division by zero"
    ]


def test_two_entry_points_for_one_module_register_it_once(install) -> None:
    site = install("acme-gem", SOURCE)
    (site / "acme_gem-1.0.dist-info/entry_points.txt").write_text("[gem_core.plugins]\nacme-gem = acme_gem\nacme-two = acme_gem\n")
    plugins = PluginHost()
    assert status(plugins, "acme-gem")[0] == "loaded"
    assert status(plugins, "acme-two")[0] == "failed"
    assert plugins.get("data_sources", "acme")[0].name == "acme-gem"


def test_an_unknown_hook_fails_the_plugin_and_is_named(install) -> None:
    install("acme-gem", SOURCE + "\n@hookimpl\ndef gem_modelz():\n    return []\n")
    install("other-gem", MODEL.format(name="o", module="other_gem"))
    plugins = PluginHost()
    state, error = status(plugins, "acme-gem")
    assert state == "failed"
    assert "gem_modelz" in error
    assert status(plugins, "other-gem")[0] == "loaded"
    assert "acme" not in plugins.names("data_sources")


def test_a_hook_with_an_argument_that_does_not_exist_fails_the_plugin(install) -> None:
    install("acme-gem", "@hookimpl\ndef gem_topology(wolrd):\n    return None\n")
    state, error = status(PluginHost(), "acme-gem")
    assert state == "failed"
    assert "wolrd" in error


def test_a_hook_without_its_marker_fails_the_plugin(install) -> None:
    install("acme-gem", "def gem_models():\n    return []\n")
    assert status(PluginHost(), "acme-gem") == ("failed", "gem_models lacks the @hookimpl marker of gem_core.spec")


def test_a_wrapper_is_refused(install) -> None:
    install("acme-gem", "@hookimpl(wrapper=True)\ndef gem_models():\n    return (yield)\n")
    state, error = status(PluginHost(), "acme-gem")
    assert state == "failed"
    assert "cannot be wrapped" in error


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("raise ValueError('no licence')", "no licence"),
        ("return None", "returned NoneType, not a list of ModelSpec"),
        ("return 'gem'", "returned str, not a list of ModelSpec"),
        ("return ['gem']", "returned a str among its ModelSpecs"),
        ("return [ModelSpec(name='a', summary='', load='m:M', options='m:O')] * 2", "declares a twice"),
    ],
)
def test_a_plugin_whose_hook_is_unsound_gives_nothing_at_all(install, body: str, text: str, caplog: pytest.LogCaptureFixture) -> None:
    install("acme-gem", f"{SOURCE}\n@hookimpl\ndef gem_models():\n    {body}\n")
    plugins = PluginHost()
    with caplog.at_level(logging.WARNING, "gem_core.plugins"):
        assert "gem" in plugins.names("models")
    state, error = status(plugins, "acme-gem")
    assert state == "failed"
    assert text in error
    assert "acme" not in plugins.names("data_sources")
    assert "acme-gem" in caplog.text
    with pytest.raises(PluginError, match="failed"):
        plugins.require(["acme-gem"])


@pytest.mark.parametrize(
    ("declaration", "text"),
    [
        ("ParallelStrategy(name='a', stage='dence', summary='', load='m:f')", "unknown stage 'dence'. Did you mean 'dense'"),
        ("KernelImpl(op='gdpa', contract=1, backend='a', load='m:f', devices=('gpu',), dtypes=('fp32',))", "unknown device 'gpu'"),
        ("KernelImpl(op='gdpa', contract=1, backend='a', load='m:f', devices=('cpu',), dtypes=('float32',))", "unknown dtype 'float32'"),
    ],
)
def test_words_outside_the_closed_lists_are_refused(install, declaration: str, text: str) -> None:
    hook = "gem_parallel_strategies" if "Strategy" in declaration else "gem_kernel_impls"
    install("acme-gem", f"@hookimpl\ndef {hook}():\n    return [{declaration}]\n")
    plugins = PluginHost()
    plugins.collect(hook)
    assert text in status(plugins, "acme-gem")[1]


def test_registration_hooks_are_called_once(install) -> None:
    install("acme-gem", "calls = []\n@hookimpl\ndef gem_models():\n    calls.append(1)\n    return []\n")
    plugins = PluginHost()
    for _ in range(3):
        plugins.names("models")
    (acme,) = [p for p in plugins.plugins if p.name == "acme-gem"]
    assert acme.plugin.calls == [1]


def test_commands_are_asked_for_only_when_a_command_is(install) -> None:
    install("acme-gem", "calls = []\n@hookimpl\ndef gem_cli_commands():\n    calls.append(1)\n    return []\n")
    plugins = PluginHost()
    plugins.names("models")
    (acme,) = [p for p in plugins.plugins if p.name == "acme-gem"]
    assert acme.plugin.calls == []
    plugins.names("cli_commands")
    assert acme.plugin.calls == [1]


def test_a_plugin_that_breaks_over_its_commands_gives_nothing_any_more(install) -> None:
    install("acme-gem", SOURCE + "\n@hookimpl\ndef gem_cli_commands():\n    raise ValueError('no')\n")
    plugins = PluginHost()
    assert "acme" in plugins.names("data_sources")
    plugins.names("cli_commands")
    assert "acme" not in plugins.names("data_sources")
    assert status(plugins, "acme-gem")[0] == "failed"


def test_an_error_a_user_can_act_on_passes_through_loading_unchanged(install) -> None:
    """A missing extra: the module says so itself, with exit code 3."""
    (install("acme-gem", SOURCE.replace("acme_gem_missing", "acme_extra")) / "acme_extra.py").write_text(
        "from gem_core.spec import MachineError\nraise MachineError('acme-extra', 'acmelib is not installed', 'pip install acme-gem[extra]')\n"
    )
    with pytest.raises(MachineError, match=r"acmelib is not installed. pip install acme-gem\[extra\]") as caught:
        PluginHost().build("data_sources", "acme-extra")
    assert caught.value.exit_code == 3


def test_require_loads_what_automatic_loading_left_out(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("acme-gem", SOURCE)
    monkeypatch.setenv("GEM_PLUGINS_AUTOLOAD", "0")
    plugins = PluginHost()
    assert "acme" not in plugins.names("data_sources")
    plugins.require(["acme-gem"])
    assert "acme" in plugins.names("data_sources")
    assert status(plugins, "acme-gem")[0] == "loaded"


def test_build_validates_options_and_fills_defaults_in(install) -> None:
    install("acme-gem", SOURCE)
    plugins = PluginHost()
    assert plugins.build("data_sources", "acme", {"rows": 3}) == {"rows": 3, "label": "x"}
    assert plugins.options("data_sources", "acme", {}).rows == 7


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rowz": 3}, "Did you mean 'rows'"),
        ({"rows": True}, "True is not accepted"),
        ({"rows": "3"}, "'3' is not accepted"),
        ({"label": 3}, "3 is not accepted"),
    ],
)
def test_wrong_options_are_refused_even_where_the_plugin_is_lax(install, options: dict[str, object], text: str) -> None:
    install("acme-gem", SOURCE)
    with pytest.raises(RequestError, match=text) as caught:
        PluginHost().build("data_sources", "acme", options)
    assert "data source 'acme'" in caught.value.asked


def test_without_a_model_the_signature_checks_options(install) -> None:
    install("acme-gem", SOURCE)
    plugins = PluginHost()
    assert plugins.build("data_sources", "acme-strict", {"rows": 2}, path="p") == (2, "p")
    with pytest.raises(RequestError, match="Did you mean 'rows'"):
        plugins.build("data_sources", "acme-strict", {"rovs": 2}, path="p")
    with pytest.raises(RequestError, match="no such option"):
        plugins.build("data_sources", "acme-strict", {"path": "mine"}, path="p")


@pytest.mark.parametrize("name", ["acme-gone", "acme-extra"])
def test_code_that_cannot_be_imported_names_its_owner(install, name: str) -> None:
    install("acme-gem", SOURCE)
    with pytest.raises(PluginError, match=r"acme-gem 1.0"):
        PluginHost().build("data_sources", name)


def test_models_are_called_with_their_options_object(install) -> None:
    code = "import pydantic\nclass Options(pydantic.BaseModel):\n    depth: int = 2\ndef Model(schema, options):\n    return schema, options.depth\n"
    install("acme-gem", code + MODEL.format(name="acme", module="acme_gem"))
    assert PluginHost().build("models", "acme", {"depth": 5}, "schema") == ("schema", 5)


def test_first_asks_strangers_before_core_and_skips_none(install) -> None:
    install("aaa-gem", "@hookimpl\ndef gem_topology(world):\n    return None\n")
    install("bbb-gem", "@hookimpl\ndef gem_topology(world):\n    return Topology(world=world, device='cpu', source='bbb') if world == 3 else None\n")
    plugins = PluginHost()
    owner, topology = plugins.first("gem_topology", world=3)
    assert (owner.name, topology.source) == ("bbb-gem", "bbb")
    owner, topology = plugins.first("gem_topology", world=2)
    assert (owner.name, topology.world) == ("gem-core", 2)


def test_first_names_the_owner_of_a_hook_that_raises(install) -> None:
    install("aaa-gem", "@hookimpl\ndef gem_topology(world):\n    raise OSError('no fabric')\n")
    with pytest.raises(PluginError, match=r"aaa-gem \(aaa-gem 1.0\) raised OSError"):
        PluginHost().first("gem_topology", world=1)


LISTENER = """
heard = []

@hookimpl
def gem_run_started(run):
    heard.append("started")

@hookimpl
def gem_step_finished(run, step):
    heard.append(step)
    if step == "bad":
        raise RuntimeError("listener broke")
"""


def heard(plugins: PluginHost, name: str) -> list[object]:
    return next(p for p in plugins.plugins if p.name == name).plugin.heard


def test_a_notice_that_raises_is_logged_with_its_owner_and_that_plugin_hears_no_more(install, caplog: pytest.LogCaptureFixture) -> None:
    install("aaa-gem", LISTENER)
    install("bbb-gem", LISTENER.replace('"bad"', "None"))
    plugins = PluginHost()
    plugins.notify("gem_run_started", run="r")
    for step in ("one", "bad", "two"):
        plugins.notify("gem_step_finished", run="r", step=step)
    assert heard(plugins, "aaa-gem") == ["started", "one", "bad"]
    assert heard(plugins, "bbb-gem") == ["started", "one", "bad", "two"]
    assert "aaa-gem (aaa-gem 1.0) raised in gem_step_finished" in caplog.text
    assert "listener broke" in caplog.text


def test_a_new_run_is_heard_again(install) -> None:
    install("aaa-gem", LISTENER)
    plugins = PluginHost()
    plugins.notify("gem_step_finished", run="r", step="bad")
    plugins.notify("gem_step_finished", run="r", step="lost")
    plugins.notify("gem_run_started", run="r2")
    plugins.notify("gem_step_finished", run="r2", step="one")
    assert heard(plugins, "aaa-gem") == ["bad", "started", "one"]


def test_trace_prints_hook_calls(install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install("acme-gem", MODEL.format(name="traced", module="acme_gem"))
    monkeypatch.setenv("GEM_PLUGINS_TRACE", "1")
    PluginHost().names("models")
    assert "gem_models() of acme-gem -> [[ModelSpec(name='traced'" in capsys.readouterr().err
