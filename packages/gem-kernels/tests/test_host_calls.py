"""What a call costs the host, counted in functions that it enters: a count is the same on every machine, and grows when work that was done once comes
back into each call."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("triton")

MOST = {"jagged_attention": (135, 265), "gdpa": (132, 243), "norm_linear": (98, 120), "gated_residual": (62, 55)}
"""Functions of Python and C that are entered forward and backward, some more than torch 2.13 on Python 3.11 enters; through Triton's own Python and
torch's the first of them took 300 and 575."""


@cache
def counts(*words):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "GEM_"))}
    command = [sys.executable, "-m", "gem_kernels_calls", *words]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {op: (int(forward), int(backward)) for op, forward, backward in map(str.split, done.stdout.splitlines())}


@pytest.mark.parametrize("op", MOST)
@pytest.mark.parametrize("direction", [0, 1], ids=["forward", "backward"])
def test_a_call_like_an_earlier_one_enters_few_functions(op, direction):
    assert 20 < counts()[op][direction] <= MOST[op][direction]


@pytest.mark.parametrize("op", MOST)
def test_launches_that_are_prepared_anew_are_noticed(op):
    """The planted fault: nothing is remembered of a launch."""
    slow = counts("slow")[op]
    assert slow[0] > MOST[op][0]
    assert slow[1] > MOST[op][1]
