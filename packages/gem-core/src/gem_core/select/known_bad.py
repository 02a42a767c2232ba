"""Versions of compilers that are known to go wrong, and for which requests."""

from dataclasses import dataclass

from gem_core.select.device import installed, release
from gem_core.spec import KernelImpl, KernelRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownBad:
    """A range of versions with a known fault.

    Args:
        distribution: the distribution that is at fault.
        first: the first bad release, inclusive.
        end: the first good release after it.
        device: the device word it concerns, None for all.
        arch: the compute capability it concerns, None for all.
        dtype: the dtype it concerns, None for all.
        refuse: whether kernels that require the distribution are unfit for such requests; else ``gem doctor`` only warns.
        fault: what goes wrong.
    """

    distribution: str
    first: tuple[int, ...]
    end: tuple[int, ...]
    device: str | None = None
    arch: int | None = None
    dtype: str | None = None
    refuse: bool
    fault: str

    def matches(self, version: str | None) -> bool:
        """Whether that version of the distribution is in the range."""
        return version is not None and self.first <= release(version) < self.end


KNOWN_BAD = (
    KnownBad(
        distribution="triton",
        first=(3, 6),
        end=(4,),
        device="interpreter",
        dtype="bf16",
        refuse=True,
        fault="bf16 arithmetic is silently wrong in Triton's interpreter",
    ),
    KnownBad(
        distribution="triton",
        first=(3, 6, 0),
        end=(3, 6, 1),
        device="cuda",
        arch=90,
        refuse=False,
        fault="the compiler has been reported to crash on some Hopper matrix instructions (WGMMA)",
    ),
)


def refusals(impl: KernelImpl, request: KernelRequest) -> list[str]:
    """Reasons from this list why ``impl`` must not serve ``request``."""
    return [
        f"{bad.distribution} {installed(bad.distribution)}: {bad.fault}"
        for bad in KNOWN_BAD
        if bad.refuse
        and bad.distribution in impl.requires
        and bad.matches(installed(bad.distribution))
        and bad.device in (None, request.device)
        and bad.arch in (None, request.arch)
        and bad.dtype in (None, request.dtype)
    ]
