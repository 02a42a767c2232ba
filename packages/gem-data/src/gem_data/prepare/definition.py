"""The definition of a preparation: which tables there are, whose histories a row gets, what is a positive, how rows are split."""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gem_core.spec import RequestError
from gem_data.prepare.where import Condition
from gem_data.schema import Schema, read_schema
from gem_data.splits import HashSplit, LeaveLastSplit, Split, TimeSplit, UserFractionSplit

Name = Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9_\-]+$")]
Seconds = Annotated[int, Field(strict=True, ge=0)]
Fraction = Annotated[float, Field(strict=True, gt=0, lt=1)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Table(Strict):
    """A raw table: one file, or several that are read one after the other (periods of a log); every row of each is kept.

    Args:
        path: file or files, or addresses that fsspec knows; patterns with ``*``; relative paths start from the definition's folder.
        user: column of the user; histories, delayed labels and splits by user need it.
        time: column of the time: integers, floats or timestamps. Without it rows count as being in the order of time.
        unit: of a number in that column. Times are compared in whole seconds, rounded down; finer digits order events within a second.
        scan: further arguments of ``gem_data.formats.scan``, such as ``separator`` or ``encoding``.
    """

    path: str | tuple[str, ...]
    user: str | None = None
    time: str | None = None
    unit: Literal["s", "ms", "us", "ns"] = "s"
    scan: dict[str, Any] = {}

    def files(self, folder: Path) -> list[str]:
        """Paths and addresses in the order given; relative paths start from ``folder``."""
        given = (self.path,) if isinstance(self.path, str) else self.path
        return [path if "://" in path else str(folder / path) for path in given]


class Impressions(Strict):
    """The table that training rows come from, one for each of its rows.

    Args:
        share_histories: rows of one user and request share the history at the first of them; needs ``request`` in the schema.
    """

    table: Name
    share_histories: bool = False


class History(Strict):
    """Fills one ``[[sequence]]`` of the schema with a user's events before the impression.

    Args:
        name: the sequence of the schema.
        table: the table of the events.
        where: which of its rows are events; all by default.
        columns: for features whose column in this table is not the one that the schema names, by default the feature's name.
        last: the most recent events kept; by default ``max_length`` of the sequence, or all where it truncates otherwise than by newest.
        window: seconds before the impression from which events count; by default all.
        lag: an event counts when its time < time of the impression - lag; 0 means strictly earlier.
    """

    name: str
    table: Name
    where: tuple[Condition, ...] = ()
    columns: dict[str, str] = {}
    last: Annotated[int, Field(strict=True, ge=1)] | None = None
    window: Annotated[int, Field(strict=True, ge=1)] | None = None
    lag: Seconds = 0


class Positive(Strict):
    """A label from the impression's own row: 1 where all conditions hold, 0 elsewhere, unknown where a value is missing."""

    task: str
    where: Annotated[tuple[Condition, ...], Field(min_length=1)]


class Conversion(Strict):
    """A delayed label: 1 where an event with equal ``match`` columns comes at or after the impression, ``within`` seconds at most.

    A label whose window ends after the end of the log is masked, whatever was seen of it. Each impression in the window is credited.

    Args:
        match: columns that the impression and the event have in common, besides the user.
        end: the last second that the log covers; by default the latest time in the event table.
    """

    task: str
    table: Name
    where: tuple[Condition, ...] = ()
    match: tuple[str, ...] = ()
    within: Seconds
    end: Annotated[int, Field(strict=True)] | None = None


class Side(Strict):
    """Columns of a table about users, items or anything else, joined to each impression; impressions without a match keep their row.

    Args:
        on: the key columns, called alike in both tables.
        columns: what is taken.
        as_of: the table has several rows a key, each from its own time on; the last one strictly before the impression is taken.
    """

    table: Name
    on: tuple[str, ...] = Field(min_length=1)
    columns: tuple[str, ...] = Field(min_length=1)
    as_of: bool = False


class Sampling(Strict):
    """Negatives of one task are kept with probability ``keep``, by a stable hash of the row, in the training split only."""

    task: str
    keep: Fraction
    seed: Annotated[int, Field(strict=True, ge=0)] = 0


class Definition(Strict):
    """See docs/data/prepare.md for an example of each part."""

    schema_file: str = Field(alias="schema")
    tables: dict[Name, Table]
    impressions: Impressions
    histories: tuple[History, ...] = ()
    positives: tuple[Positive, ...] = ()
    conversions: tuple[Conversion, ...] = ()
    sides: tuple[Side, ...] = ()
    split: Split = TimeSplit(kind="time", test_fraction=0.1)
    sampling: Sampling | None = None

    @model_validator(mode="after")
    def _tables_fit(self) -> "Definition":
        parts: list[Impressions | History | Conversion | Side] = [self.impressions, *self.histories, *self.conversions, *self.sides]
        for part in parts:
            if part.table not in self.tables:
                raise ValueError(f"table {part.table!r} is not among the [tables]: {', '.join(self.tables)}")
            for column in self._needs(part):
                if getattr(self.tables[part.table], column) is None:
                    raise ValueError(f"table {part.table!r} gives no `{column}` column, but {type(part).__name__.lower()} needs one")
        unused = sorted(set(self.tables) - {part.table for part in parts})
        if unused:
            raise ValueError(f"table {unused[0]!r} is used by nothing")
        return self

    def _needs(self, part: Impressions | History | Conversion | Side) -> list[str]:
        """Columns without which a part means nothing."""
        if isinstance(part, Side):
            return ["time"] if part.as_of else []
        if isinstance(part, History | Conversion) or self.histories or self.conversions:
            return ["user", "time"]
        split, moment = self.split, isinstance(self.split, TimeSplit) and self.split.test_from is not None
        by_user = isinstance(split, UserFractionSplit | LeaveLastSplit) or (isinstance(split, HashSplit) and split.by == "user")
        timed = moment or any(side.as_of for side in self.sides)
        return [*(["user"] if by_user else []), *(["time"] if timed else [])]


def read_definition(path: Path) -> tuple[Definition, Schema]:
    """The definition in a TOML file, and the schema that it names.

    Raises:
        RequestError: a file is missing or no TOML, or the definition is wrong or at odds with the schema.
    """
    asked = f"definition {path}"
    try:
        definition = Definition.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise RequestError(asked, f"it cannot be read ({error})", "Check the path.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RequestError(asked, f"it is no TOML ({error})", "Repair the file.") from error
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(str(part) for part in e['loc'])}: {e['msg'].removeprefix('Value error, ')}" for e in error.errors())
        raise RequestError(asked, faults, "Repair the definition; docs/data/prepare.md lists every key.") from error
    schema = read_schema(path.parent / definition.schema_file)
    for so in disagreements(definition, schema):
        raise RequestError(asked, so, f"Repair the definition, or {definition.schema_file}.")
    return definition, schema


def disagreements(definition: Definition, schema: Schema) -> list[str]:
    """What the definition says that the schema contradicts."""
    out: list[str] = []
    sequences, histories = {s.name for s in schema.sequence}, [h.name for h in definition.histories]
    out += [f"history {name!r} is given twice" for name in sorted({n for n in histories if histories.count(n) > 1})]
    out += [f"history {name!r} is no [[sequence]] of the schema" for name in histories if name not in sequences]
    out += [f"the schema's sequence {name!r} has no [[histories]]" for name in sorted(sequences - set(histories))]
    tasks = {t.name for t in schema.task}
    made = [*(p.task for p in definition.positives), *(c.task for c in definition.conversions)]
    out += [f"task {name!r} gets its label twice" for name in sorted({n for n in made if made.count(n) > 1})]
    sampled = [] if definition.sampling is None else [definition.sampling.task]
    out += [f"task {name!r} is no [[task]] of the schema" for name in [*made, *sampled] if name not in tasks]
    if not tasks:
        out.append("the schema has no [[task]]")
    if definition.impressions.share_histories and schema.request is None:
        out.append("share_histories needs `request` in the schema")
    if definition.split.kind == "hash" and definition.split.by == "request" and schema.request is None:
        out.append("a split by request needs `request` in the schema")
    given = [c for side in definition.sides for c in side.columns]
    used = {f.column or f.name for f in (*schema.id, *schema.multi_id, *schema.number, *schema.embedding)} | {f.weights for f in schema.multi_id}
    out += [f"column {name!r} is taken from two side tables" for name in sorted({c for c in given if given.count(c) > 1})]
    out += [f"column {name!r} of a side table is used by no feature of the schema" for name in given if name not in used]
    for history in definition.histories:
        features = {f.name for s in schema.sequence if s.name == history.name for f in (*s.id, *s.number)}
        out += [
            f"history {history.name!r} gives a column for {name!r}, which its sequence has not" for name in history.columns if name not in features
        ]
    return out
