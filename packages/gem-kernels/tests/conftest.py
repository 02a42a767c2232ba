import os
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

# Triton reads this when it is imported: without a GPU the kernels run under its interpreter.
if not torch.cuda.is_available() and find_spec("triton") is not None:
    os.environ["TRITON_INTERPRET"] = "1"

# What no GPU has run yet is tested on one.
os.environ.setdefault("GEM_UNMEASURED", "1")
torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent))  # gem_kernels_portable, which tests share


def pytest_configure(config):
    # exp(large) is infinity and 1 / infinity is 0, as the kernels want it; numpy, which the interpreter computes with, warns.
    config.addinivalue_line("filterwarnings", "ignore:overflow encountered in exp:RuntimeWarning")
