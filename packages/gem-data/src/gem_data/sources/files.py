"""The source ``files``: a prepared folder, or a user's own Parquet, ORC or Arrow IPC files with a ``schema.toml`` beside them."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from gem_core.batch import Batch
from gem_core.spec import DataSchema, RequestError, Shard
from gem_data.feed.balance import CostModel
from gem_data.feed.batching import Planned, Window, by_cost, by_rows, mix_records
from gem_data.feed.collate import Collator
from gem_data.feed.cursor import Cursor, Trained
from gem_data.feed.decode import Decoder
from gem_data.feed.order import check_request, slices, unit_order
from gem_data.feed.pipeline import ahead
from gem_data.feed.reader import Reader, SplitFile, index_files
from gem_data.feed.units import Unit
from gem_data.ids import encoders
from gem_data.options import FilesOptions
from gem_data.schema import Schema, read_schema, to_data_schema

SPLITS = ("train", "test")
DATA = "data.json"
READY = 2
"""Batches of each worker that are begun before the trainer asks for them."""


class Files:
    """A ``gem_core.spec.ResumableSource`` over columnar files.

    Each rank reads its own units (see ``feed.order``). Rows are shuffled within a window; memory is bounded by two windows and one unit, whatever the
    size of the files. Batches do not depend on the number of workers.

    Raises:
        RequestError: files, columns or options do not fit; raised before any row is read.
    """

    def __init__(self, options: FilesOptions) -> None:
        self.options = options
        self.folder = options.path
        self.description: Schema = read_schema(self.folder / "schema.toml")
        self._schema = to_data_schema(self.description)
        self._about = _read_about(self.folder / DATA)
        self._files = {split: self._split_files(split) for split in SPLITS}
        promised = {self.folder / entry["file"]: entry["rows"] for split in self._about.get("splits", {}).values() for entry in split}
        columns = self.description.columns()
        self._units = {split: index_files(self._files[split], columns, promised) for split in SPLITS}
        self._cost = CostModel(*options.cost)
        self._cursor, self._rank = Cursor(self._units["train"]), 0
        times = {group.name: group.time for group in self.description.sequence if group.time is not None}
        self._collator = Collator(self._schema, times, pin=torch.cuda.is_available())
        # Made now, so that a missing vocabulary is refused; each pass over a split begins with new counters.
        self._encoders = {split: encoders(self.description, self.folder) for split in SPLITS}

    def _split_files(self, split: str) -> list[SplitFile]:
        patterns = self.options.train if split == "train" else self.options.test
        if patterns:
            paths = [path for pattern in patterns for path in sorted(self.folder.glob(pattern))]
        else:
            paths = [self.folder / entry["file"] for entry in self._about.get("splits", {}).get(split, ())]
        paths = [path for path in paths if not path.name.endswith(".requests.parquet")]
        if not paths:
            so = f"{', '.join(patterns)} matches no file" if patterns else f"no {DATA} lists its files"
            do = f"Name them: --set \"data.options.{split}=['*.parquet']\", or prepare the folder: gem data prepare."
            raise RequestError(f"the {split} split of {self.folder}", so, do)
        return [SplitFile(path, shared if (shared := path.with_suffix(".requests.parquet")).exists() else None) for path in paths]

    def schema(self) -> DataSchema:
        return self._schema

    def rows(self, split: str) -> int:
        return sum(unit.rows for unit in self.units(split))

    def units(self, split: str) -> Sequence[Unit]:
        """The units of a split, in file order."""
        if split not in self._units:
            raise RequestError(f"split {split!r} of {self.folder}", f"the splits are {', '.join(SPLITS)}", "Name one of them.")
        return self._units[split]

    def batches(
        self, split: str, *, batch_size: int, shard: Shard = Shard(), seed: int | None = None, epoch: int = 0, start: int = 0
    ) -> Iterator[Batch]:
        units = self.units(split)
        check_request(batch_size, shard, {"seed": seed or 0, "epoch": epoch, "start": start})
        base, own = Trained(units), Trained(units)
        if split == "train":
            self._rank = shard.rank
            plan = [shard.world, batch_size, self.options.window, 0 if seed is None else seed + 1]
            base, own = self._cursor.begin(epoch, shard.rank, plan)
        order = unit_order(len(units), seed, epoch)
        asked = slices(units, order, base, batch_size=batch_size, shard=shard, window=self.options.window)
        self._encoders[split] = encoders(self.description, self.folder)
        read = Reader(self._files[split], units, Decoder(self.description, self._encoders[split])).window
        windows = (partial(read, piece, own, seed, epoch) for piece in asked)
        return self._run(split, windows, start)

    def _run(self, split: str, windows: Iterator[Callable[..., Window]], start: int) -> Iterator[Batch]:
        workers = self.options.workers
        pools = [ThreadPoolExecutor(count, thread_name_prefix="gem-feed") for count in (1, 2, workers) if workers]
        reading, units, gathering = pools or (None, None, None)
        try:
            jobs_of_windows = (partial(window, pool=units) for window in windows)
            planned = islice(self._plan(split, ahead(jobs_of_windows, reading, 1)), start, None)
            jobs = (partial(self._collator.batch, batch.picked, batch.global_rows) for batch in planned)
            yield from ahead(jobs, gathering, READY * workers)
        finally:
            for pool in pools:
                pool.shutdown(cancel_futures=True)

    def _plan(self, split: str, windows: Iterator[Window]) -> Iterator[Planned]:
        """Evaluation takes rows as they come: nothing there waits for balance."""
        options = self.options
        if split == "train" and options.batch_tokens:
            return by_cost(windows, float(options.batch_tokens), self._cost, fill=options.balance == "cost")
        return by_rows(windows, options.balance if split == "train" else "none", self._cost)

    def balance_report(self, rows: int) -> list[dict[str, Any]]:
        """How batches of the first window differ in cost and mix, plain and balanced in each way (see ``mix_records``)."""
        units = self.units("train")
        reader = Reader(self._files["train"], units, Decoder(self.description, encoders(self.description, self.folder)))
        asked = next(slices(units, unit_order(len(units), 0, 0), Trained(units), batch_size=rows, shard=Shard(), window=self.options.window))
        return mix_records(reader.window(asked, Trained(units), 0, 0), self._cost)

    def trained(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            if batch.origin is not None and batch.rows:
                self._cursor.trained(batch.origin.numpy())

    def cursor(self) -> Mapping[str, Any]:
        return self._cursor.state(self._rank)

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._cursor.restore(states)

    def unknown_ids(self, split: str) -> dict[str, int]:
        """``{feature: ids}`` that became row 0: those that `gem data prepare` counted, and those that this rank has read since its pass began."""
        counts = Counter(self._about.get("unknown", {}).get(split, {}))
        counts.update({key: encoder.unknown + encoder.missing for key, encoder in self._encoders[split].items()})
        return {key: count for key, count in counts.items() if count}

    def baselines(self) -> dict[str, dict[str, dict[str, float]]]:
        """Those of data.json: the bounds of generated data."""
        return dict(self._about.get("baselines", {}))

    def ledger(self) -> dict[str, int]:
        if "ledger" in self._about and not (self.options.train or self.options.test):
            return dict(self._about["ledger"])  # of the raw data; `gem data audit` holds it against the files
        kept = {split: self.rows(split) for split in SPLITS}
        return {"read": sum(kept.values()), **kept}


def load(**options: Any) -> Files:
    """The source for these options (``FilesOptions``)."""
    return Files(FilesOptions(**options))


def _read_about(path: Path) -> dict[str, Any]:
    """The content of a prepared folder's data.json; empty where there is none."""
    if not path.exists():
        return {}
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RequestError(f"data file {path}", f"it is no JSON ({error})", "Prepare the data again.") from error
    if not isinstance(about, dict) or about.get("format") != 1:
        so = "its format is not 1, the only one that this version reads"
        raise RequestError(f"data file {path}", so, "Prepare the data again, or install the gem-data that wrote it.")
    return about
