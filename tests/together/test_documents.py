"""Every command that the documents show is run: blocks marked ``sh`` in README.md, docs/ and the packages' READMEs.

Commands in blocks without a mark need GPUs, or take long: they are read as ``gem`` reads them, and their configuration is checked.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from gem_core.cli.app import UsageError, app
from gem_core.config.load import load_config
from gem_core.spec import RequestError

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("packages/*/README.md")),
    *sorted(ROOT.glob("examples/*/README.md")),
]
HERE = ("gem", "torchrun", "python")
"""First words of the commands that this test runs; the others set an environment up and are run by CI itself (see ``test_setup_commands``)."""


def commands(text: str) -> list[str]:
    """The lines of all ``sh`` blocks, continued lines joined, comments dropped."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.M | re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    stripped = [re.sub(r"\s+#.*$", "", line).strip() for line in lines]
    return [line for line in stripped if line and not line.startswith("#")]


def shown_only(text: str) -> list[str]:
    """The words after ``gem`` of the commands in blocks without a mark; launchers and variables before it are dropped."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.M | re.S)
    lines = "\n".join(block for mark, block in blocks if not mark).replace("\\\n", " ").splitlines()
    found = [re.match(r"(?:[A-Z_]+=\S+ )*(?:gem|torchrun .*?(?:gem_core|\(which gem\))) (.+)", line) for line in lines]
    return [re.sub(r"\s+#.*$", "", match[1]) for match in found if match]


def parsed(line: str) -> None:
    """Read the words after ``gem`` without running anything, and load the configuration that they name."""
    command, words, context = typer.main.get_command(app), shlex.split(line), None
    while hasattr(command, "resolve_command"):
        context = command.make_context(command.name or "gem", list(words), parent=context)
        name, command, words = command.resolve_command(context, words)
    params = command.make_context(name, list(words), parent=context).params
    recipe = params.get("recipe") or params.get("config")
    if recipe is not None:
        load_config(str(recipe), params.get("overrides") or [])


def all_commands() -> list[tuple[str, str]]:
    return [(str(path.relative_to(ROOT)), line) for path in DOCUMENTS for line in commands(path.read_text())]


def run_here(lines: list[str], folder: Path) -> None:
    """Run the commands of one document in order, in one folder, as its reader would."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    for name in ("examples", "tests"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    for line in lines:
        done = subprocess.run(["bash", "-ec", line], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def runnable(line: str) -> bool:
    words = [word for word in shlex.split(line) if "=" not in word]
    return bool(words) and words[0] in HERE


@pytest.mark.parametrize("document", [str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_case_A09_documented_commands_run(document: str, tmp_path: Path) -> None:
    lines = [line for line in commands((ROOT / document).read_text()) if runnable(line)]
    run_here(lines, tmp_path)


@pytest.mark.parametrize("document", [str(path.relative_to(ROOT)) for path in DOCUMENTS if shown_only(path.read_text())])
def test_commands_that_are_not_run_here_are_right(document: str) -> None:
    for line in shown_only((ROOT / document).read_text()):
        parsed(line)


def test_scripts_that_documents_name_are_there() -> None:
    named = {name for path in DOCUMENTS for name in re.findall(r"\bpackages/[\w/-]+\.(?:py|csv|svg|json)\b", path.read_text())}
    assert len(named) > 10
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_planted_wrong_words_are_seen() -> None:
    text = "```\nA=1 torchrun --nproc-per-node 2 -m gem_core bench scale --recipe toy --gpus 1,2  # a comment\nno gem here\n```\n"
    (line,) = shown_only(text)
    assert line == "bench scale --recipe toy --gpus 1,2"
    parsed(line)
    for wrong, error in (("--scaling often", UsageError), ("--gpu 1", UsageError), ("--set train.steps=1", RequestError)):
        with pytest.raises(error):
            parsed(f"{line} {wrong}")
    with pytest.raises(RequestError, match="no such command"):
        parsed("bench scales")


def test_case_A15_setup_commands_are_what_ci_runs() -> None:
    """Lines that install something are few, and CI's script runs the README's own."""
    others = {line for _, line in all_commands() if not runnable(line)}
    strange = [line for line in others if not re.match(r"(python3 -m )?(pip|nox)\b|python3 -m (pip|pytest)\b|export \w+=", line)]
    assert strange == []
    ci = (ROOT / ".ci/run").read_text()
    assert "python3 -m pip install nox && nox -s tests" in {line for _, line in all_commands()}
    assert re.search(r"python3 -m pip install (-q )?nox && nox -s tests", ci)
    assert "nox -s quickstart" in ci


def test_documents_show_commands() -> None:
    assert len([line for _, line in all_commands() if runnable(line)]) >= 10


def test_planted_broken_command_is_seen(tmp_path: Path) -> None:
    lines = commands("text\n```sh\ngem plugins lits\n```\n")
    assert lines == ["gem plugins lits"]
    with pytest.raises(AssertionError, match="lits"):
        run_here(lines, tmp_path)


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for path in [*DOCUMENTS, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text()):
            if not (path.parent / target).exists():
                broken.append(f"{path.relative_to(ROOT)}: {target}")
    assert broken == []
