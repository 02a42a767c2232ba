"""Listing is quick and imports nothing heavy."""

import os
import subprocess
import sys
import time

import pytest

HEAVY = ("torch", "triton", "pydantic", "numpy", "typer", "rich")


def imported(words: list[str], watched: tuple[str, ...]) -> list[str]:
    """Which of ``watched`` one command imports."""
    code = (
        "import sys, os, contextlib\nfrom gem_core.cli.main import run\n"
        f"with contextlib.redirect_stdout(open(os.devnull, 'w')):\n    code = run({words!r})\n"
        f"assert code == 0, code\nprint(*[m for m in {watched!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("words", [["plugins", "list"], ["plugins", "list", "--json"]])
def test_plugins_list_imports_nothing_heavy(words: list[str]) -> None:
    assert imported(words, HEAVY) == []


@pytest.mark.parametrize(
    "words", [["kernels", "list"], ["kernels", "list", "--json"], ["plugins", "show", "gem-core"], ["--help"], ["recipes", "list"]]
)
def test_quick_commands_import_no_torch(words: list[str]) -> None:
    assert imported(words, ("torch", "triton", "numpy")) == []


def test_planted_import_of_torch_is_seen() -> None:
    """Twin of the tests above: a command that does import a watched module is reported."""
    assert imported(["recipes", "list"], ("pydantic", "typer")) == ["pydantic", "typer"]


def seconds(code: str, tries: int) -> float:
    """Best wall time of a fresh interpreter that runs ``code``."""
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    best = float("inf")
    for _ in range(tries):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, env=env)
        best = min(best, time.perf_counter() - begin)
    return best


LIST = "from gem_core.cli.main import run; run(['plugins', 'list'])"
PLAIN = "import importlib.metadata as m, json, logging, inspect; m.entry_points(group='gem_core.plugins')"


def within_budget(code: str, tries: int = 5) -> bool:
    """Under 0.3 s, or on a slow machine under three times what reading entry points costs by itself in the same run."""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    taken = seconds(code, tries)
    return taken < 0.3 or taken < 3 * seconds(PLAIN, tries)


def test_plugins_list_keeps_its_budget() -> None:
    assert within_budget(LIST)


def test_planted_slow_import_breaks_the_budget() -> None:
    assert not within_budget(f"import time; time.sleep(2.0); {LIST}", tries=1)
