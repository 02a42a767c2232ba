"""The declarations, what importing them costs, and the options."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from gem_data.cli import app
from gem_data.options import CriteoOrcOptions, Ml100kOptions, Options, SyntheticOptions
from gem_data.plugin import gem_cli_commands, gem_data_sources

HEAVY = ("torch", "polars", "pyarrow", "pydantic", "numpy", "triton", "typer")


def resolve(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def test_declarations_name_things_that_exist() -> None:
    declared = {source.name: source for source in gem_data_sources()}
    assert {"ml-100k", "criteo-orc", "synthetic", "generated"} <= set(declared)
    for source in declared.values():
        assert callable(resolve(source.load))
        assert source.options is not None
        assert issubclass(resolve(source.options), Options)
        assert source.summary
    (command,) = gem_cli_commands()
    assert command.name == "data"
    assert resolve(command.load) is app


def loaded(statement: str) -> list[str]:
    code = f"import json, sys; {statement}; print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout))


def test_the_plugin_imports_nothing_heavy() -> None:
    assert loaded("import gem_data.plugin as p; p.gem_data_sources(); p.gem_cli_commands()") == []


def test_options_import_no_data_library_and_the_check_sees_what_is_imported() -> None:
    assert loaded("import gem_data.options") == ["pydantic"]


def test_a_declared_source_builds_from_plain_options() -> None:
    declared = {source.name: source for source in gem_data_sources()}["synthetic"]
    options = resolve(str(declared.options))(rows=40, test_rows=30, users=10)
    source = resolve(declared.load)(**options.model_dump())
    assert (source.rows("train"), source.rows("test")) == (40, 30)


@pytest.mark.parametrize(
    ("options", "values"),
    [
        (SyntheticOptions, {"rows": 0}),
        (SyntheticOptions, {"rows": True}),
        (SyntheticOptions, {"rows": "10"}),
        (SyntheticOptions, {"temperature": 0.0}),
        (SyntheticOptions, {"zipf": -1.0}),
        (SyntheticOptions, {"base_logit": float("nan")}),
        (SyntheticOptions, {"seed": -1}),
        (SyntheticOptions, {"row": 10}),
        (Ml100kOptions, {"history_length": 0}),
        (Ml100kOptions, {"history_rule": "loose"}),
        (Ml100kOptions, {"item_statistics": "future"}),
        (CriteoOrcOptions, {}),
        (CriteoOrcOptions, {"path": "x", "min_count": 0}),
        (CriteoOrcOptions, {"path": "x", "unknown": "drop"}),
        (CriteoOrcOptions, {"path": "x", "test_parts": (-1,)}),
        (CriteoOrcOptions, {"path": "x", "hash_rows": 1.5}),
    ],
)
def test_bad_options_are_refused(options: type[Options], values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        options(**values)


def test_options_as_a_configuration_file_gives_them() -> None:
    criteo = CriteoOrcOptions.model_validate({"path": "clicks", "train_parts": [0, 1], "test_parts": [5]})
    assert (criteo.path, criteo.train_parts, criteo.test_parts) == (Path("clicks"), (0, 1), (5,))
    assert Ml100kOptions().path is None
    assert Ml100kOptions().history_rule == "strict"
    with pytest.raises(ValidationError):
        criteo.min_count = 3


def test_the_list_command_says_what_is_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEM_DATA_HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["list", "--json"])
    assert result.exit_code == 0, result.output
    files = {row["name"]: row["files"] for row in json.loads(result.stdout)}
    assert files["ml-100k"] == "missing: gem data fetch ml-100k"
    assert files["synthetic"] == "none needed"
    assert "data.options.path" in files["criteo-orc"]
    table = CliRunner().invoke(app, ["list"])
    assert table.exit_code == 0
    assert "SOURCE" in table.stdout
