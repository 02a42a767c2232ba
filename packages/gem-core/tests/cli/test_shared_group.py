"""Commands that plugins add to core's groups, ``gem kernels`` and ``gem bench``."""

import pytest

from gem_core.cli.main import run

CLOCK = """
import typer
app = typer.Typer()

@app.command()
def tell(loud: bool = False) -> None:
    print("NOON" if loud else "noon")

@hookimpl
def gem_cli_commands():
    return [CliCommand(name="kernels clock", load="acme_gem:app", summary="Tells the time of kernels."),
            CliCommand(name="bench clock", load="acme_gem:app", summary="Tells the time of this machine."),
            CliCommand(name="kernels list", load="acme_gem:app", summary="Would take over core's own.")]
"""


@pytest.fixture
def clock(install) -> None:
    install("acme-gem", CLOCK, version="1.2.0")


@pytest.mark.parametrize("group", ["kernels", "bench"])
def test_a_plugin_command_runs_with_its_options(clock: None, group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([group, "clock", "--loud"]) == 0
    assert capsys.readouterr().out == "NOON\n"


def test_help_lists_it_with_its_summary(clock: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["kernels", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "Tells the time of kernels." in shown
    assert "explain" in shown
    assert "this machine" not in shown


def test_the_first_help_leaves_it_to_its_group(clock: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    assert "clock" not in capsys.readouterr().out


def test_cores_own_commands_cannot_be_taken_over(clock: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["kernels", "list"]) == 0
    assert "reference" in capsys.readouterr().out


def test_an_unknown_command_offers_the_nearest_of_both(clock: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["kernels", "clok"]) == 2
    assert "clock" in capsys.readouterr().err
