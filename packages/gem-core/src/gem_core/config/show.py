"""Printing a configuration with origins, and its JSON schema."""

import json
from typing import Any

from gem_core.config.load import LoadedConfig, flat
from gem_core.config.resolve import SECTIONS
from gem_core.config.schema import RunConfig
from gem_core.plugins.manager import PluginHost
from gem_core.spec import GemError


def rows(loaded: LoadedConfig) -> list[tuple[str, str, str]]:
    """``(dotted path, value as TOML, origin)`` of every value."""
    return [(path, as_toml(value), loaded.origins[path]) for path, value in flat(loaded.config)]


def as_toml(value: Any) -> str:
    """A value as it would stand in TOML; ``null`` for an optional value that is not set, which TOML leaves out."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {as_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(as_toml(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def schema(host: PluginHost) -> dict[str, Any]:
    """The JSON schema of a configuration file, for editors.

    The options models of plugins stand under ``$defs`` as ``options.SECTION.NAME`` and hold where a file names them; ``x-unavailable`` says which
    could not be loaded on this machine and why.
    """
    tree = RunConfig.model_json_schema()
    unavailable: dict[str, str] = {}
    for section, (kind, key) in SECTIONS.items():
        owner = tree["$defs"][f"{section.capitalize()}Section"]
        default = owner["properties"][key]["default"]
        conditions = [_when(key, name, default, reference) for name, reference in _definitions(tree, unavailable, host, section, kind)]
        if conditions:
            owner["allOf"] = conditions
    parallel = _definitions(tree, unavailable, host, "parallel", "parallel_strategies")
    tree["$defs"]["ParallelSection"]["properties"]["options"]["properties"] = {name: {"$ref": reference} for name, reference in parallel}
    if unavailable:
        tree["x-unavailable"] = unavailable
    return tree


def _definitions(tree: dict[str, Any], unavailable: dict[str, str], host: PluginHost, section: str, kind: str) -> list[tuple[str, str]]:
    """Put the options models of one kind under ``$defs``; return ``(name, reference)`` of each."""
    references = []
    for name in host.names(kind):
        label = f"options.{section}.{name}"
        try:
            model = host.options_model(kind, name)
        except GemError as error:
            unavailable[label] = str(error)
            continue
        if model is not None:
            tree["$defs"][label] = model.model_json_schema(ref_template=f"#/$defs/{label}/$defs/{{model}}")
            references.append((name, f"#/$defs/{label}"))
    return references


def _when(key: str, name: str, default: str, reference: str) -> dict[str, Any]:
    """``options`` has this schema when ``key`` is ``name``, or absent and that is the default."""
    condition: dict[str, Any] = {"properties": {key: {"const": name}}}
    if name != default:
        condition["required"] = [key]
    return {"if": condition, "then": {"properties": {"options": {"$ref": reference}}}}
