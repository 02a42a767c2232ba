"""Staged tables that a run finished and did not live to use: the next run takes them over when nothing that they were made from has changed."""

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gem_data.formats.files import Location
from gem_data.partial import written_whole
from gem_data.prepare.definition import Table

CHANGES = ("mtime", "ETag", "etag", "LastModified", "last_modified", "updated", "md5Hash", "content-md5")
"""What file systems call that which is another after a file was written again."""


def made_from(table: Table, columns: Sequence[str], places: Sequence[Location]) -> str | None:
    """Everything that a staged table depends on, as text; None where a file system does not tell whether a file has changed."""
    files = [_identity(place) for place in places]
    if None in files:
        return None
    about = {"gem-data": version("gem-data"), "table": table.model_dump(mode="json"), "columns": list(columns), "files": files}
    return json.dumps(about, sort_keys=True)


def _identity(place: Location) -> list[Any] | None:
    facts = place.system.info(place.path)
    known = {name: str(facts[name]) for name in CHANGES if facts.get(name) is not None}
    return [place.address, facts.get("size"), known] if known else None


def kept(path: Path, source: str | None) -> dict[str, int] | None:
    """Dropped lines by reason of the staged table ``path`` if it is whole and was made from ``source``, else None."""
    note = path.with_suffix(".json")
    if source is None or not (path.exists() and note.exists()):
        return None
    said = json.loads(note.read_text(encoding="utf-8"))
    return dict(said["dropped"]) if said["source"] == source else None


def keep(path: Path, source: str | None, dropped: dict[str, int]) -> None:
    """Say of the staged table ``path``, which is whole, what it was made from."""
    with written_whole(path.with_suffix(".json")) as partial:
        partial.write_text(json.dumps({"source": source, "dropped": dropped}), encoding="utf-8")


def forget(path: Path) -> None:
    """Take back what was said of a staged table, before it is written again."""
    path.with_suffix(".json").unlink(missing_ok=True)
