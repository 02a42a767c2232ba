"""Kernels compiled for Hopper without a GPU, in a process of their own: this one may run them in the interpreter."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path


def offline(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What a program without the interpreter prints; it can import this module."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [environment.get("PYTHONPATH")])])
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=240, env=environment)


def assembler(ptx: str) -> str:
    """What Triton's assembler says of a program for Hopper: registers, spills, and products that it makes wait for each other."""
    import triton

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [triton.knobs.nvidia.ptxas.path, "-arch=sm_90a", "-v", file.name, "-o", os.devnull]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr
