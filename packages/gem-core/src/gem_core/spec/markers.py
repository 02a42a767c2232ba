"""The pluggy project that every plugin of the trainer belongs to."""

import pluggy

PROJECT = "gem"
ENTRY_POINT_GROUP = "gem_core.plugins"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
