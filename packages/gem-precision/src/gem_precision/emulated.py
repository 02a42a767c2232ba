"""Kernel backends that compute an op as its reference does, with low-precision operands in every matrix product: ``mxfp8_emulated`` and others.

``load_object`` asks this module for ``OP__RECIPE``, such as ``gdpa__mxfp8``: a function with the signature of the op's reference.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from gem_precision.presets import PRESETS
from gem_precision.products import LowKernel


def __getattr__(name: str) -> Callable[..., Any]:
    op, separator, recipe = name.partition("__")
    if not separator or recipe not in PRESETS:
        raise AttributeError(name)
    return LowKernel(PRESETS[recipe].rule(), import_module(f"gem_core.ops.{op}").reference)
