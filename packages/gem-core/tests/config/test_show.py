"""Showing a configuration, filling plugins' options in, and the JSON schema."""

import json
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gem_core.config.load import flat, load_config
from gem_core.config.resolve import resolved
from gem_core.config.schema import RunConfig
from gem_core.config.show import as_toml, rows, schema
from gem_core.plugins.manager import PluginHost
from gem_core.spec import PluginError, RequestError

ACME = """
import pydantic

class Inner(pydantic.BaseModel):
    depth: int = 1

class Options(pydantic.BaseModel):
    rows: int = 7
    inner: Inner = Inner()

def load(**options):
    return options

@hookimpl
def gem_data_sources():
    return [DataSource(name="acme", summary="s", load="acme_gem:load", options="acme_gem:Options")]

@hookimpl
def gem_models():
    return [ModelSpec(name="acme", summary="s", load="acme_gem:load", options="acme_gem:Options")]

@hookimpl
def gem_embedding_engines():
    return [EmbeddingEngine(name="acme", summary="s", load="acme_gem:load", options="acme_gem_missing:Options")]

@hookimpl
def gem_parallel_strategies():
    return [ParallelStrategy(name="acme", stage="dense", summary="s", load="acme_gem:load", options="acme_gem:Options")]
"""


@pytest.fixture
def acme(install, tmp_path):
    install("acme-gem", ACME)

    def load(text: str = "", overrides: tuple[str, ...] = ()):
        path = tmp_path / "acme.toml"
        path.write_text("[data]\nsource = 'acme'\n[model]\nname = 'acme'\n" + text)
        return load_config(path, overrides)

    return load


def test_rows_are_path_value_and_origin(acme) -> None:
    shown = {path: (value, origin) for path, value, origin in rows(acme(overrides=("data.batch_size=3",)))}
    assert shown["data.batch_size"] == ("3", "--set")
    assert shown["data.source"][0] == '"acme"'
    assert shown["optim.betas"] == ("[0.9, 0.999]", "default")


def test_plugins_options_are_filled_in_with_their_defaults(acme) -> None:
    full = resolved(acme("[model.options]\nrows = 9\n", ("parallel.strategies=['single', 'acme']",)), PluginHost())
    values = dict(flat(full.config))
    assert (values["data.options.rows"], values["model.options.rows"], values["model.options.inner.depth"]) == (7, 9, 1)
    assert values["parallel.options.acme.rows"] == 7
    assert full.origins["data.options.rows"] == "default"
    assert full.origins["model.options.rows"].endswith("acme.toml")


def test_filling_in_refuses_unknown_names_and_options(acme) -> None:
    with pytest.raises(PluginError, match="Did you mean 'acme'"):
        resolved(acme(overrides=("model.name=acmee",)), PluginHost())
    with pytest.raises(RequestError, match="Did you mean 'rows'"):
        resolved(acme(overrides=("model.options.rovs=1",)), PluginHost())
    with pytest.raises(PluginError, match=r"acme-gem 1.0"):
        resolved(acme(overrides=("embedding.engine=acme",)), PluginHost())


def test_schema_has_every_key_with_a_description(clean_host: None) -> None:
    tree = RunConfig.model_json_schema()
    for section, reference in tree["properties"].items():
        owner = tree["$defs"][reference["$ref"].rsplit("/", 1)[-1]] if "$ref" in reference else tree["$defs"][f"{section.capitalize()}Section"]
        assert owner["additionalProperties"] is False
        for key, field in owner["properties"].items():
            assert field.get("description"), f"{section}.{key}"


def test_schema_holds_plugins_options_where_a_file_names_them(acme) -> None:
    tree = schema(PluginHost())
    definition = tree["$defs"]["options.data.acme"]
    assert definition["properties"]["rows"]["default"] == 7
    condition = {"properties": {"source": {"const": "acme"}}, "required": ["source"]}
    expected = {"if": condition, "then": {"properties": {"options": {"$ref": "#/$defs/options.data.acme"}}}}
    assert expected in tree["$defs"]["DataSection"]["allOf"]
    assert tree["$defs"]["ParallelSection"]["properties"]["options"]["properties"]["acme"] == {"$ref": "#/$defs/options.parallel.acme"}


def test_schema_says_which_options_could_not_be_loaded(acme) -> None:
    tree = schema(PluginHost())
    assert "acme_gem_missing" in tree["x-unavailable"]["options.embedding.acme"]


def references(tree: Any) -> list[str]:
    if isinstance(tree, dict):
        mine = [tree["$ref"]] if isinstance(tree.get("$ref"), str) else []
        return mine + [r for item in tree.values() for r in references(item)]
    return [r for item in tree for r in references(item)] if isinstance(tree, list) else []


def resolves(tree: Any, reference: str) -> bool:
    for key in reference.removeprefix("#/").split("/"):
        if key not in tree:
            return False
        tree = tree[key]
    return True


def test_every_reference_of_the_schema_leads_somewhere(acme) -> None:
    tree = json.loads(json.dumps(schema(PluginHost())))
    found = references(tree)
    assert "#/$defs/options.data.acme/$defs/Inner" in found
    assert [r for r in found if not resolves(tree, r)] == []
    del tree["$defs"]["options.data.acme"]
    assert [r for r in found if not resolves(tree, r)] != []


toml_values = st.recursive(
    st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_characters="\x7f")),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


@given(toml_values)
def test_a_shown_value_reads_back_as_itself(value: object) -> None:
    assert tomllib.loads(f"value = {as_toml(value)}")["value"] == value


def test_tables_are_shown_inline() -> None:
    assert tomllib.loads(f"v = {as_toml({'a': 1, 'b': {'c': 'd'}})}")["v"] == {"a": 1, "b": {"c": "d"}}
