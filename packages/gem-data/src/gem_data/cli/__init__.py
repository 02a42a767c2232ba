"""``gem data``: each sub-command stands in a file of its own and is registered here."""

import typer

from gem_data.cli.balance import balance_command
from gem_data.cli.convert import convert_command
from gem_data.cli.fetch import fetch_command, list_command
from gem_data.cli.generate import generate_command
from gem_data.cli.inspect import inspect_command
from gem_data.cli.known import app as known_app
from gem_data.cli.prepare import audit_command, prepare_command

app = typer.Typer(no_args_is_help=True, help="Fetch, inspect, convert and prepare data sets; list data sources.")
app.command("fetch")(fetch_command)
app.command("list")(list_command)
app.command("generate")(generate_command)
app.command("prepare")(prepare_command)
app.command("audit")(audit_command)
app.command("convert")(convert_command)
app.command("inspect")(inspect_command)
app.command("balance")(balance_command)
app.add_typer(known_app, name="known")
