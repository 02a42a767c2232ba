"""acme-gem-backend is somebody else's package: seen at once, used only when named, refused with reasons when it does not fit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GEM = str(Path(sys.executable).with_name("gem"))


def gem(*words: str, expect: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([GEM, *words], capture_output=True, text=True, env={**os.environ, **env})
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def rows(**env: str) -> dict[tuple[str, str], dict[str, object]]:
    return {(row["op"], row["backend"]): row for row in json.loads(gem("kernels", "list", "--json", **env).stdout)}


def train(out: Path, *extra: str) -> dict[str, object]:
    gem("train", "-c", "toy", "--out", str(out), "--set", "train.max_steps=2", *extra)
    summary: dict[str, object] = json.loads((out / "summary.json").read_text())
    return summary


def test_installed_it_is_listed_and_changes_nothing() -> None:
    listed = rows()
    assert listed["gdpa", "acme"]["from"] == "acme-gem-backend"
    assert listed["gdpa", "acme"]["here"] != "chosen"
    assert any("prefer" in reason for reason in listed["gdpa", "acme"]["why_not"])  # type: ignore[attr-defined]
    assert listed["gdpa", "reference"]["here"] == "chosen"


def test_named_on_the_command_line_it_trains(tmp_path: Path) -> None:
    plain, named = train(tmp_path / "plain"), train(tmp_path / "named", "--set", "kernels.use.gdpa=acme")
    assert plain["kernels"]["gdpa"] == "reference"  # type: ignore[index]
    assert named["kernels"]["gdpa"] == "acme"  # type: ignore[index]
    for task, figures in plain["test"].items():  # type: ignore[attr-defined]
        assert named["test"][task]["ne"] == pytest.approx(figures["ne"], rel=1e-3)  # type: ignore[index]


def test_named_by_environment_it_is_chosen() -> None:
    assert rows(GEM_KERNELS="gdpa=acme")["gdpa", "acme"]["here"] == "chosen"


def test_named_for_an_op_it_does_not_implement_the_run_is_refused(tmp_path: Path) -> None:
    done = gem(
        "train", "-c", "toy", "--out", str(tmp_path / "run"), "--set", "kernels.use.pooled_attention=acme", "--set", "train.max_steps=1", expect=2
    )
    assert "acme" in done.stderr
    assert "pooled_attention" in done.stderr


def test_blocked_it_is_gone() -> None:
    assert ("gdpa", "acme") not in rows(GEM_PLUGINS_BLOCK="acme-gem-backend")
