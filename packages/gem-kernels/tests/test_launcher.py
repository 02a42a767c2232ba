"""Direct launches are those of Triton: compared argument by argument on a stand-in for the driver, in a program without the interpreter."""

import os
import re
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

from gem_core.spec import KernelRequest, RequestError
from gem_kernels.common import direct_launch, tuning

pytest.importorskip("triton")

HERE = Path(__file__).parent
PROGRAMS = ("gem_kernels_launches", "gem_kernels_blocks")
CHECKS = [(program, check) for program in PROGRAMS for check in re.findall(r"^def (check_\w+)", (HERE / f"{program}.py").read_text(), re.MULTILINE)]


@cache
def outcomes(program):
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "GEM_CHECK", direct_launch.SWITCH)}
    done = subprocess.run([sys.executable, "-m", program], cwd=HERE, capture_output=True, text=True, timeout=300, env=environment, check=False)
    return dict(line.split() for line in done.stdout.splitlines()), done.stderr


@pytest.mark.parametrize(("program", "check"), CHECKS)
def test_direct_launches_are_those_of_triton(program, check):
    found, errors = outcomes(program)
    assert found.get(check) == "ok", errors[-3000:]


def test_there_are_checks():
    assert len(CHECKS) == 9 + 8


@pytest.fixture
def switch(monkeypatch):
    """Sets the switch and the release of triton."""

    def to(value, release="3.7.1"):
        monkeypatch.setenv(direct_launch.SWITCH, value)
        monkeypatch.setattr(direct_launch, "version", lambda name: release)
        direct_launch.why_through_triton.cache_clear()

    yield to
    direct_launch.why_through_triton.cache_clear()


def test_launches_are_direct_unless_that_is_forbidden(monkeypatch, switch):
    switch("1")
    monkeypatch.delenv(direct_launch.SWITCH)
    assert direct_launch.why_through_triton() is None
    assert direct_launch.stated() == ""
    switch("0")
    assert direct_launch.why_through_triton() == "GEM_DIRECT_LAUNCH is 0"
    assert direct_launch.stated() == "; launched through Triton: GEM_DIRECT_LAUNCH is 0"


@pytest.mark.parametrize(("release", "why"), [("3.6.0", None), ("3.7.1", None), ("3.8.0", "triton is 3.8.0"), ("3.60.0", "triton is 3.60.0")])
def test_an_unknown_triton_launches_itself_and_tables_say_so(switch, release, why):
    switch("1", release)
    found = direct_launch.why_through_triton()
    assert found is None if why is None else found.startswith(why)
    stated = tuning.where(KernelRequest(op="gdpa", device="cuda", dtype="bf16"), "a GPU")
    assert ("launched" in stated) == (why is not None)
    assert stated.endswith("direct launches are known for 3.6 and 3.7") == (why is not None)


def test_without_triton_nothing_is_launched_directly(switch, monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    switch("1")
    monkeypatch.setattr(direct_launch, "version", missing)
    assert direct_launch.why_through_triton() == "triton is not installed"


def test_another_word_is_refused(switch):
    switch("yes")
    with pytest.raises(RequestError, match="GEM_DIRECT_LAUNCH=yes"):
        direct_launch.why_through_triton()
    assert "GEM_DIRECT_LAUNCH=yes" in direct_launch.stated()


def test_the_interpreter_never_launches_directly(switch):
    """What ``triton.jit`` makes under the interpreter has no compiled kernels."""
    from gem_kernels_portable import compare, draw

    from gem_kernels.ops import host

    switch("1")
    assert host.interpreted()
    compare(draw("gated_residual"))
