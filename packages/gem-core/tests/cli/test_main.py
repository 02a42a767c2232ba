"""The gem command: exit codes, three-line errors, lazy sub-commands, nearest names."""

import json
import os
import subprocess
import sys

import pytest

from gem_core.cli.lazy import OWN
from gem_core.cli.main import run
from gem_core.spec import MachineError, PluginError, RequestError, RunFailed

COMMANDS = """
import typer

app = typer.Typer()

@app.callback()
def group() -> None:
    "Acme's commands."

@app.command()
def hello(name: str, twice: bool = False) -> None:
    print(f"hello {name}" * (1 + twice))

@app.command()
def fail(kind: str) -> None:
    import gem_core.spec
    raise getattr(gem_core.spec, kind)("asked", "so", "do")

@hookimpl
def gem_cli_commands():
    return [CliCommand(name="acme", load="acme_gem:app", summary="what acme adds")]
"""


@pytest.fixture
def acme(install) -> None:
    install("acme-gem", COMMANDS)


def test_a_plugins_command_is_mounted_by_name(acme: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["acme", "hello", "world", "--twice"]) == 0
    assert capsys.readouterr().out == "hello worldhello world\n"


def test_help_lists_core_and_plugin_commands_without_loading_any(acme: None, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(sys.modules)
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    for name in (*OWN, "acme", "what acme adds"):
        assert name in out
    assert not {module for module in set(sys.modules) - before if module.startswith(("gem_core.cli.train", "gem_core.train"))}


def test_no_words_print_help(clean_host: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    assert "Usage: gem" in capsys.readouterr().out


def test_version(clean_host: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("gem-core ")


@pytest.mark.parametrize(("kind", "code"), [(RunFailed, 1), (RequestError, 2), (PluginError, 2), (MachineError, 3)])
def test_an_error_is_three_lines_on_standard_error_and_its_code(acme: None, kind: type, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["acme", "fail", kind.__name__]) == code
    out, err = capsys.readouterr()
    assert (out, err) == ("", "gem: asked\n  so\n  do\n")


def test_a_bug_is_a_traceback_not_a_message(acme: None) -> None:
    with pytest.raises(AttributeError):
        run(["acme", "fail", "NoSuchError"])


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["plugin"], "Did you mean 'plugins'"),
        (["acne"], "Did you mean 'acme'"),
        (["plugins", "lst"], "Did you mean 'list'"),
        (["plugins"], "`gem plugins --help`"),
        (["acme", "hello"], "`gem acme hello --help`"),
        (["kernels", "list", "--jsn"], "--json"),
        (["plugins", "list", "extra"], "`gem plugins list --help`"),
        (["plugins", "show", "acme-gme"], "Did you mean 'acme-gem'"),
        (["--vresion"], "`gem --help`"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_says_what_to_do(acme: None, words: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert hint in err
    assert len(err.splitlines()) == 3


def test_core_commands_cannot_be_taken_over(install, capsys: pytest.CaptureFixture[str]) -> None:
    install("acme-gem", COMMANDS.replace('name="acme"', 'name="recipes"'))
    assert run(["recipes", "list"]) == 0
    assert "toy" in capsys.readouterr().out


def test_one_command_of_two_plugins_is_an_error(install, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one-gem", "two-gem"):
        install(name, COMMANDS)
    assert run(["acme", "hello", "x"]) == 2
    assert "one-gem (one-gem 1.0) and two-gem (two-gem 1.0)" in capsys.readouterr().err


def test_a_command_that_cannot_be_imported_names_its_owner(install, capsys: pytest.CaptureFixture[str]) -> None:
    install("acme-gem", COMMANDS.replace("acme_gem:app", "acme_gem_missing:app"))
    assert run(["acme", "hello", "x"]) == 2
    assert "acme-gem 1.0" in capsys.readouterr().err


def test_interrupt_is_no_traceback(acme: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*args: object, **keywords: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gem_core.cli.listing.plugin_rows", interrupt)
    assert run(["plugins", "list"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    command = f"{sys.executable} -m gem_core kernels list --json | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert "Traceback" not in done.stderr


def test_every_own_command_is_where_the_table_says(clean_host: None) -> None:
    from gem_core.cli.lazy import find

    for name in ("plugins", "kernels", "config", "recipes", "doctor"):
        assert find(name).name == name


def test_recipes_list(clean_host: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert "toy" in {row["name"] for row in rows}
    assert all(row["summary"] for row in rows)


def test_config_show_and_its_error(clean_host: None, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.toml").write_text("[data]\nbach_size = 3\n")
    assert run(["config", "show", "-c", str(tmp_path / "bad.toml")]) == 2
    assert "Did you mean 'batch_size'" in capsys.readouterr().err


def test_config_show_prints_every_value_with_its_origin(install, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    install(
        "acme-gem",
        "def load(**o): ...\n@hookimpl\ndef gem_data_sources():\n    return [DataSource(name='acme', summary='s', load='acme_gem:load')]\n",
    )
    install("model-gem", MODEL)
    path = tmp_path / "run.toml"
    path.write_text("[data]\nsource = 'acme'\n[model]\nname = 'tiny'\n")
    assert run(["config", "show", "-c", str(path), "--set", "optim.lr=0.5", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["config"]["model"]["options"] == {"depth": 2}
    assert (shown["origins"]["optim.lr"], shown["origins"]["data.source"]) == ("--set", str(path))
    assert run(["config", "show", "-c", str(path)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["KEY", "VALUE", "FROM"]
    assert any(line.split() == ["model.options.depth", "2", "default"] for line in table)


def test_config_show_insists_on_required_plugins(install, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    install("acme-gem", "1 / 0")
    assert run(["config", "show", "-c", "toy", "--set", "plugins.require=['acme-gem']"]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert run(["config", "show", "-c", "toy", "--set", "plugins.require=['acme-gme']"]) == 2
    assert "Did you mean 'acme-gem'" in capsys.readouterr().err


MODEL = """
import pydantic

class Options(pydantic.BaseModel):
    depth: int = 2

@hookimpl
def gem_models():
    return [ModelSpec(name="tiny", summary="s", load="model_gem:Options", options="model_gem:Options")]
"""


def test_config_schema_is_json(install, capsys: pytest.CaptureFixture[str]) -> None:
    install("model-gem", MODEL)
    assert run(["config", "schema"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert "options.model.tiny" in tree["$defs"]


@pytest.mark.parametrize(("ranks", "words", "code"), [("2", ["plugins", "list", "--json"], 0), ("two", ["config", "show", "-c", "no-such"], 2)])
def test_a_rank_ends_with_its_code_and_all_it_printed(ranks: str, words: list[str], code: int) -> None:
    """Ranks leave without unloading their libraries, so nothing may wait in a buffer; a wrong WORLD_SIZE is not this place's to refuse."""
    done = subprocess.run([sys.executable, "-m", "gem_core", *words], env={**os.environ, "WORLD_SIZE": ranks}, capture_output=True, text=True)
    assert done.returncode == code
    assert json.loads(done.stdout) if code == 0 else "no-such" in done.stderr
    assert "Traceback" not in done.stderr
