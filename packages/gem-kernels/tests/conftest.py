import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

# Triton reads this when it is imported: without a GPU the kernels run under its interpreter.
if not torch.cuda.is_available() and find_spec("triton") is not None:
    os.environ["TRITON_INTERPRET"] = "1"

# What no GPU has shown right and faster yet is tested on one.
os.environ.setdefault("GEM_UNMEASURED", "1")
torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent))  # gem_kernels_portable, which tests share


def pytest_configure(config):
    # exp(large) is infinity and 1 / infinity is 0, as the kernels want it; numpy, which the interpreter computes with, warns.
    config.addinivalue_line("filterwarnings", "ignore:overflow encountered in exp:RuntimeWarning")


def pytest_addoption(parser):
    parser.addoption("--share", metavar="I/N", help="of the tests that are selected, every N-th from the I-th on: one of N processes' share")


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config, items):
    share = config.getoption("--share", default=None)
    if share is not None:
        mine, parts = map(int, share.split("/"))
        if not 1 <= mine <= parts:
            raise pytest.UsageError(f"--share {share}: give 1/N to N/N")
        kept = items[mine - 1 :: parts]
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % parts != mine - 1])
        items[:] = kept
