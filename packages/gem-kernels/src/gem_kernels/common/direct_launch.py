"""Whether kernels are launched past Triton's own Python (``launcher``): asked for by ``GEM_DIRECT_LAUNCH=1``. Imports no torch."""

import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from gem_core.spec import RequestError

SWITCH = "GEM_DIRECT_LAUNCH"
KNOWN = ("3.6", "3.7")
"""Releases of Triton whose launcher takes what ``launcher`` hands to it."""


def asked() -> bool:
    """Whether the environment asks for direct launches.

    Raises:
        RequestError: ``GEM_DIRECT_LAUNCH`` is neither 0 nor 1.
    """
    text = os.environ.get(SWITCH, "0")
    if text not in ("0", "1"):
        raise RequestError(f"{SWITCH}={text}", "it is neither 0 nor 1", f"Set {SWITCH}=1 for direct launches, or leave it out.")
    return text == "1"


@cache
def why_through_triton() -> str | None:
    """Why launches go through Triton's own Python, None if they do not have to. The environment is read once.

    Raises:
        RequestError: as ``asked``.
    """
    if not asked():
        return f"{SWITCH} is not set"
    try:
        release = version("triton")
    except PackageNotFoundError:
        return "triton is not installed"
    known = release.rpartition(".")[0] in KNOWN
    return None if known else f"triton is {release}, and direct launches are known for {' and '.join(KNOWN)}"


def stated() -> str:
    """What tables of kernels say about launches: nothing unless direct ones are asked for."""
    try:
        if not asked():
            return ""
    except RequestError as error:
        return f"; {error}"
    why = why_through_triton()
    return "; launched directly" if why is None else f"; launched through Triton: {why}"
