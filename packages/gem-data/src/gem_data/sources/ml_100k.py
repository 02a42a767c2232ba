"""MovieLens-100K from RecBole's atomic files: did the user rate the film 4 or more?

Rows are in stable time order. Each user's events are ordered by (timestamp, place in the file); those at position ``ceil(0.8 n)`` and later are test
rows. Histories and the user's own numbers come from the user's earlier events. Numbers about the film come from ratings with a strictly earlier
timestamp (``item_statistics = "past"``), or from training rows of any time, as its embedding does (``"crossfit"``).
"""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from gem_core.spec import DataSchema, DenseFeature, IdFeature, RequestError, SequenceFeature, Task
from gem_data.collate import Events, MultiIds, Spans, Table
from gem_data.fetch import default_folder
from gem_data.formats.recbole import read_atomic, require_columns
from gem_data.history import Floats, Ints
from gem_data.ids import Vocabulary, VocabularyEncoder
from gem_data.ledger import Ledger
from gem_data.options import Ml100kOptions
from gem_data.score import logit, scores, sigmoid
from gem_data.sources.base import TableSource
from gem_data.sources.ml_100k_features import CrossFittedItems, Past, PastFeatures, PastItems, Ratings, earlier_events, past_features

FILES = ("ml-100k.inter", "ml-100k.user", "ml-100k.item")
TASK = "like"
AGE_EDGES = (18, 25, 35, 45, 50, 56)
SECONDS_A_DAY = 86_400


class MovieLens100K(TableSource):
    """The source ``ml-100k``.

    Raises:
        RequestError: the folder or a file is missing, or a file is not what it should be.
    """

    def __init__(self, options: Ml100kOptions) -> None:
        folder = _folder(options.path)
        ratings, ledger = _read_ratings(folder / FILES[0])
        users, films = _read_users(folder / FILES[1]), _read_films(folder / FILES[2])
        frame = ratings.join(users, on="user_id", how="left", maintain_order="left").join(films, on="item_id", how="left", maintain_order="left")
        train = ~_is_test(frame)
        table = _build_table(frame, train, films, options)
        mask = torch.from_numpy(train)
        super().__init__("ml-100k", table, {"train": mask.nonzero().squeeze(1), "test": (~mask).nonzero().squeeze(1)}, ledger)

    def baselines(self) -> dict[str, dict[str, dict[str, float]]]:
        """Target encoding: the log odds of the user's and of the item's like rate over the training rows add up.

        None where the training rows have one class only: their log odds are infinite.
        """
        train, test = self.index("train").numpy(), self.index("test").numpy()
        labels = self.table.labels[TASK].numpy().astype(np.float64)
        rate = labels[train].mean()
        if rate in (0.0, 1.0):
            return {}
        score = np.full(test.size, logit(rate))
        for name in ("user", "item"):
            ids = self.table.ids[name].numpy()
            size = int(ids.max()) + 1
            counts = np.bincount(ids[train], minlength=size)
            likes = np.bincount(ids[train], labels[train], minlength=size)
            score += logit((likes + 5 * rate) / (counts + 5))[ids[test]] - logit(rate)
        return {"target encoding": {TASK: scores(labels[test], sigmoid(score))}}


def load(**options: Any) -> MovieLens100K:
    """The source for these options (``Ml100kOptions``)."""
    return MovieLens100K(Ml100kOptions(**options))


def _folder(path: Path | None) -> Path:
    folder = default_folder("ml-100k") if path is None else path
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        do = 'Run `gem data fetch ml-100k`, give the folder as data.options.path, or use data.source = "synthetic".'
        raise RequestError("data source 'ml-100k'", f"{folder} does not hold {', '.join(missing)}", do)
    return folder


def _read_ratings(path: Path) -> tuple[pl.DataFrame, Ledger]:
    """Ratings in stable time order; rows that lack a field are dropped and counted."""
    frame = read_atomic(path)
    require_columns(path, frame, ("user_id", "item_id", "rating", "timestamp"))
    ledger = Ledger(frame.height)
    for reason, good in (
        ("no user", pl.col("user_id").is_not_null()),
        ("no item", pl.col("item_id").is_not_null()),
        ("no timestamp", pl.col("timestamp").is_finite()),
        ("timestamp is no whole number of seconds", (pl.col("timestamp").abs() <= 2.0**53) & (pl.col("timestamp") % 1 == 0)),
        ("rating is not 1, 2, 3, 4 or 5", pl.col("rating").is_in([1.0, 2.0, 3.0, 4.0, 5.0])),
    ):
        kept = frame.filter(good)
        ledger.drop(reason, frame.height - kept.height)
        frame = kept
    if not frame.height:
        raise RequestError(f"atomic file {path}", f"no rating of {ledger.read} can be used", "Give a file with ratings.")
    return frame.with_columns(pl.col("timestamp").cast(pl.Int64)).sort("timestamp", maintain_order=True), ledger


def _read_users(path: Path) -> pl.DataFrame:
    frame = read_atomic(path)
    require_columns(path, frame, ("user_id", "age", "gender", "occupation", "zip_code"))
    _check_unique(path, frame, "user_id")
    return frame


def _read_films(path: Path) -> pl.DataFrame:
    frame = read_atomic(path)
    require_columns(path, frame, ("item_id", "release_year", "class"))
    _check_unique(path, frame, "item_id")
    return frame


def _check_unique(path: Path, frame: pl.DataFrame, key: str) -> None:
    twice = frame.filter(pl.col(key).is_duplicated()).get_column(key)
    if twice.len():
        raise RequestError(f"atomic file {path}", f"{key} {twice[0]!r} occurs more than once", "Keep one line for each.")


def _is_test(frame: pl.DataFrame) -> NDArray[np.bool_]:
    """``[rows]`` bool: position ``ceil(0.8 n)`` or later among the user's ``n`` events; ``(4 n + 4) // 5`` is that ceiling in integers."""
    position = pl.int_range(pl.len()).over("user_id")
    return frame.select((position >= (pl.len().over("user_id") * 4 + 4) // 5).alias("test")).get_column("test").to_numpy()


def _build_table(frame: pl.DataFrame, train: NDArray[np.bool_], films: pl.DataFrame, options: Ml100kOptions) -> Table:
    ids, cardinality = _id_columns(frame, train)
    genres, genre_rows = _genres(frame, films)
    ratings = Ratings(
        user=_codes(frame, "user_id"),
        item=_codes(frame, "item_id"),
        rating=frame.get_column("rating").to_numpy(),
        time=frame.get_column("timestamp").to_numpy(writable=True),
        release=ids["release"].numpy(),
        year=frame.get_column("release_year").cast(pl.Float64, strict=False).fill_null(float("nan")).to_numpy(),
        genres=_genre_shares(genres, genre_rows),
        train=train,
    )
    past = earlier_events(ratings.user, ratings.time, options.history_rule)
    features = past_features(ratings, past, PastItems(ratings) if options.item_statistics == "past" else CrossFittedItems(ratings))
    stars = IdFeature(name="rating", cardinality=6)
    item = IdFeature(name="item", cardinality=cardinality["item"])
    history = SequenceFeature(name="history", ids=(item, stars), dense=(DenseFeature(name="surprise"),), time=True, max_length=options.history_length)
    schema = DataSchema(
        ids=(
            *(IdFeature(name=name, cardinality=rows) for name, rows in cardinality.items()),
            IdFeature(name="genres", cardinality=genre_rows, multi=True),
        ),
        dense=tuple(DenseFeature(name=name) for name in features.dense),
        sequences=(history,),
        tasks=(Task(name=TASK),),
        group=True,
    )
    return Table(
        schema=schema,
        rows=frame.height,
        labels={TASK: torch.from_numpy((ratings.rating >= 4).astype(np.float32))},
        ids=ids,
        multi={"genres": genres},
        dense={name: torch.from_numpy(values.astype(np.float32)).unsqueeze(1) for name, values in features.dense.items()},
        events={"history": _history(ids["item"], ratings, features, past, options.history_length)},
        time=torch.from_numpy(ratings.time),
        groups=torch.from_numpy(ratings.user),
    )


def _history(item: Tensor, ratings: Ratings, features: PastFeatures, past: Past, length: int) -> Events:
    order = torch.from_numpy(past.index.order)
    return Events(
        spans=Spans(begin=torch.from_numpy(past.last(length)), end=torch.from_numpy(past.end)),
        ids={"item": item[order], "rating": torch.from_numpy(ratings.rating.astype(np.int64))[order]},
        dense={"surprise": torch.from_numpy(features.surprise.astype(np.float32))[order].unsqueeze(1)},
        time=torch.from_numpy(ratings.time)[order],
    )


def _id_columns(frame: pl.DataFrame, train: NDArray[np.bool_]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Single-valued id features and their cardinalities; 0 is unknown or blank."""
    columns: dict[str, Tensor] = {}
    cardinality: dict[str, int] = {}
    for name, column in (("user", "user_id"), ("item", "item_id"), ("gender", "gender"), ("occupation", "occupation")):
        values = frame.get_column(column)
        encoder = VocabularyEncoder(name, Vocabulary.of(name, values.filter(pl.Series(train)).to_arrow()))
        columns[name], cardinality[name] = torch.from_numpy(encoder.encode(values.to_arrow())), encoder.cardinality
    age, zip_code, year, seconds = pl.col("age"), pl.col("zip_code"), pl.col("release_year"), pl.col("timestamp")
    years = age.cast(pl.Int64, strict=False)
    released = year.cast(pl.Int64, strict=False)
    buckets = {
        "age": (sum((years >= edge).cast(pl.Int64) for edge in AGE_EDGES) + 1, len(AGE_EDGES) + 2),
        "zip": (zip_code.str.slice(0, 1).cast(pl.Int64, strict=False).fill_null(10) + 1, 12),
        "release": (pl.when(released < 1990).then(((released - 1920) // 10 + 1).clip(1, 7)).otherwise((released - 1982).clip(8, 17)), 18),
        "hour": (seconds // 3600 % 24 + 1, 25),
        "weekday": (seconds // SECONDS_A_DAY % 7 + 1, 8),
    }
    known = {"age": years, "zip": zip_code, "release": released, "hour": seconds, "weekday": seconds}
    for name, (bucket, rows) in buckets.items():
        values = frame.select(pl.when(known[name].is_null()).then(0).otherwise(bucket).cast(pl.Int64).alias(name)).get_column(name)
        columns[name], cardinality[name] = torch.from_numpy(values.to_numpy(writable=True)), rows
    return columns, cardinality


def _genres(frame: pl.DataFrame, films: pl.DataFrame) -> tuple[MultiIds, int]:
    """The film's genres, and the rows of their table; a film without genres has none."""
    words = frame.get_column("class").fill_null([])
    encoder = VocabularyEncoder("genres", Vocabulary.of("genres", films.get_column("class").to_arrow().flatten()))
    values = torch.from_numpy(encoder.encode(words.to_arrow().flatten()))
    lengths = torch.from_numpy(words.list.len().cast(pl.Int64).to_numpy(writable=True))
    return MultiIds(values=values, spans=Spans.packed(values.numel(), "genres", lengths=lengths)), encoder.cardinality


def _genre_shares(genres: MultiIds, rows: int) -> Floats:
    """``[rows, genres]``: 1 divided by the number of the film's genres, in each of them."""
    lengths = genres.spans.end - genres.spans.begin
    shares = torch.zeros(lengths.numel(), rows, dtype=torch.float64)
    owner = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    shares[owner, genres.values] = 1.0 / lengths[owner].double()
    return np.asarray(shares.numpy())


def _codes(frame: pl.DataFrame, column: str) -> Ints:
    """Distinct values numbered from 0, known to the training rows or not."""
    return frame.get_column(column).rank("dense").cast(pl.Int64).to_numpy() - 1
