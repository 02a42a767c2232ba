"""``gem config``: every value of a run with its origin, and the JSON schema."""

from typing import Annotated

import typer

from gem_core.cli.lazy import NearestGroup
from gem_core.cli.output import print_json, print_table
from gem_core.config import show as showing
from gem_core.config.load import load_config
from gem_core.config.resolve import resolved
from gem_core.plugins.manager import host

app = typer.Typer(cls=NearestGroup, help="Every value of a configuration with its origin; the JSON schema.", add_completion=False)


@app.command()
def show(
    config: Annotated[str, typer.Option("--config", "-c", help="A TOML file, or the name of a recipe.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="PATH=VALUE; may be repeated.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Every value, plugins' options included, and where it comes from."""
    loaded = load_config(config, overrides or [])
    host().require(loaded.config.plugins.require)
    full = resolved(loaded, host())
    if json:
        print_json({"config": full.config.model_dump(mode="json"), "origins": full.origins})
        return
    print_table(("KEY", "VALUE", "FROM"), showing.rows(full))


@app.command()
def schema() -> None:
    """The JSON schema of a configuration file, plugins' options included; editors complete TOML with it."""
    print_json(showing.schema(host()))
