"""``gem plugins``: what is installed."""

from typing import Annotated

import typer

from gem_core.cli.lazy import NearestGroup
from gem_core.cli.listing import print_plugins
from gem_core.cli.output import print_json, print_table
from gem_core.plugins.manager import host
from gem_core.plugins.nearest import nearest
from gem_core.plugins.report import declared_by, plugin_rows
from gem_core.spec import PluginError

app = typer.Typer(cls=NearestGroup, help="What is installed: plugins and what each one declares.", add_completion=False)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_(json: Json = False) -> None:
    """Every plugin found, loaded or not."""
    print_plugins(json=json)


@app.command()
def show(name: Annotated[str, typer.Argument(help="The plugin's name.")], json: Json = False) -> None:
    """One plugin: where it comes from and everything it declares."""
    rows = [row for row in plugin_rows(host()) if row["name"] == name]
    if not rows:
        raise PluginError(f"plugin {name!r}", "no installed distribution declares it", nearest(name, [p.name for p in host().plugins]))
    declared = declared_by(host(), name)
    if json:
        print_json([{**row, "declares": declared} for row in rows])
        return
    for row in rows:
        print_table(("KEY", "VALUE"), [(key, ", ".join(value) if isinstance(value, list) else value) for key, value in row.items() if value])
    print()
    print_table(("KIND", "NAME", "SUMMARY"), [(kind, item["name"], item["summary"]) for kind, items in declared.items() for item in items])
