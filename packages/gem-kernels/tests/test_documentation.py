"""Documented code runs: the README's blocks, and the example of a foreign model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), flags=re.DOTALL)
EXAMPLE = PACKAGE.parents[1] / "examples" / "foreign_model.py"


def run(*words):
    """A program as a user would start it, without the interpreter that conftest.py asks for."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=120, env=environment)


def comments_of_prints(block):
    """What a block says its prints show."""
    return [line.split("# ", 1)[1].strip() for line in block.splitlines() if line.startswith("print(")]


def test_the_readme_has_code():
    assert len(BLOCKS) == 2


@pytest.mark.parametrize("block", BLOCKS, ids=["layer", "op"])
def test_case_A09_readme_code_runs_and_prints_what_it_says(block):
    done = run("-c", block)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == comments_of_prints(block)


def test_readme_table_names_every_kernel():
    from gem_kernels.plugin import gem_kernel_impls

    table = (PACKAGE / "README.md").read_text()
    for impl in gem_kernel_impls():
        (row,) = [line for line in table.splitlines() if line.startswith(f"| `{impl.op}` | `{impl.backend}` |")]
        for word in impl.dtypes:
            assert word in row


@pytest.mark.skipif(not EXAMPLE.exists(), reason="the examples are not beside an installed package")
def test_a_foreign_model_learns():
    done = run(EXAMPLE)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(losses) > 3
    assert losses[-1] < losses[0] - 0.1


def test_cpu_benchmark_runs_on_few_rows():
    done = run(PACKAGE / "benchmarks" / "sdpa.py", "--rows", "4")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 8


def test_gpu_benchmarks_say_what_they_need():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run(PACKAGE / "benchmarks" / "host_time.py")
    assert (done.returncode, done.stderr.strip()) == (1, "this benchmark needs a CUDA device")
    done = run(PACKAGE / "benchmarks" / "memcheck.py", "--op", "gdpa")
    assert done.returncode == 1
    assert "compute-sanitizer is not on PATH" in done.stderr or "found something" in done.stderr
