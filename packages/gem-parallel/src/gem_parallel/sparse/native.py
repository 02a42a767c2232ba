"""The one place that imports fbgemm and torchrec, and that explains why they do not load.

A wheel of fbgemm fits one torch minor and does not say so; the wrong one fails with an unresolved C++ symbol, or later with a missing operator.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from gem_core.spec import MachineError

RELEASES = {"2.11": ("1.6.0", "1.6.1"), "2.13": ("1.8.0", "1.8.0")}
"""The fbgemm and torchrec releases that fit a torch minor; each triple was run."""

_DISTRIBUTIONS = ("torch", "fbgemm-gpu", "fbgemm-gpu-cpu", "torchrec")
_PROBE = "bounds_check_indices"
_LOAD_ERRORS = (ImportError, OSError, RuntimeError, AttributeError)  # what a missing or mismatched native library raises, depending on the release


def load_fbgemm(device_type: str) -> Any:
    """Import the training module of fbgemm and make sure that its operators exist for ``device_type``.

    Raises:
        MachineError: fbgemm is missing, does not fit this torch, or has no kernels for the device.
    """
    try:
        with quiet_logging():
            module = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    except _LOAD_ERRORS as error:
        raise _machine_error(f"fbgemm does not load here ({_first_line(error)})", device_type) from error
    if not hasattr(torch.ops.fbgemm, _PROBE):
        raise _machine_error("fbgemm's native library did not load", device_type)
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"fbgemm::{_PROBE}", device_type.upper()):
        raise _machine_error(f"the installed fbgemm has no {device_type} kernels", device_type)
    return module


def load_torchrec(device_type: str) -> Any:
    """Import torchrec, which only sharded tables need.

    Raises:
        MachineError: torchrec is missing or does not load.
    """
    try:
        with quiet_logging():
            return import_module("torchrec")
    except _LOAD_ERRORS as error:
        raise _machine_error(f"torchrec does not load here ({_first_line(error)})", device_type) from error


@contextmanager
def quiet_logging() -> Iterator[None]:
    """Keep fbgemm's chatter away from the root logger: its calls of ``logging.info`` would install a handler there and double every log line."""
    root = logging.getLogger()
    handlers, disabled = root.handlers[:], logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        root.handlers[:] = handlers


def repair_lines(device_type: str) -> str:
    """The two install commands for this torch, or where to look where no triple is known."""
    minor = ".".join(torch.__version__.split(".")[:2])
    if minor not in RELEASES:
        return f"No fbgemm release is known for torch {minor}: use torch {' or '.join(RELEASES)}, or engine 'torch'; see docs/parallelism.md."
    fbgemm, torchrec = RELEASES[minor]
    wheel = "fbgemm-gpu" if device_type == "cuda" else "fbgemm-gpu-cpu"
    other = "fbgemm-gpu-cpu" if device_type == "cuda" else "fbgemm-gpu"
    return (
        f"Run `pip uninstall -y {other}`, `pip install --force-reinstall --no-deps {wheel}=={fbgemm} torchrec=={torchrec}` and "
        "`pip install 'gem-parallel[torchrec]'`, or use --set embedding.engine=torch."
    )


def _machine_error(so: str, device_type: str) -> MachineError:
    return MachineError(f"engine 'torchrec' on {device_type}", f"{so}; installed: {_installed()}", repair_lines(device_type))


def _installed() -> str:
    found = []
    for name in _DISTRIBUTIONS:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def _first_line(error: BaseException) -> str:
    """The first line of the error; the misleading one about a missing operator says what it means instead."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return "its operators are not registered" if "_OpNamespace" in text else text[:200]
