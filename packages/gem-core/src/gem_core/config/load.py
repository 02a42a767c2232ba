"""Reading a configuration: a TOML file or a recipe by name, then ``--set``, with the origin of every value."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from gem_core.config.schema import RunConfig
from gem_core.plugins.nearest import nearest
from gem_core.plugins.options import parse
from gem_core.select.policy import KernelPolicy
from gem_core.spec import RequestError


@dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """A configuration and where it comes from.

    Args:
        config: the validated configuration.
        origins: ``default``, the file's name or ``--set`` for every dotted path.
        source: the text of the file.
        name: the file's stem, or the recipe's name.
    """

    config: RunConfig
    origins: dict[str, str]
    source: str
    name: str

    def kernel_policy(self) -> KernelPolicy:
        """The ``[kernels]`` table as a policy; a preference from ``--set`` stands above the environment's."""
        kernels = self.config.kernels
        rule = self.origins["kernels.prefer"]
        return KernelPolicy(use=dict(kernels.use), prefer=kernels.prefer, on_reference=kernels.on_reference, prefer_rule=rule)


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read a configuration.

    Args:
        source: path of a TOML file, or the name of a shipped recipe.
        overrides: ``path.to.key=value`` each; the value is read as TOML, and as a plain string where it is none.

    Raises:
        RequestError: no such file or recipe, text that is not TOML, an unknown key (the nearest is offered) or a value of the wrong type.
    """
    text, name, label = _read(source)
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"configuration {label}", f"it is not TOML: {error}", "Correct the line it names.") from error
    origins = dict.fromkeys(_leaves(tree), label)
    for override in overrides:
        for path in _override(tree, override):
            for stale in [p for p in origins if p == path or p.startswith(f"{path}.") or path.startswith(f"{p}.")]:
                del origins[stale]
            origins[path] = "--set"
    run = tree.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("out", f"runs/{name}")
    config = _parse(tree, origins, label)
    return LoadedConfig(config=config, origins={path: origins.get(path, "default") for path, _ in flat(config)}, source=text, name=name)


def _parse(tree: Mapping[str, Any], origins: Mapping[str, str], label: str) -> RunConfig:
    try:
        return parse(RunConfig, tree, "")
    except RequestError as error:
        asked = f"{error.asked}."
        origin = next((origins[path] for path in origins if f"{path}.".startswith(asked) or asked.startswith(f"{path}.")), label)
        raise RequestError(f"{error.asked} ({origin})", error.so, error.do) from error


def flat(config: RunConfig) -> list[tuple[str, Any]]:
    """``(dotted path, value)`` of every value, in the order of the schema; empty free tables are one value."""
    return list(_flatten(config.model_dump(mode="json"), ""))


def recipes() -> dict[str, str]:
    """Text of every shipped recipe by name."""
    found = (entry for entry in files("gem_core.recipes").iterdir() if entry.name.endswith(".toml"))
    return {entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8") for entry in sorted(found, key=lambda entry: entry.name)}


def _read(source: str | Path) -> tuple[str, str, str]:
    """Text, name and label of a file or recipe."""
    path = Path(source)
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8"), path.stem, str(source)
        except UnicodeDecodeError as error:
            raise RequestError(f"configuration {source}", "it is not UTF-8 text", "Save it as UTF-8.") from error
    shipped = recipes()
    if str(source) in shipped:
        return shipped[str(source)], str(source), f"recipe {source}"
    raise RequestError(f"configuration {str(source)!r}", "it is neither a file nor a recipe", nearest(str(source), shipped))


def _override(tree: dict[str, Any], override: str) -> list[str]:
    """Put one ``--set`` into the tree; return the dotted paths it sets."""
    path, equals, text = override.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not equals or not all(keys):
        raise RequestError(f"--set {override}", "it is not PATH=VALUE", "Write it as in --set data.batch_size=256.")
    value, table = _value(text.strip()), tree
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise RequestError(f"--set {override}", f"{key} is a value, not a table", "`gem config show` prints every path.")
    table[keys[-1]] = value
    path = ".".join(keys)
    return [f"{path}.{leaf}" for leaf in _leaves(value)] if isinstance(value, dict) and value else [path]


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _leaves(tree: Mapping[str, Any]) -> list[str]:
    return [path for path, _ in _flatten(tree, "")]


def _flatten(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{path}.")
        else:
            yield path, value
