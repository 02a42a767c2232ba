"""The registry of linear backends: names, reasons, and what a named backend that does not fit does."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from gem_core.spec import KernelUnavailable
from gem_precision.backends import BACKENDS, Device, LinearBackend, LinearShape, backends_of, find_backend, require
from gem_precision.presets import PRESETS

HERE = Device.here("cpu")


def only_wide(device: Device, shape: LinearShape) -> list[str]:
    """A check, found by its name."""
    reasons = [] if shape.inputs % 128 == 0 else [f"{shape.inputs} inputs are no multiple of 128"]
    return reasons if device.arch else [*reasons, "it needs a GPU"]


PICKY = LinearBackend(name="picky", recipe="fp8_block", load="os:getcwd", check=f"{__name__}:only_wide")


def test_names_are_unique_and_every_recipe_has_an_emulation_first() -> None:
    assert len({backend.name for backend in BACKENDS}) == len(BACKENDS)
    assert {backend.recipe for backend in BACKENDS} == set(PRESETS)
    for recipe in PRESETS:
        first = backends_of(recipe)[0]
        assert (first.name, first.emulated, first.measured) == (f"{recipe}_emulated", True, True)
        assert first.why_not(HERE, LinearShape(inputs=3, outputs=5)) == []


def test_reasons_are_those_of_the_check() -> None:
    assert PICKY.why_not(Device(type="cuda", name="any", arch=90), LinearShape(inputs=256, outputs=1)) == []
    assert PICKY.why_not(HERE, LinearShape(inputs=100, outputs=1)) == ["100 inputs are no multiple of 128", "it needs a GPU"]


def slow(device: Device, shape: LinearShape) -> list[str]:
    """A gain that is none, found by its name."""
    return ["it would be slow"]


def test_a_backend_that_gains_nothing_is_not_chosen_but_may_be_named() -> None:
    device, shape = Device(type="cuda", name="any", arch=90), LinearShape(inputs=128, outputs=1)
    backend = replace(PICKY, gain=f"{__name__}:slow", measured=True)
    assert backend.why_not_unasked(device, shape) == ["it would be slow"]
    assert replace(backend, gain=None).why_not_unasked(device, shape) == []
    assert backend.why_not_unasked(HERE, shape) == ["it needs a GPU"]  # what cannot be needs no other reason
    require(backend, device, shape)


def test_a_named_backend_is_used_or_refused_with_its_reasons() -> None:
    assert find_backend("fp8_block_emulated", "fp8_block").recipe == "fp8_block"
    with pytest.raises(KernelUnavailable, match="fp8_block_emulated"):
        find_backend("mxfp8_emulated", "fp8_block")
    with pytest.raises(KernelUnavailable, match=r"100 inputs.*; it needs a GPU"):
        require(PICKY, HERE, LinearShape(inputs=100, outputs=1))
    require(PICKY, Device(type="cuda", name="any", arch=90), LinearShape(inputs=128, outputs=1, rows=0))


def test_listing_backends_imports_none_of_them() -> None:
    code = "import sys, gem_precision.backends; sys.exit(any(m in sys.modules for m in ('gem_precision.native', 'gem_precision.kernels.language')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_device_of_a_cpu_has_no_architecture() -> None:
    assert (HERE.type, HERE.arch) == ("cpu", None)
    if torch.cuda.is_available():
        assert Device.here("cuda").arch is not None
