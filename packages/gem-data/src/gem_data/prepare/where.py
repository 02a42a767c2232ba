"""Filters of a definition: conditions ``[column, operator, value]`` that must all hold, turned into SQL that every engine reads alike."""

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator

Scalar = bool | int | float | str
Operator = Literal["==", "!=", "<", "<=", ">", ">=", "in"]


def _check(value: object) -> object:
    match value:
        case [str(), "in", list() | tuple() as options] if options and all(isinstance(o, Scalar) for o in options):
            return (value[0], "in", tuple(options))
        case [str(), "==" | "!=" | "<" | "<=" | ">" | ">=", bool() | int() | float() | str()]:
            return tuple(value)
    raise ValueError(f'{value!r} is no condition; write ["column", "==", 1] with ==, !=, <, <=, >, >=, or ["column", "in", [1, 2]]')


Condition = Annotated[tuple[str, Operator, Scalar | tuple[Scalar, ...]], BeforeValidator(_check)]
Where = tuple[tuple[str, Operator, Scalar | tuple[Scalar, ...]], ...]


def quote(name: str) -> str:
    """A column name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: Scalar) -> str:
    """A value in SQL: booleans as the numbers that staged columns hold, text without the signs that dialects escape differently."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, str):
        parts = [f"chr({ord(part)})" if part in ("'", "\\") else f"'{part}'" for part in re.split(r"(['\\])", value)]
        return parts[0] if len(parts) == 1 else f"concat({', '.join(parts)})"
    return f"CAST({value!r} AS DOUBLE)" if isinstance(value, float) else str(value)


def sql(where: Where) -> str:
    """The conjunction; a missing value makes it unknown, as SQL does."""
    parts = []
    for column, operator, value in where:
        if isinstance(value, tuple):
            parts.append(f"{quote(column)} IN ({', '.join(literal(v) for v in value)})")
        else:
            parts.append(f"{quote(column)} {'=' if operator == '==' else '<>' if operator == '!=' else operator} {literal(value)}")
    return " AND ".join(parts) or "TRUE"
