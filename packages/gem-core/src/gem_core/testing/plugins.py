"""Stand-in plugins, for tests of hosts and of backends that are not installed."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

from gem_core.plugins import LoadedPlugin, PluginHost, host, load_plugins, manager, reset_host
from gem_core.plugins.loader import CORE
from gem_core.spec import hookimpl


@contextmanager
def fake_module(name: str, **attributes: Any) -> Iterator[ModuleType]:
    """An importable module that holds ``attributes``, so that a declaration can name them as ``name:attribute``."""
    module = ModuleType(name)
    vars(module).update(attributes)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield module
    finally:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before


def fake_plugin(name: str, hooks: Mapping[str, Any], *, version: str = "1.0") -> LoadedPlugin:
    """A loaded plugin.

    Args:
        name: its entry-point and distribution name.
        hooks: by hook name: a function, or the value that the hook returns.
        version: its distribution's version.
    """

    def answering(value: Any) -> Callable[[], Any]:
        return lambda: value

    plugin = ModuleType(name.replace("-", "_"))
    for hook, value in hooks.items():
        setattr(plugin, hook, hookimpl(value if callable(value) else answering(value)))
    return LoadedPlugin(
        name=name,
        module=plugin.__name__,
        distribution=name,
        version=version,
        status="loaded",
        plugin=plugin,
        hooks=tuple(sorted(hooks)),
    )


@contextmanager
def fake_host(*plugins: LoadedPlugin) -> Iterator[PluginHost]:
    """The process-wide host holds core's own plugin and ``plugins``, and nothing that is installed beside them."""
    core = [plugin for plugin in load_plugins() if plugin.name == CORE]
    reset_host()
    with patch.object(manager, "load_plugins", lambda **_: [*core, *plugins]):
        try:
            yield host()
        finally:
            reset_host()
