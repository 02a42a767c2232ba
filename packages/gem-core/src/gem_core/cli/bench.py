"""``gem bench``: what this machine does in a second. Plugins add commands. Imports no torch until a command runs."""

import typer

from gem_core.cli.bench_breakdown import breakdown
from gem_core.cli.bench_layers import layers
from gem_core.cli.bench_step import step
from gem_core.cli.lazy import SharedGroup

app = typer.Typer(cls=SharedGroup, add_completion=False)


@app.callback()
def bench() -> None:
    """Measure this machine."""


app.command("layers")(layers)
app.command("step")(step)
app.command("breakdown")(breakdown)
