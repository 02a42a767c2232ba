"""Filling the options of plugins in: every value a run will use, with its origin."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gem_core.config.load import LoadedConfig, flat
from gem_core.config.schema import RunConfig
from gem_core.plugins.manager import PluginHost

SECTIONS = {
    "data": ("data_sources", "source"),
    "model": ("models", "name"),
    "embedding": ("embedding_engines", "engine"),
    "precision": ("precision_recipes", "recipe"),
}
"""Section to the kind of declaration that owns its ``options``, and the key that names one."""


def resolved(loaded: LoadedConfig, host: PluginHost) -> LoadedConfig:
    """The configuration with every plugin's options validated and their defaults filled in.

    Raises:
        PluginError: a name that no plugin declares; the nearest is offered.
        RequestError: an unknown or badly typed option.
    """
    tree = loaded.config.model_dump(mode="json")
    for section, (kind, key) in SECTIONS.items():
        tree[section]["options"] = _filled(host, kind, tree[section][key], tree[section]["options"])
    options = tree["parallel"]["options"]
    for name in tree["parallel"]["strategies"]:
        filled = _filled(host, "parallel_strategies", name, options.get(name, {}))
        if filled:
            options[name] = filled
    config = RunConfig.model_validate(tree)
    return replace(loaded, config=config, origins={path: loaded.origins.get(path, "default") for path, _ in flat(config)})


def _filled(host: PluginHost, kind: str, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    checked = host.options(kind, name, dict(options))
    filled: dict[str, Any] = checked if isinstance(checked, dict) else checked.model_dump(mode="json")
    return filled
