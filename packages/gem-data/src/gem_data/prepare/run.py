"""``prepare``: from a definition to a prepared folder that appears whole or not at all."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
from numpy.typing import NDArray

from gem_core.spec import MachineError, RequestError
from gem_data.ids import encoders
from gem_data.prepare.columns import check_types, needed
from gem_data.prepare.definition import read_definition
from gem_data.prepare.engine import DuckEngine, Engine
from gem_data.prepare.events import write_events
from gem_data.prepare.histories import count_events, make_events, span_rows
from gem_data.prepare.labels import label_rows
from gem_data.prepare.leakage import check_leakage
from gem_data.prepare.output import impression_columns, prepared_schema
from gem_data.prepare.placing import place_rows
from gem_data.prepare.plan import Plan, raw
from gem_data.prepare.sides import final_rows, join_sides
from gem_data.prepare.stage import Staged, stage
from gem_data.prepare.summary import summary_of
from gem_data.prepare.vocabularies import write_vocabularies
from gem_data.prepare.writer import SplitWriter
from gem_data.schema import write_schema
from gem_data.splits import warn_about

SPLITS = ("train", "test")
RAW = "raw"
"""Folder of the staged tables."""
Report = Callable[[str], None]


def prepare(
    definition_file: Path, out: Path, *, engine: str = "duckdb", memory: int = 4 * 2**30, report: Report = lambda step: None
) -> dict[str, Any]:
    """Prepare a folder; returns the content of its ``data.json``.

    Everything is written beside ``out`` and renamed at the end. A run that was killed or had too little memory leaves the raw tables behind that it
    has read whole; the next one takes them over if nothing has changed, and removes the rest.

    Args:
        definition_file: TOML, see ``gem_data.prepare.definition``.
        out: the folder to make; it must not exist.
        engine: ``duckdb`` on this machine, or ``spark``, whose session is that of the environment.
        memory: bytes for the whole process with DuckDB; larger data goes through disk beside ``out``.
        report: called with each step as it begins.

    Raises:
        RequestError: the definition, the schema or the data are not as they have to be, or ``out`` exists.
        RunFailed: the leakage check found an event that is not before its impression.
        MachineError: the memory does not suffice, or the engine is not installed.
    """
    definition, schema = read_definition(definition_file)
    if out.exists():
        raise RequestError(f"output folder {out}", "it exists", "Name a new folder, or remove that one first.")
    with _partial(out) as (folder, work):
        plan = Plan(definition, schema)
        report("reading the raw tables")
        columns = needed(plan)
        staged = {name: stage(name, table, columns[name], definition_file.parent, work / RAW) for name, table in definition.tables.items()}
        if before := [name for name, table in staged.items() if table.taken_over]:
            report(f"read by the run before: {', '.join(before)}")
        check_types(plan, staged)
        running = make_engine(engine, work, memory)
        try:
            for name, table in staged.items():
                running.register(raw(name), table.path)
            content = _run(running, plan, staged, folder, work, report)
        except duckdb.OutOfMemoryException as error:
            so = f"it does not suffice ({str(error).splitlines()[0]})"
            raise MachineError(f"memory of {memory:,} bytes", so, "Give more with --memory; what has been read is kept.") from error
        finally:
            running.close()
        shutil.rmtree(work)
        report("checking for leakage")
        lags = {h.name: h.lag for h in definition.histories}
        written = prepared_schema(plan, content.pop("rows"))
        content["leakage"] = check_leakage(folder, written, content["splits"], lags)
        write_schema(written, folder / "schema.toml")
        (folder / "data.json").write_text(json.dumps(content, indent=1))
    return content


@contextmanager
def _partial(out: Path) -> Iterator[tuple[Path, Path]]:
    """A fresh folder that becomes ``out`` when the block ends well, and a folder in it for what is not kept."""
    folder = out.parent / f".{out.name}.partial"
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise RequestError(f"output folder {out}", "another process is preparing it", "Wait for it, or name another folder.") from error
    work = folder / "work"
    try:
        _clear(folder, work)
        (work / RAW).mkdir(parents=True, exist_ok=True)
        yield folder, work
        os.rename(folder, out)
    except MachineError:  # asked again with more memory, it need not read the raw tables again
        _clear(folder, work)
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(handle)


def _clear(folder: Path, work: Path) -> None:
    """Remove everything but the staged tables."""
    for left in [*folder.iterdir(), *(work.iterdir() if work.exists() else ())]:
        if left not in (work, work / RAW):
            shutil.rmtree(left) if left.is_dir() else left.unlink()


def make_engine(name: str, work: Path, memory: int) -> Engine:
    """The engine of that name; RequestError if there is none."""
    if name == "duckdb":
        (work / "engine").mkdir()
        return DuckEngine(work / "engine", memory // 2)
    if name == "spark":
        from gem_data.prepare.spark import SparkEngine

        return SparkEngine(work)
    raise RequestError(f"engine {name!r}", "the engines are duckdb and spark", "Name one of them.")


def check_splits(engine: Engine) -> None:
    """RequestError where a split has no row."""
    counts = dict.fromkeys(SPLITS, 0) | dict(engine.rows("SELECT gem_split, COUNT(*) FROM kept GROUP BY gem_split"))
    for split, rows in counts.items():
        if not rows:
            so = f"it has no row; rows are {counts}"
            raise RequestError(f"split {split!r}", so, "Check [split] in the definition, and that users, times and labels are filled in.")


def _run(engine: Engine, plan: Plan, staged: dict[str, Staged], folder: Path, work: Path, report: Report) -> dict[str, Any]:
    report("labels")
    label_rows(engine, plan)
    report("splits")
    moment = place_rows(engine, plan)
    check_splits(engine)
    join_sides(engine, plan)
    report("histories")
    make_events(engine, plan)
    count_events(engine, plan)
    span_rows(engine, plan)
    report("vocabularies")
    write_vocabularies(engine, plan, folder)
    encode = encoders(plan.schema, folder)
    report("events")
    logs = [write_events(engine, plan, h, encode, work) for h in range(len(plan.groups))]
    seen: dict[str, NDArray[np.bool_]] = {}
    summaries = {}
    for split in SPLITS:
        report(f"writing {split}")
        writer = SplitWriter(folder, split, plan, encode, logs, seen)
        for batch in engine.stream(final_rows(plan, split, impression_columns(plan.schema))):
            writer.write(batch)
        summaries[split] = writer.close()
    report("counting")
    content = summary_of(engine, plan, staged, summaries, moment)
    warn_about(content)
    return content | {"rows": {key: e.cardinality for key, e in encode.items()}}
