"""The command that reruns everything on a GPU, on parts that need none."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from glob import glob
from pathlib import Path
from shutil import which
from types import SimpleNamespace

import pytest
import torch

FILE = Path(__file__).parents[1] / "benchmarks" / "rerun.py"


def program(file):
    spec = importlib.util.spec_from_file_location(f"gem_kernels_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


rerun, memcheck = program(FILE), program(FILE.with_name("memcheck.py"))


def part(name, code, **options):
    return rerun.Part(name, (sys.executable, "-c", code, "OUT"), **options)


def states(out):
    return {name: found["state"] for name, found in json.loads((out / "summary.json").read_text())["parts"].items()}


PARTS = [
    part("fine", "import sys, pathlib; pathlib.Path(sys.argv[1], 'seen').touch()"),
    part("wrong", "print('what went wrong'); raise SystemExit(3)"),
    part("slow", "import time; time.sleep(60)", limit=1),
    part("tool", f"raise SystemExit({rerun.NO_SANITIZER!r})"),
    part("timed", "print('figures')", alone=True),
]


def test_what_fails_stops_nothing_and_the_summary_says_all(tmp_path, capsys):
    out = tmp_path / "new" / "folder"
    start = time.monotonic()
    assert rerun.run(PARTS, out, jobs=2) == ["wrong", "slow"]
    assert time.monotonic() - start < 30
    assert states(out) == {"fine": "ok", "wrong": "failed", "slow": "timeout", "tool": "absent", "timed": "ok"}
    assert (out / "seen").exists()
    assert (out / "timed.log").read_text() == "figures\n"
    assert json.loads((out / "summary.json").read_text())["parts"]["wrong"]["exit"] == 3
    assert "what went wrong" in capsys.readouterr().out


def test_a_program_that_ends_well_and_shows_nothing_is_not_ok(tmp_path):
    parts = [
        part("skipped", "print('3 skipped')", says=" passed"),
        part("passed", "print('3 passed')", says=" passed"),
        part("wrong", "print('gdpa no speed: off by 2')", never="no speed:"),
        part("right", "print('gdpa 0.3')", never="no speed:"),
    ]
    assert rerun.run(parts, tmp_path) == ["skipped", "wrong"]


def test_tests_that_a_machine_without_a_gpu_skips_are_not_ok(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    (mine,) = [p for p in rerun.tests() if p.name == "test-pffn"]
    assert rerun.run([mine], tmp_path) == ["test-pffn"]
    assert "42 skipped" in (tmp_path / "test-pffn.log").read_text()


def test_a_second_run_repeats_what_is_not_ok(tmp_path):
    first = [part("a", "pass"), part("b", "raise SystemExit(1)"), part("c", "pass", alone=True)]
    assert rerun.run(first, tmp_path) == ["b"]
    mended = [part("a", "raise SystemExit(1)"), part("b", "pass"), part("c", "raise SystemExit(1)", alone=True)]
    assert rerun.run(mended, tmp_path) == []
    assert rerun.run(mended, tmp_path, again=True) == ["a", "c"]


def test_timings_keep_time_and_run_alone(tmp_path):
    tests = [part(f"test-{i}", "import time; time.sleep(60)") for i in range(3)]
    busy = "import os, sys; os.path.exists(sys.argv[1] + '/busy') and sys.exit(1); open(sys.argv[1] + '/busy', 'w'); os.remove(sys.argv[1] + '/busy')"
    timed = [part(f"timed-{i}", busy, alone=True) for i in range(3)]
    assert rerun.run([*timed, *tests], tmp_path, minutes=0.1, jobs=2) == ["test-0", "test-1", "test-2"]
    assert states(tmp_path) == {"test-0": "timeout", "test-1": "timeout", "test-2": "left out", **{f"timed-{i}": "ok" for i in range(3)}}


@pytest.mark.parametrize("last", ["import time; time.sleep(60)", "raise SystemExit(1)"], ids=["timeout", "failed"])
def test_what_a_part_has_started_ends_with_it(tmp_path, last):
    code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid, flush=True)"
    rerun.run([part("parent", f"{code}; {last}", limit=2)], tmp_path)
    child = Path("/proc", (tmp_path / "parent.log").read_text().split()[0])
    for _ in range(50):
        if not child.exists() or (child / "stat").read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    os.kill(int(child.name), 9)
    raise AssertionError("the child outlived its part")


def test_words_and_variables_name_the_folder(tmp_path):
    code = "import os, sys; print(sys.argv[1], os.environ['PLACE'])"
    rerun.run([rerun.Part("p", (sys.executable, "-c", code, "OUT/x"), environment={"PLACE": "OUT/y"})], tmp_path)
    assert (tmp_path / "p.log").read_text() == f"{tmp_path}/x {tmp_path}/y\n"


def test_every_op_is_checked_and_those_without_figures_are_timed():
    parts = {p.name: p for p in rerun.every_part()}
    assert len(parts) == len(rerun.every_part())
    assert "memcheck" in parts
    assert {"host-time", "bench-pffn", "bench-add_norm", "bench-gated_residual", "bench-adapters", "tune-gdpa"} <= {
        n for n, p in parts.items() if p.alone
    }
    named = [word for p in parts.values() for word in p.command if word.endswith(".py")]
    assert all(Path(word).exists() for word in named)
    assert {Path(word).name for word in named} >= {file.name for file in (FILE.parents[1] / "tests" / "gpu").glob("test_*.py")}


def test_shares_of_a_suite_are_all_of_it_and_overlap_nowhere(pytestconfig):
    (conftest,) = [
        m for m in pytestconfig.pluginmanager.get_plugins() if getattr(m, "__file__", None) == str(Path(__file__).with_name("conftest.py"))
    ]

    def kept(share, count=7):
        items, gone = list(range(count)), []
        hook = SimpleNamespace(pytest_deselected=lambda items: gone.extend(items))
        conftest.pytest_collection_modifyitems(SimpleNamespace(getoption=lambda *a, **k: share, hook=hook), items)
        assert sorted(items + gone) == list(range(count))
        return items

    assert kept(None) == list(range(7))
    assert [kept(f"{i}/3") for i in (1, 2, 3)] == [[0, 3, 6], [1, 4], [2, 5]]
    assert kept("2/3", count=1) == []
    for share in ("0/3", "4/3"):
        with pytest.raises(pytest.UsageError, match="give 1/N to N/N"):
            kept(share)
    taken = [p.command[p.command.index("--share") + 1] for p in rerun.tests() if p.name.startswith("test-Flex")]
    assert taken == ["1/4", "2/4", "3/4", "4/4"]


def command(*words):
    return subprocess.run([sys.executable, FILE, *map(str, words)], capture_output=True, text=True, timeout=60)


def test_the_command_lists_what_a_pattern_matches(tmp_path):
    done = command(tmp_path, "--list", "--parts", "bench-[ab]*")
    assert (done.returncode, done.stdout.split()) == (0, ["bench-add_norm", "bench-block_attention", "bench-adapters"])
    done = command(tmp_path, "--parts", "nothing-*")
    assert done.returncode == 1
    assert "no part is called nothing-*; known: memcheck, test-" in done.stderr


@pytest.mark.skipif(bool(which("compute-sanitizer") or glob("/usr/local/cuda*/bin/compute-sanitizer")), reason="compute-sanitizer is here")
def test_a_missing_tool_is_named_and_no_failure(tmp_path):
    done = command(tmp_path, "--parts", "memcheck")
    assert done.returncode == 0, done.stderr
    assert states(tmp_path) == {"memcheck": "absent"}


@pytest.mark.parametrize(("code", "word"), [(0, "clean"), (9, "RED")])
def test_a_memory_check_shows_each_call_and_what_the_tool_says(tmp_path, monkeypatch, capsys, code, word):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\necho 'ran a call'\necho 'Invalid read' >&2\necho 'ran another'\nexit {code}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "argv", ["memcheck.py", "--op", "gdpa", "--op", "pffn"])
    monkeypatch.setattr(memcheck, "compiled", lambda op: "")
    with pytest.raises(SystemExit, match="memcheck found something") if code else nullcontext():
        memcheck.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["ran a call", "ran another", f"{word}: 2 calls of gdpa, pffn"]
    assert ("Invalid read" in lines) == bool(code)


def test_a_call_that_fails_without_the_tool_is_named_before_it_starts(tmp_path, monkeypatch):
    (tmp_path / "compute-sanitizer").write_text("#!/bin/sh\ntouch started\n")
    (tmp_path / "compute-sanitizer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "argv", ["memcheck.py", "--op", "gdpa"])
    monkeypatch.setattr(memcheck, "__file__", str(tmp_path / "absent.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="gdpa fails without the tool"):
        memcheck.main()
    assert not (tmp_path / "started").exists()
