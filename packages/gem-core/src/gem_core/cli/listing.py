"""The table of ``gem plugins list``, without typer: this command has a budget of 0.3 seconds."""

from gem_core.cli.output import print_json, print_table
from gem_core.plugins.manager import host
from gem_core.plugins.report import plugin_rows


def print_plugins(*, json: bool) -> None:
    """Print every plugin found, loaded or not, and the hooks it fills or why it is not loaded."""
    rows = plugin_rows(host())
    if json:
        print_json(rows)
        return
    cells = [(r["name"], f"{r['distribution']} {r['version']}", r["status"], r["error"] or _short(r["hooks"])) for r in rows]
    print_table(("PLUGIN", "FROM", "STATUS", "HOOKS"), cells)


def _short(hooks: list[str]) -> str:
    return ", ".join(hook.removeprefix("gem_") for hook in hooks)
