"""The loader: order, clashes, failures, required names, and the three variables."""

import pytest

from gem_core.plugins.loader import LoadedPlugin, load_plugins
from gem_core.spec import PluginError

GOOD = """
@hookimpl
def gem_models():
    return [ModelSpec(name="acme-model", summary="a model", load="acme:Model", options="acme:Options")]
"""


def by_name(name: str, plugins: list[LoadedPlugin] | None = None) -> list[LoadedPlugin]:
    return [p for p in (load_plugins() if plugins is None else plugins) if p.name == name]


def test_a_plugin_is_loaded_with_its_origin(install) -> None:
    install("acme-gem", GOOD, version="1.2.3")
    (acme,) = by_name("acme-gem")
    assert (acme.status, acme.error) == ("loaded", "")
    assert (acme.distribution, acme.version, acme.module) == ("acme-gem", "1.2.3", "acme_gem")
    assert acme.owner == "acme-gem 1.2.3"
    assert acme.plugin.__name__ == "acme_gem"


def test_core_comes_first_and_the_rest_by_name(install) -> None:
    for name in ("zeta-gem", "alpha-gem", "mid-gem"):
        install(name, GOOD)
    names = [p.name for p in load_plugins()]
    assert names[0] == "gem-core"
    assert names[1:] == sorted(names[1:])


def test_two_distributions_of_one_name_are_both_reported_and_neither_loaded(install) -> None:
    install("one-gem", "raise SystemExit('must not be imported')", plugin="same")
    install("two-gem", GOOD, plugin="same")
    first, second = by_name("same")
    assert {first.distribution, second.distribution} == {"one-gem", "two-gem"}
    for record in (first, second):
        assert record.status == "clash"
        assert record.plugin is None
        assert "one-gem 1.0 and two-gem 1.0" in record.error


def test_one_name_twice_is_no_clash_when_one_of_them_goes(install) -> None:
    """Planted-fault twin of the clash: with distinct names both load."""
    install("one-gem", GOOD)
    install("two-gem", GOOD)
    assert [p.status for name in ("one-gem", "two-gem") for p in by_name(name)] == ["loaded", "loaded"]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("import not_there_at_all", "ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("raise SystemExit(5)", "SystemExit: 5"),
        ("def broken(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_one_failure_hides_nothing(install, source: str, text: str) -> None:
    install("aaa-gem", source)
    install("zzz-gem", GOOD)
    (failed,), (loaded,) = by_name("aaa-gem"), by_name("zzz-gem")
    assert failed.status == "failed"
    assert text in failed.error
    assert loaded.status == "loaded"


def test_a_required_name_that_fails_is_an_error_with_the_reason(install) -> None:
    install("acme-gem", "import not_there_at_all")
    with pytest.raises(PluginError, match="not_there_at_all") as caught:
        load_plugins(required=["acme-gem"])
    assert "acme-gem 1.0" in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_required_name_that_is_unknown_offers_the_nearest(install) -> None:
    install("acme-gem", GOOD)
    with pytest.raises(PluginError, match="Did you mean 'acme-gem'"):
        load_plugins(required=["acme-gme"])


def test_a_required_name_that_clashes_is_an_error(install) -> None:
    install("one-gem", GOOD, plugin="same")
    install("two-gem", GOOD, plugin="same")
    with pytest.raises(PluginError, match=r"one-gem 1.0 and two-gem 1.0"):
        load_plugins(required=["same"])


def test_a_required_name_that_is_there_is_quiet(install) -> None:
    install("acme-gem", GOOD)
    assert by_name("acme-gem", load_plugins(required=["acme-gem"]))[0].status == "loaded"


def test_block_leaves_plugins_out_without_importing_them(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("acme-gem", "raise RuntimeError('imported')")
    install("other-gem", GOOD)
    monkeypatch.setenv("GEM_PLUGINS_BLOCK", "acme-gem , nobody")
    (blocked,), (other,) = by_name("acme-gem"), by_name("other-gem")
    assert (blocked.status, blocked.plugin) == ("blocked", None)
    assert "GEM_PLUGINS_BLOCK" in blocked.error
    assert other.status == "loaded"
    with pytest.raises(PluginError, match="blocked"):
        load_plugins(required=["acme-gem"])


def test_autoload_off_loads_core_and_what_is_required(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("acme-gem", GOOD)
    install("other-gem", GOOD)
    monkeypatch.setenv("GEM_PLUGINS_AUTOLOAD", "0")
    assert [p.name for p in load_plugins() if p.status == "loaded"] == ["gem-core"]
    loaded = [p.name for p in load_plugins(required=["acme-gem"]) if p.status == "loaded"]
    assert loaded == ["gem-core", "acme-gem"]
    assert "GEM_PLUGINS_AUTOLOAD" in by_name("other-gem")[0].error


def test_trace_prints_each_load_on_standard_error(install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install("acme-gem", GOOD)
    load_plugins()
    assert "acme-gem" not in capsys.readouterr().err
    monkeypatch.setenv("GEM_PLUGINS_TRACE", "1")
    load_plugins()
    out, err = capsys.readouterr()
    assert "acme-gem (acme-gem 1.0): loaded" in err
    assert out == ""
