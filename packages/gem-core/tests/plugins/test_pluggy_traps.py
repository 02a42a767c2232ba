"""Three traps of pluggy's own entry-point loading, each shown with pluggy itself and shown to be gone with ours."""

import pluggy
import pytest

from gem_core.plugins.loader import load_plugins
from gem_core.plugins.manager import PluginHost
from gem_core.spec import ENTRY_POINT_GROUP, PROJECT, hooks

MODEL = """
@hookimpl
def gem_models():
    return [ModelSpec(name="{name}", summary="s", load="m:M", options="m:O")]
"""


def plain() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hooks)
    return manager


def test_trap_1_pluggy_skips_the_second_of_one_name_without_a_word_and_we_report_both(install) -> None:
    install("one-gem", MODEL.format(name="one"), plugin="same")
    install("two-gem", MODEL.format(name="two"), plugin="same")
    assert plain().load_setuptools_entrypoints(ENTRY_POINT_GROUP, name="same") == 1
    assert [p.status for p in load_plugins() if p.name == "same"] == ["clash", "clash"]


def test_trap_2_pluggy_stops_at_the_first_failing_import_and_we_go_on(install) -> None:
    install("aaa-gem", "raise ImportError('missing')")
    install("zzz-gem", MODEL.format(name="z"))
    with pytest.raises(ImportError, match="missing"):
        plain().load_setuptools_entrypoints(ENTRY_POINT_GROUP)
    status = {p.name: p.status for p in load_plugins()}
    assert (status["aaa-gem"], status["zzz-gem"]) == ("failed", "loaded")


def test_trap_3_a_pluggy_call_loses_who_returned_what_and_we_keep_it(install) -> None:
    install("one-gem", MODEL.format(name="one"))
    install("two-gem", MODEL.format(name="two"))
    manager = plain()
    for name in ("one-gem", "two-gem"):
        manager.load_setuptools_entrypoints(ENTRY_POINT_GROUP, name=name)
    assert [[type(item).__name__ for item in answer] for answer in manager.hook.gem_models()] == [["ModelSpec"], ["ModelSpec"]]
    owners = {declaration.name: owner.distribution for owner, declaration in PluginHost().collect("gem_models")}
    assert (owners["one"], owners["two"]) == ("one-gem", "two-gem")
