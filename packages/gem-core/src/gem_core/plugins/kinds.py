"""The kinds of declaration that plugins can make, and what makes a declaration sound."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pluggy

from gem_core.plugins.nearest import nearest
from gem_core.spec import (
    DEVICES,
    DTYPES,
    STAGES,
    CliCommand,
    DataSource,
    EmbeddingEngine,
    GemError,
    KernelImpl,
    ModelSpec,
    OpSpec,
    ParallelStrategy,
    PluginError,
    PrecisionRecipe,
    load_object,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of declaration: its hook, its type, and what messages call one."""

    hook: str
    type: type
    noun: str


KINDS = {
    "kernel_ops": Kind(hook="gem_kernel_ops", type=OpSpec, noun="op"),
    "kernel_impls": Kind(hook="gem_kernel_impls", type=KernelImpl, noun="kernel"),
    "precision_recipes": Kind(hook="gem_precision_recipes", type=PrecisionRecipe, noun="precision recipe"),
    "parallel_strategies": Kind(hook="gem_parallel_strategies", type=ParallelStrategy, noun="parallel strategy"),
    "embedding_engines": Kind(hook="gem_embedding_engines", type=EmbeddingEngine, noun="embedding engine"),
    "data_sources": Kind(hook="gem_data_sources", type=DataSource, noun="data source"),
    "models": Kind(hook="gem_models", type=ModelSpec, noun="model"),
    "cli_commands": Kind(hook="gem_cli_commands", type=CliCommand, noun="command"),
}
_BY_HOOK = {kind.hook: kind for kind in KINDS.values()}


def hook_of(kind: str) -> str:
    """The hook of a kind; KeyError for an unknown one."""
    return KINDS[kind].hook


def name_of(declaration: Any) -> str:
    """The name a declaration is found by; ``op/backend`` or ``op/backend/variant`` for a kernel."""
    if isinstance(declaration, KernelImpl):
        return "/".join(part for part in (declaration.op, declaration.backend, declaration.variant) if part)
    name: str = declaration.name
    return name


def checked(hook: str, answer: Any) -> Sequence[Any]:
    """The answer of a registration hook when it is sound.

    Raises:
        TypeError: not a list or tuple of the hook's type of declaration.
        ValueError: a word outside its closed list, or one name twice.
    """
    kind = _BY_HOOK[hook]
    if not isinstance(answer, list | tuple):
        raise TypeError(f"{hook} returned {type(answer).__name__}, not a list of {kind.type.__name__}")
    for item in answer:
        if not isinstance(item, kind.type):
            raise TypeError(f"{hook} returned a {type(item).__name__} among its {kind.type.__name__}s")
        _check_words(hook, item)
    names = [name_of(item) for item in answer]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{hook} declares {', '.join(twice)} twice")
    return answer


def _check_words(hook: str, item: Any) -> None:
    pairs: list[tuple[str, str, Sequence[str]]] = []
    if isinstance(item, KernelImpl):
        pairs = [*(("device", word, DEVICES) for word in item.devices), *(("dtype", word, DTYPES) for word in item.dtypes)]
    elif isinstance(item, ParallelStrategy):
        pairs = [("stage", item.stage, STAGES)]
    for what, word, known in pairs:
        if word not in known:
            raise ValueError(f"{hook}: {name_of(item)} names the unknown {what} {word!r}. {nearest(word, known)}")


def check_markers(plugin: object, manager: pluggy.PluginManager) -> None:
    """Raise ValueError for a function that is named like a hook and lacks the marker (pluggy would overlook it), and for a wrapper."""
    callers = manager.get_hookcallers(plugin) or ()
    marked = {caller.name for caller in callers}
    unmarked = sorted(n for n in vars(plugin) if n.startswith("gem_") and inspect.isroutine(getattr(plugin, n)) and n not in marked)
    if unmarked:
        raise ValueError(f"{', '.join(unmarked)} lacks the @hookimpl marker of gem_core.spec")
    wrappers = sorted(c.name for c in callers if any(i.plugin is plugin and (i.wrapper or i.hookwrapper) for i in c.get_hookimpls()))
    if wrappers:
        raise ValueError(f"{', '.join(wrappers)} is a wrapper: hooks of this project cannot be wrapped")


def load_owned(path: str, what: str, owner: str) -> Callable[..., Any]:
    """Import ``module:attribute`` that a plugin named.

    Raises:
        PluginError: it cannot be imported; ``owner`` is named. A GemError raised by the import passes through.
    """
    try:
        loaded: Callable[..., Any] = load_object(path)
    except GemError:
        raise
    except Exception as error:
        raise PluginError(
            what, f"{path} of {owner} cannot be loaded: {type(error).__name__}: {error}", "`gem doctor` checks the installation."
        ) from error
    return loaded
