"""Criteo-style clicks from ORC files ``part-N.orc``: ``label``, 13 numbers ``i1`` .. ``i13`` and 26 categories ``c1`` .. ``c26``.

Every column is a list that holds one value, or none where it is missing. Numbers may be negative. Vocabularies, means and deviations come from the
training files alone.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from gem_core.spec import DataSchema, DenseFeature, IdFeature, RequestError, Task
from gem_data.collate import Table
from gem_data.formats.orc import read_orc
from gem_data.ids import Encoder, HashEncoder, Vocabulary, VocabularyEncoder
from gem_data.ledger import Ledger
from gem_data.logistic import fit_logistic
from gem_data.options import CriteoOrcOptions
from gem_data.score import scores, sigmoid
from gem_data.sources.base import TableSource

ASKED = "data source 'criteo-orc'"
TASK = "ctr"
NUMBERS = tuple(f"i{k}" for k in range(1, 14))
CATEGORIES = tuple(f"c{k}" for k in range(1, 27))
BUCKETS = 32


class CriteoOrc(TableSource):
    """The source ``criteo-orc``.

    Raises:
        RequestError: the folder or a part is missing, the splits share a part, or a file does not hold what it should.
    """

    def __init__(self, options: CriteoOrcOptions) -> None:
        files = find_parts(options.path)
        train_parts, test_parts = choose_parts(files, options.train_parts, options.test_parts)
        read = {n: read_orc(files[n], ("label", *NUMBERS, *CATEGORIES)) for n in (*train_parts, *test_parts)}
        frame = pl.concat(read.values(), how="vertical_relaxed")
        from_train = np.repeat([n in train_parts for n in read], [part.height for part in read.values()])
        ledger = Ledger(frame.height)
        if not (frame.schema["label"].is_numeric() or frame.schema["label"] == pl.Boolean):
            raise RequestError("column 'label'", f"it holds {frame.schema['label']}", "Labels are the numbers 0 and 1.")
        labelled = frame.get_column("label").is_not_null()
        ledger.drop("no label", int((~labelled).sum()))
        frame, train = frame.filter(labelled), from_train[labelled.to_numpy()]
        ids, cardinality = _categories(frame, train, options)
        schema = DataSchema(
            ids=tuple(IdFeature(name=name, cardinality=rows) for name, rows in cardinality.items()),
            dense=tuple(DenseFeature(name=name, width=2) for name in NUMBERS),
            tasks=(Task(name=TASK),),
        )
        labels = torch.from_numpy(frame.get_column("label").cast(pl.Float32).to_numpy(writable=True))
        table = Table(schema=schema, rows=frame.height, labels={TASK: labels}, ids=ids, dense=_numbers(frame, train))
        mask = torch.from_numpy(train)
        super().__init__("criteo-orc", table, {"train": mask.nonzero().squeeze(1), "test": (~mask).nonzero().squeeze(1)}, ledger)

    def baselines(self) -> dict[str, dict[str, dict[str, float]]]:
        """First-order logistic regression over the categories and the numbers in buckets, by AdaGrad; under a second for 50,000 rows.

        None where the training rows have one class only: there is nothing to fit.
        """
        columns = [self.table.ids[name].numpy() for name in CATEGORIES]
        columns += [_buckets(self.table.dense[name].numpy()) for name in NUMBERS]
        labels = self.table.labels[TASK].numpy().astype(np.float64)
        train, test = self.index("train").numpy(), self.index("test").numpy()
        if np.unique(labels[train]).size < 2:
            return {}
        features = np.stack(columns, axis=1)
        logits = fit_logistic(features[train], labels[train])(features[test])
        return {"logistic regression": {TASK: scores(labels[test], sigmoid(logits))}}


def load(**options: Any) -> CriteoOrc:
    """The source for these options (``CriteoOrcOptions``)."""
    return CriteoOrc(CriteoOrcOptions(**options))


def find_parts(folder: Path) -> dict[int, Path]:
    """The files ``part-N.orc`` of a folder by N, which may have leading zeros.

    Raises:
        RequestError: there is none, or two files have one number.
    """
    parts: dict[int, Path] = {}
    for path in sorted(folder.glob("part-*.orc")):
        if match := re.fullmatch(r"part-(\d+)\.orc", path.name):
            other = parts.setdefault(int(match[1]), path)
            if other != path:
                so = f"{folder} holds both {other.name} and {path.name}"
                raise RequestError(ASKED, so, "Keep one of them, or give it a number of its own.")
    if not parts:
        raise RequestError(ASKED, f"{folder} holds no part-N.orc file", "Give the folder of the ORC files as data.options.path.")
    return parts


def choose_parts(files: Mapping[int, Path], train: Sequence[int] | None, test: Sequence[int] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Numbers of the training and of the test files: by default the highest is for the test and the rest for training.

    Raises:
        RequestError: a file does not exist, or a split is empty or shares a file with the other.
    """
    found = sorted(files)
    if test is None:
        test = [n for n in found if n not in (train or ())][-1:]
    if train is None:
        train = [n for n in found if n not in test]
    absent = sorted({*train, *test} - set(found))
    if absent:
        raise RequestError(ASKED, f"there is no part {absent}; there are {found}", "Name parts that exist.")
    if not train or not test or len({*train, *test}) != len(train) + len(test):
        so = f"training parts {list(train)} and test parts {list(test)}"
        raise RequestError(ASKED, so, "Give each split at least one part of its own, each part once.")
    return tuple(train), tuple(test)


def _categories(frame: pl.DataFrame, train: NDArray[np.bool_], options: CriteoOrcOptions) -> tuple[dict[str, Tensor], dict[str, int]]:
    columns: dict[str, Tensor] = {}
    cardinality: dict[str, int] = {}
    for name in CATEGORIES:
        values = frame.get_column(name)
        if not (values.dtype.is_integer() or values.dtype == pl.String):
            raise RequestError(f"column {name!r}", f"it holds {values.dtype}", "Categories are integers or strings.")
        encoder = _encoder(name, values.filter(pl.Series(train)), options)
        columns[name], cardinality[name] = torch.from_numpy(encoder.encode(values.to_arrow())), encoder.cardinality
    return columns, cardinality


def _encoder(name: str, train: pl.Series, options: CriteoOrcOptions) -> Encoder:
    if options.hash_rows:
        return HashEncoder(name, options.hash_rows + 1, salt=name)
    return VocabularyEncoder(name, Vocabulary.of(name, train.to_arrow(), min_count=options.min_count), options.unknown)


def _numbers(frame: pl.DataFrame, train: NDArray[np.bool_]) -> dict[str, Tensor]:
    """``{name: [rows, 2]}``: sign(x) log(1 + |x|) with mean 0 and deviation 1 over the training rows, 0 where missing; and 1 where missing."""
    columns: dict[str, Tensor] = {}
    for name in NUMBERS:
        values = frame.get_column(name)
        if not values.dtype.is_numeric():
            raise RequestError(f"column {name!r}", f"it holds {values.dtype}", "Numbers are integers or floats.")
        x = values.cast(pl.Float64).fill_null(float("nan")).to_numpy()
        squashed = np.sign(x) * np.log1p(np.abs(x))
        missing = ~np.isfinite(squashed)
        known = squashed[train & ~missing]
        mean, deviation = (known.mean(), known.std() + 1e-6) if known.size else (0.0, 1.0)
        scaled = np.where(missing, 0.0, (squashed - mean) / deviation)
        columns[name] = torch.from_numpy(np.stack([scaled, missing], axis=1).astype(np.float32))
    return columns


def _buckets(column: NDArray[np.float32]) -> NDArray[np.int64]:
    """Quarters of a deviation, and bucket 0 for missing."""
    steps = np.clip(np.floor(column[:, 0] * 4) + BUCKETS // 2, 1, BUCKETS - 1)
    return np.where(column[:, 1] > 0, 0, steps).astype(np.int64)
