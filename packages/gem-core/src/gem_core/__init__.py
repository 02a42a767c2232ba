"""gem-core: the bottom of the GEM trainer.

Importing this package is cheap: torch is loaded only when an op, a model or the trainer is.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("gem-core")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0+source"

__all__ = ["__version__", "use"]


def __getattr__(name: str) -> object:
    if name == "use":
        from gem_core.select.policy import use

        return use
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
