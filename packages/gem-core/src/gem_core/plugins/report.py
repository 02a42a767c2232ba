"""What is installed, as plain values: the source of ``gem plugins``, ``gem doctor`` and a run's manifest."""

from typing import Any

from gem_core.plugins.kinds import KINDS, name_of
from gem_core.plugins.manager import PluginHost


def plugin_rows(host: PluginHost) -> list[dict[str, Any]]:
    """One mapping for each entry point: name, module, distribution, version, status, error, hooks.

    Registration hooks are called first, so that a plugin whose hook raises is listed as failed.
    """
    host.collect("gem_models")
    host.collect("gem_cli_commands")
    keys = ("name", "module", "distribution", "version", "status", "error")
    return [{**{key: getattr(plugin, key) for key in keys}, "hooks": list(plugin.hooks)} for plugin in host.plugins]


def declared_by(host: PluginHost, name: str) -> dict[str, list[dict[str, str]]]:
    """``{kind: [{name, summary}]}`` of everything that the plugin called ``name`` declares."""
    found = {}
    for kind, how in KINDS.items():
        mine = [{"name": name_of(d), "summary": d.summary} for owner, d in host.collect(how.hook) if owner.name == name]
        if mine:
            found[kind] = mine
    return found


def clashes(host: PluginHost) -> list[str]:
    """One line for each name that two plugins declare."""
    lines = []
    for how in KINDS.values():
        owners: dict[str, list[str]] = {}
        for owner, declaration in host.collect(how.hook):
            owners.setdefault(name_of(declaration), []).append(owner.name)
        lines += [f"{how.noun} {name!r} is declared by {' and '.join(who)}" for name, who in owners.items() if len(who) > 1]
    return lines
