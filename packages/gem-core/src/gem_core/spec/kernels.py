"""Declarations of ops and of the kernels that implement them.

Nothing here imports torch: dtypes and devices are short strings, code is named ``module:function`` and loaded on use.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

DTYPES = ("fp64", "fp32", "bf16", "fp16", "int64", "int32", "bool")
"""Short names of the dtypes a request can carry; the last three only for ops that move values and compute nothing."""

DEVICES = ("cpu", "cuda", "interpreter")
"""``interpreter`` is the CPU with ``TRITON_INTERPRET=1``."""


def load_object(path: str) -> Any:
    """Import ``module:attribute``."""
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpSpec:
    """An op of the contract: what it means and how its FLOPs are counted.

    Args:
        name: the op's name, for example ``gdpa``.
        contract: raised whenever the call or its meaning changes; kernels declare the contract they were written for.
        features: the closed list of words that a request for this op may use (``causal``, ``window``, ...).
        reference: ``module:function`` of the float64-able torch reference.
        flops: ``module:function`` of the exact forward model-FLOP count.
        summary: one line for tables.
    """

    name: str
    contract: int
    features: tuple[str, ...]
    reference: str
    flops: str
    summary: str


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelRequest:
    """What a call needs, from shapes and dtypes only: building one never synchronises with a device.

    Args:
        op: name of the op.
        device: one of ``DEVICES``.
        dtype: one of ``DTYPES``.
        arch: CUDA compute capability as an integer (90 for sm90), None without a GPU.
        head_dim: size of one head, None for ops without heads.
        features: words from ``OpSpec.features`` that this call uses.
        backward: whether gradients are wanted.
        deterministic: whether two runs must agree to the bit.
    """

    op: str
    device: str
    dtype: str
    arch: int | None = None
    head_dim: int | None = None
    features: frozenset[str] = frozenset()
    backward: bool = True
    deterministic: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelImpl:
    """One implementation of an op, forward and backward together.

    Args:
        op: name of the op it implements.
        contract: the op contract it was written for.
        backend: the name users choose it by.
        load: ``module:function``; the callable has the signature of the op's reference.
        devices: devices it runs on, from ``DEVICES``.
        dtypes: dtypes it accepts, from ``DTYPES``.
        min_arch: lowest CUDA compute capability, inclusive.
        max_arch: highest CUDA compute capability, inclusive.
        head_dims: head sizes it accepts; None for any.
        features: words of the op's features that it supports.
        backward: whether it has a backward.
        deterministic: whether its results are reproducible to the bit.
        variant: a further name when one backend has several implementations of one op.
        check: optional ``module:function(request) -> list of reasons`` for what data cannot express.
        requires: distributions that must be importable, by import name.
        configuration: optional ``module:function(request, gpu) -> str`` that says, for tables, where the kernel's launch configurations come from on
            the GPU of that name; it imports nothing heavy.
        summary: one line for tables.
    """

    op: str
    contract: int
    backend: str
    load: str
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    min_arch: int | None = None
    max_arch: int | None = None
    head_dims: tuple[int, ...] | None = None
    features: tuple[str, ...] = ()
    backward: bool = True
    deterministic: bool = True
    variant: str = ""
    check: str | None = None
    requires: tuple[str, ...] = field(default=())
    configuration: str | None = None
    summary: str = ""

    def resolve(self) -> Callable[..., Any]:
        """Import and return the implementation."""
        implementation: Callable[..., Any] = load_object(self.load)
        return implementation
