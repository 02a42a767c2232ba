"""Loading plugins from entry points.

pluggy's own loading skips the second of two entry points with one name without a word and stops at the first that fails to import. Here the order is
fixed (core first, then by name), neither of two clashing names is loaded, one failure hides nothing, and everything found ends up in the report.
"""

import os
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Literal

from gem_core.plugins.nearest import nearest
from gem_core.spec import ENTRY_POINT_GROUP, PluginError

CORE = "gem-core"
"""Entry-point name of core's own plugin, loaded first and even when automatic loading is off."""

Status = Literal["loaded", "blocked", "failed", "clash"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedPlugin:
    """One entry point and what became of it.

    Args:
        name: the entry-point name.
        module: the module path it points to.
        distribution: the distribution that declares it.
        version: that distribution's version.
        status: ``loaded``, ``blocked`` (by a variable), ``failed`` (import or a hook raised) or ``clash`` (two distributions, one name).
        error: one line saying why it is not loaded; empty when it is.
        plugin: the plugin object when loaded.
        hooks: names of the hooks it fills, sorted.
    """

    name: str
    module: str
    distribution: str
    version: str
    status: Status
    error: str = ""
    plugin: object | None = None
    hooks: tuple[str, ...] = ()

    @property
    def owner(self) -> str:
        """``distribution version``, as messages name an owner."""
        return f"{self.distribution} {self.version}"


def blocked_names() -> frozenset[str]:
    """Names in ``GEM_PLUGINS_BLOCK`` (comma separated)."""
    return frozenset(name.strip() for name in os.environ.get("GEM_PLUGINS_BLOCK", "").split(",") if name.strip())


def tracing() -> bool:
    """Whether ``GEM_PLUGINS_TRACE=1`` asks for a line about each load and each hook call."""
    return os.environ.get("GEM_PLUGINS_TRACE") == "1"


def trace(text: str) -> None:
    """Print one line on standard error when tracing."""
    if tracing():
        print(f"gem plugins: {text}", file=sys.stderr)


def load_plugins(*, required: Collection[str] = ()) -> list[LoadedPlugin]:
    """Load every entry point of the group, core's own first and the rest by name.

    ``GEM_PLUGINS_BLOCK=a,b`` leaves plugins out; with ``GEM_PLUGINS_AUTOLOAD=0`` only core's own and the ``required`` ones are loaded.

    Args:
        required: names that must load.

    Returns:
        One record for each entry point found, loaded or not.

    Raises:
        PluginError: a required name is unknown (the nearest is offered), blocked, clashing or failing.
    """
    found: dict[str, list[EntryPoint]] = defaultdict(list)
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        found[entry_point.name].append(entry_point)
    automatic = os.environ.get("GEM_PLUGINS_AUTOLOAD", "1") != "0"
    blocked, plugins = blocked_names(), []
    for name in sorted(found, key=lambda name: (name != CORE, name)):
        if len(found[name]) > 1:
            plugins += _clash(name, found[name])
        elif name in blocked:
            plugins.append(_record(found[name][0], "blocked", "blocked by GEM_PLUGINS_BLOCK"))
        elif not automatic and name != CORE and name not in required:
            plugins.append(_record(found[name][0], "blocked", "automatic loading is off (GEM_PLUGINS_AUTOLOAD=0)"))
        else:
            plugins.append(_load(found[name][0]))
    check_required(required, plugins)
    return plugins


def check_required(required: Iterable[str], plugins: Iterable[LoadedPlugin]) -> None:
    """Raise PluginError unless each name is loaded."""
    by_name = {plugin.name: plugin for plugin in plugins}
    for name in required:
        asked = f"plugin {name!r}"
        if name not in by_name:
            raise PluginError(asked, "no installed distribution declares it", nearest(name, by_name))
        plugin = by_name[name]
        if plugin.status != "loaded":
            do = (
                "Unset the variable, or take the plugin out of plugins.require."
                if plugin.status == "blocked"
                else "`gem plugins list` shows all of them."
            )
            raise PluginError(asked, f"{plugin.status} ({plugin.distribution} {plugin.version}): {plugin.error}", do)


def _record(entry_point: EntryPoint, status: Status, error: str = "") -> LoadedPlugin:
    name, version = (entry_point.dist.name, entry_point.dist.version) if entry_point.dist else ("unknown", "unknown")
    return LoadedPlugin(name=entry_point.name, module=entry_point.value, distribution=name, version=version, status=status, error=error)


def _clash(name: str, entry_points: list[EntryPoint]) -> list[LoadedPlugin]:
    records = sorted((_record(e, "clash") for e in entry_points), key=lambda r: (r.distribution, r.module))
    owners = " and ".join(f"{r.distribution} {r.version}" for r in records)
    trace(f"{name}: clash between {owners}")
    return [replace(r, error=f"declared by {owners}; neither is loaded, uninstall one") for r in records]


def _load(entry_point: EntryPoint) -> LoadedPlugin:
    record, begin = _record(entry_point, "loaded"), time.perf_counter()
    try:
        plugin = entry_point.load()
    except (Exception, SystemExit) as error:  # whatever a stranger's module raises must not hide the other plugins
        record = replace(record, status="failed", error=f"import raised {type(error).__name__}: {error}")
    else:
        record = replace(record, plugin=plugin)
    trace(f"{record.name} ({record.owner}): {record.status} {record.error} in {1e3 * (time.perf_counter() - begin):.1f} ms")
    return record
