"""``gem recipes``: the configurations that are shipped."""

from typing import Annotated

import typer

from gem_core.cli.lazy import NearestGroup
from gem_core.cli.output import print_json, print_table
from gem_core.config.load import recipes

app = typer.Typer(cls=NearestGroup, help="The configurations that are shipped.", add_completion=False)


@app.callback()
def group() -> None:
    """The configurations that are shipped."""


@app.command("list")
def list_(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Every recipe, by the name that ``gem train -c`` takes."""
    rows = [{"name": name, "summary": summary_of(text)} for name, text in recipes().items()]
    if json:
        print_json(rows)
        return
    print_table(("RECIPE", "SUMMARY"), [(row["name"], row["summary"]) for row in rows])


def summary_of(text: str) -> str:
    """The comment that a recipe begins with, as one line."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# ").strip())
    return " ".join(lines)
