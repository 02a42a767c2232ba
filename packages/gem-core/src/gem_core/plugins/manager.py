"""The plugin host: registers plugins with pluggy, collects their declarations with owners, and sends guarded notices."""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pluggy

from gem_core.plugins import kinds
from gem_core.plugins.loader import CORE, LoadedPlugin, check_required, load_plugins, trace, tracing
from gem_core.plugins.nearest import nearest
from gem_core.plugins.options import as_keywords, parse
from gem_core.spec import PROJECT, PluginError, hooks

log = logging.getLogger("gem_core.plugins")

Owned = tuple[LoadedPlugin, Any]


class PluginHost:
    """Owns a pluggy manager and knows who declared what.

    Registration hooks are called once, plugin by plugin, when the first declaration is asked for; ``gem_cli_commands`` when the first sub-command is.
    A plugin whose hook raises or answers nonsense counts as failed as a whole: it is logged, listed by ``gem plugins list``, and gives nothing.

    Args:
        plugins: what the loader found; None loads now.
    """

    def __init__(self, plugins: Sequence[LoadedPlugin] | None = None) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(hooks)
        self._plugins: list[LoadedPlugin] = []
        self._declared: dict[str, list[Owned]] = {}
        self._muted: set[str] = set()
        if tracing():
            self._manager.add_hookcall_monitoring(lambda *_: None, _trace_call)
        for plugin in load_plugins() if plugins is None else plugins:
            if plugin.status in ("failed", "clash"):
                _warn(plugin)
            self._plugins.append(self._register(plugin) if plugin.status == "loaded" else plugin)

    @property
    def plugins(self) -> tuple[LoadedPlugin, ...]:
        """Every entry point found, core's own first, with what became of it."""
        return tuple(self._plugins)

    def require(self, names: Collection[str]) -> None:
        """Insist on plugins by name; with automatic loading off this loads them.

        Raises:
            PluginError: one is unknown (the nearest is offered), blocked, clashing or failing.
        """
        waiting = {p.name for p in self._plugins if p.status == "blocked" and p.name in names}
        if waiting:
            late = [p for p in load_plugins(required=names) if p.name in waiting]
            self._plugins = [next((self._register(q) for q in late if q.name == p.name), p) for p in self._plugins]
            self._declared.clear()
        self._declarations()
        check_required(names, self._plugins)

    def collect(self, hook: str) -> list[Owned]:
        """``(owner, declaration)`` of a registration hook, plugin by plugin."""
        if hook == "gem_cli_commands":
            if hook not in self._declared:
                self._sweep([hook])
        else:
            self._declarations()
        return list(self._declared[hook])

    def names(self, kind: str) -> list[str]:
        """Sorted names declared for a kind of ``gem_core.plugins.kinds.KINDS``."""
        return sorted({kinds.name_of(declaration) for _, declaration in self.collect(kinds.hook_of(kind))})

    def get(self, kind: str, name: str) -> Owned:
        """``(owner, declaration)`` of that name.

        Raises:
            PluginError: nobody declares it (the nearest name is offered), or two plugins do (both are named).
        """
        hook = kinds.hook_of(kind)
        found = [(owner, d) for owner, d in self.collect(hook) if kinds.name_of(d) == name]
        asked = f"{kinds.KINDS[kind].noun} {name!r}"
        if not found:
            failed = [f"{p.name} ({p.error})" for p in self._plugins if p.status in ("failed", "clash")]
            hint = f" Plugins that did not load: {'; '.join(failed)}." if failed else ""
            raise PluginError(asked, "no loaded plugin declares it", nearest(name, self.names(kind)) + hint)
        if len(found) > 1:
            owners = " and ".join(f"{owner.name} ({owner.owner})" for owner, _ in found)
            raise PluginError(asked, f"declared by {owners}", "Block one of the two: GEM_PLUGINS_BLOCK=NAME.")
        return found[0]

    def declaration(self, kind: str, name: str) -> Any:
        """The declaration of that name; PluginError as for ``get``."""
        return self.get(kind, name)[1]

    def options(self, kind: str, name: str, options: dict[str, Any] | None = None) -> Any:
        """The validated options: the declaration's pydantic model, or the mapping itself where it declares none.

        Raises:
            RequestError: an unknown or badly typed option.
        """
        model = self.options_model(kind, name)
        return dict(options or {}) if model is None else parse(model, options or {}, f"options of {kinds.KINDS[kind].noun} {name!r}")

    def options_model(self, kind: str, name: str) -> Any:
        """The pydantic model that a declaration names for its options, None where it names none; PluginError as for ``load``."""
        owner, declaration = self.get(kind, name)
        if declaration.options is None:
            return None
        return kinds.load_owned(declaration.options, f"options of {kinds.KINDS[kind].noun} {name!r}", owner.owner)

    def build(self, kind: str, name: str, options: dict[str, Any] | None = None, /, *args: Any, **keywords: Any) -> Any:
        """Load what is declared and call it: ``load(*args, **keywords, **options)``; a model is called ``load(*args, options, **keywords)``.

        Raises:
            PluginError: as for ``get``, or the implementation fails to import (the owner is named).
            RequestError: an unknown or badly typed option.
        """
        checked = self.options(kind, name, options)
        implementation = self.load(kind, name)
        if kind == "models":
            return implementation(*args, checked, **keywords)
        return implementation(*args, **keywords, **as_keywords(name, implementation, checked, keywords))

    def load(self, kind: str, name: str) -> Callable[..., Any]:
        """Import the implementation of a declaration.

        Raises:
            PluginError: the module or attribute does not exist; the owner is named. Errors a user can act on pass through unchanged.
        """
        owner, declaration = self.get(kind, name)
        return kinds.load_owned(declaration.load, f"{kinds.KINDS[kind].noun} {name!r}", owner.owner)

    def first(self, hook: str, **keywords: Any) -> Owned | None:
        """The first answer that is not None, strangers by name before core's own, with its owner.

        Raises:
            PluginError: a plugin's hook raises; the owner is named.
        """
        for plugin in sorted(self._plugins, key=lambda plugin: plugin.name == CORE):
            if hook not in plugin.hooks:
                continue
            try:
                answer = self._call(plugin, hook, keywords)
            except Exception as error:
                raise PluginError(
                    f"hook {hook}", f"plugin {plugin.name} ({plugin.owner}) raised {error!r}", f"Report it to {plugin.distribution}."
                ) from error
            if answer is not None:
                return plugin, answer
        return None

    def notify(self, hook: str, /, **keywords: Any) -> None:
        """Tell every plugin; one that raises is logged with its owner and hears no more of this run (``gem_run_started`` begins a new one)."""
        if hook == "gem_run_started":
            self._muted.clear()
        for plugin in self._plugins:
            if hook not in plugin.hooks or plugin.name in self._muted:
                continue
            try:
                self._call(plugin, hook, keywords)
            except Exception:  # a listener's bug must not stop the training run
                self._muted.add(plugin.name)
                log.exception("plugin %s (%s) raised in %s and hears no more of this run", plugin.name, plugin.owner, hook)

    def _register(self, plugin: LoadedPlugin) -> LoadedPlugin:
        try:
            self._manager.register(plugin.plugin, name=plugin.name)
            self._manager.check_pending()
            kinds.check_markers(plugin.plugin, self._manager)
        except (pluggy.PluginValidationError, ValueError) as error:
            return self._fail(plugin, str(error))
        names = sorted(caller.name for caller in self._manager.get_hookcallers(plugin.plugin) or ())
        return replace(plugin, hooks=tuple(names))

    def _fail(self, plugin: LoadedPlugin, error: str) -> LoadedPlugin:
        failed = replace(plugin, status="failed", error=error, plugin=None, hooks=())
        _warn(failed)
        if self._manager.has_plugin(plugin.name):
            self._manager.unregister(name=plugin.name)
        return failed

    def _declarations(self) -> None:
        if "gem_models" not in self._declared:
            self._sweep([kind.hook for kind in kinds.KINDS.values() if kind.hook != "gem_cli_commands"])

    def _sweep(self, names: Sequence[str]) -> None:
        """Call these registration hooks; what a plugin declares counts only when all of its answers are sound."""
        declared: dict[str, list[Owned]] = {hook: [] for hook in names}
        for i, plugin in enumerate(self._plugins):
            try:
                answers = {hook: kinds.checked(hook, self._call(plugin, hook, {})) for hook in names if hook in plugin.hooks}
            except Exception as error:  # one broken plugin must not hide the others; it is logged and listed as failed
                self._plugins[i] = self._fail(plugin, f"{type(error).__name__} in a registration hook: {error}")
                self._declared = {hook: [o for o in owned if o[0].name != plugin.name] for hook, owned in self._declared.items()}
                continue
            for hook, answer in answers.items():
                declared[hook] += [(plugin, declaration) for declaration in answer]
        self._declared.update(declared)

    def _call(self, plugin: LoadedPlugin, hook: str, keywords: dict[str, Any]) -> Any:
        others = [p.plugin for p in self._plugins if p.plugin is not None and p.name != plugin.name]
        caller = self._manager.subset_hook_caller(hook, others)
        answer = caller(**keywords)
        if caller.spec is not None and caller.spec.opts.get("firstresult"):
            return answer
        return answer[0] if answer else None  # pluggy drops None from its list of answers


def _warn(plugin: LoadedPlugin) -> None:
    log.warning("plugin %s (%s) is left out: %s", plugin.name, plugin.owner, plugin.error)


def _trace_call(outcome: pluggy.Result[Any], hook_name: str, hook_impls: Sequence[pluggy.HookImpl], keywords: Any) -> None:
    owners = ", ".join(impl.plugin_name for impl in hook_impls)
    trace(f"{hook_name}({', '.join(keywords)}) of {owners} -> {outcome.exception or outcome.get_result()!r}")


@cache
def host() -> PluginHost:
    """The host of this process, made on first use."""
    return PluginHost()


def reset_host() -> None:
    """Forget the process-wide host, so that the next use finds plugins afresh. For tests."""
    host.cache_clear()
