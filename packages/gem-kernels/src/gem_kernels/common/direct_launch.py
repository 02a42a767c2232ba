"""Whether kernels are launched past Triton's own Python (``launcher``): unless ``GEM_DIRECT_LAUNCH=0`` forbids it. Imports no torch."""

import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from gem_core.spec import RequestError

SWITCH = "GEM_DIRECT_LAUNCH"
KNOWN = ("3.6", "3.7")
"""Releases of Triton whose launcher takes what ``launcher`` hands to it."""


def allowed() -> bool:
    """Whether the environment lets kernels be launched directly.

    Raises:
        RequestError: ``GEM_DIRECT_LAUNCH`` is neither 0 nor 1.
    """
    text = os.environ.get(SWITCH, "1")
    if text not in ("0", "1"):
        raise RequestError(f"{SWITCH}={text}", "it is neither 0 nor 1", f"Set {SWITCH}=0 for launches through Triton, or leave it out.")
    return text == "1"


@cache
def why_through_triton() -> str | None:
    """Why launches go through Triton's own Python, None if they do not have to. The environment is read once.

    Raises:
        RequestError: as ``allowed``.
    """
    if not allowed():
        return f"{SWITCH} is 0"
    try:
        release = version("triton")
    except PackageNotFoundError:
        return "triton is not installed"
    known = release.rpartition(".")[0] in KNOWN
    return None if known else f"triton is {release}, and direct launches are known for {' and '.join(KNOWN)}"


def stated() -> str:
    """What tables of kernels say about launches: nothing where they are direct."""
    try:
        why = why_through_triton()
    except RequestError as error:
        return f"; {error}"
    return "" if why is None else f"; launched through Triton: {why}"
