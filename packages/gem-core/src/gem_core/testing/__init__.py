"""What a plugin needs to test itself: the conformance suite of an op, Hypothesis strategies, error bounds, stand-in plugins.

pytest and Hypothesis (the extra ``gem-core[testing]``) are imported by the parts that use them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gem_core.select.policy import choose
    from gem_core.select.registry import registry
    from gem_core.testing.close import assert_as_accurate, assert_close, relative_error
    from gem_core.testing.conformance import conformance_suite
    from gem_core.testing.memory import plain_precision, poisoned_memory
    from gem_core.testing.plugins import fake_host, fake_module, fake_plugin
    from gem_core.testing.strategies import jagged_lengths

__all__ = [
    "assert_as_accurate",
    "assert_close",
    "choose",
    "conformance_suite",
    "fake_host",
    "fake_module",
    "fake_plugin",
    "jagged_lengths",
    "plain_precision",
    "poisoned_memory",
    "registry",
    "relative_error",
]

_HOMES = {
    "assert_as_accurate": "testing.close",
    "assert_close": "testing.close",
    "relative_error": "testing.close",
    "choose": "select.policy",
    "registry": "select.registry",
    "conformance_suite": "testing.conformance",
    "fake_host": "testing.plugins",
    "fake_module": "testing.plugins",
    "fake_plugin": "testing.plugins",
    "jagged_lengths": "testing.strategies",
    "plain_precision": "testing.memory",
    "poisoned_memory": "testing.memory",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"gem_core.{_HOMES[name]}"), name)
