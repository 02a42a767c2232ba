"""Reading and writing ``schema.toml``."""

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from gem_core.spec import RequestError
from gem_data.schema.declare import Embedding, Id, MultiId, Number, Schema, Sequence, Task

KINDS: dict[str, type[BaseModel]] = {"id": Id, "multi_id": MultiId, "number": Number, "embedding": Embedding, "sequence": Sequence, "task": Task}


def read_schema(path: Path) -> Schema:
    """The schema in a TOML file.

    Raises:
        RequestError: the file is missing or no TOML, or the schema is wrong; every fault is named by its place.
    """
    asked = f"schema {path}"
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RequestError(asked, "there is no such file", "Check the path, or let `gem data inspect FILE --out schema.toml` propose one.") from error
    except OSError as error:
        raise RequestError(asked, f"it cannot be read ({error})", "Check the path.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RequestError(asked, f"it is no TOML ({error})", "Repair the file.") from error
    return parse_schema(content, asked)


def parse_schema(content: Mapping[str, Any], asked: str = "schema") -> Schema:
    """The schema in the content of a TOML file; RequestError as ``read_schema``."""
    try:
        return Schema.model_validate(dict(content))
    except ValidationError as error:
        faults = [_fault(entry["loc"], entry["type"], entry["msg"]) for entry in error.errors()]
        raise RequestError(asked, "; ".join(faults), "Repair the schema; docs/data/schema.md lists every key.") from error


def write_schema(schema: Schema, path: Path) -> None:
    """Write the file that ``read_schema`` reads back as an equal schema; values that are defaults are left out."""
    path.write_text("\n".join(_sections("", schema.model_dump(mode="json", exclude_defaults=True))), encoding="utf-8")


def _sections(prefix: str, content: Mapping[str, Any]) -> list[str]:
    """Scalars first, then each entry of a list of tables under its own ``[[heading]]``."""
    plain = {key: value for key, value in content.items() if not isinstance(value, list)}
    out = [tomli_w.dumps(plain)] if plain else []
    for key, entries in content.items():
        if isinstance(entries, list):
            for entry in entries:
                first, *rest = _sections(f"{prefix}{key}.", entry)
                out += [f"[[{prefix}{key}]]\n{first}", *rest]
    return out


def _fault(place: tuple[int | str, ...], kind: str, message: str) -> str:
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    if kind == "extra_forbidden":
        return f"{where} is no key of a schema{_nearest(place)}"
    return f"{where}: {message}" if where else message.removeprefix("Value error, ")


def _nearest(place: tuple[int | str, ...]) -> str:
    """The known key that the last part of ``place`` most resembles."""
    kinds = [part for part in place[:-1] if isinstance(part, str)]
    model = KINDS[kinds[-1]] if kinds else Schema
    close = difflib.get_close_matches(str(place[-1]), model.model_fields, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; keys here are {', '.join(model.model_fields)}"
