"""Triton, or an error that says how to get it. Kernel modules import it from here and are themselves imported on first use."""

from gem_core.spec import MachineError

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    raise MachineError(
        "a Triton kernel of gem-kernels", "triton is not installed", "Install it (Linux only): python3 -m pip install 'triton>=3.6'."
    ) from error

__all__ = ["tl", "triton"]
