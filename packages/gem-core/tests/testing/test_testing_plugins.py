import sys

import pytest

from gem_core.plugins import host
from gem_core.spec import DataSource, KernelImpl, PluginError, load_object
from gem_core.testing import fake_host, fake_module, fake_plugin

SOURCE = DataSource(name="acme-log", summary="", load="acme_source:make")


def test_a_fake_module_can_be_named_by_a_declaration():
    with fake_module("acme_source", make=lambda: "made"):
        assert load_object("acme_source:make")() == "made"
    assert "acme_source" not in sys.modules
    import json

    with fake_module("json", dumps=None) as stand_in:
        assert sys.modules["json"] is stand_in
    assert sys.modules["json"] is json


def test_a_fake_host_holds_core_and_the_plugins_given(clean_host):
    plugin = fake_plugin("acme-gem", {"gem_data_sources": [SOURCE]}, version="2.1")
    with fake_host(plugin) as inside:
        assert host() is inside
        assert [p.name for p in inside.plugins] == ["gem-core", "acme-gem"]
        owner, found = inside.get("data_sources", "acme-log")
        assert (owner.owner, found) == ("acme-gem 2.1", SOURCE)
        with fake_module("acme_source", make=lambda **options: ("made", options)):
            assert inside.build("data_sources", "acme-log", {}) == ("made", {})
    with pytest.raises(PluginError, match="acme-log"):
        host().get("data_sources", "acme-log")


def test_a_hook_may_be_given_as_a_function(clean_host):
    heard = []

    def gem_run_finished(run, summary):
        heard.append((run, summary))

    with fake_host(fake_plugin("acme-gem", {"gem_run_finished": gem_run_finished})) as inside:
        inside.notify("gem_run_finished", run=1, summary={"a": 2})
    assert heard == [(1, {"a": 2})]


def test_two_fake_plugins_that_clash_are_told_apart(clean_host):
    impl = KernelImpl(op="gdpa", contract=1, backend="acme", load="a:b", devices=("cpu",), dtypes=("fp32",))
    with fake_host(fake_plugin("one", {"gem_kernel_impls": [impl]}), fake_plugin("two", {"gem_kernel_impls": [impl]})):
        from gem_core.select.registry import registry

        with pytest.raises(PluginError, match=r"declared by one .* and two"):
            registry()


def test_the_host_is_reset_when_the_body_raises(clean_host):
    with pytest.raises(ZeroDivisionError), fake_host(fake_plugin("acme-gem", {"gem_data_sources": [SOURCE]})):
        _ = 1 / 0
    with pytest.raises(PluginError):
        host().get("data_sources", "acme-log")
