"""Finding, loading and asking plugins. Imports no torch."""

from gem_core.plugins.loader import LoadedPlugin, load_plugins
from gem_core.plugins.manager import PluginHost, host, reset_host

__all__ = ["LoadedPlugin", "PluginHost", "host", "load_plugins", "reset_host"]
