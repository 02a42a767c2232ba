"""MovieLens, as GroupLens hands it out, and 100K also as RecBole's atomic files."""

from pathlib import Path
from typing import Any

import polars as pl

from gem_data.known.atomic import atomic_table
from gem_data.known.dataset import Choices, KnownDataSet, MultiId, Tables, numbers, sequence, tasks, vocabulary
from gem_data.known.tables import KnownTable, find, find_any, same, text, typed, whole
from gem_data.schema.declare import Schema

TERMS = "GroupLens (Harper and Konstan 2015): research use, cite, no redistribution without permission"
GENRES = (
    "unknown",
    "Action",
    "Adventure",
    "Animation",
    "Children's",
    "Comedy",
    "Crime",
    "Documentary",
    "Drama",
    "Fantasy",
    "Film-Noir",
    "Horror",
    "Musical",
    "Mystery",
    "Romance",
    "Sci-Fi",
    "Thriller",
    "War",
    "Western",
)
NO_GENRE = "(no genres listed)"


def _definition(_: Tables, *, users: tuple[str, ...] = ()) -> dict[str, Any]:
    sides = [{"table": "items", "on": ["item_id"], "columns": ["genres"]}]
    people = [{"table": "users", "on": ["user_id"], "columns": list(users)}] if users else []
    return {
        "tables": {"impressions": {"user": "user_id", "time": "timestamp"}, "items": {}, **({"users": {}} if users else {})},
        "impressions": {"table": "impressions"},
        "positives": [{"task": "like", "where": [["rating", ">=", 4]]}],
        "histories": [{"name": "liked", "table": "impressions", "where": [["rating", ">=", 4]]}, {"name": "rated", "table": "impressions"}],
        "sides": [*sides, *people],
        "split": {"kind": "time", "test_fraction": 0.1},
    }


def _schema(*users: str) -> Schema:
    item = vocabulary("item_id")
    return Schema(
        user="user_id",
        time="timestamp",
        id=(*item, *vocabulary("user_id", *users)),
        multi_id=(MultiId(name="genres", encode="vocabulary"),),
        sequence=(sequence("liked", *item), sequence("rated", *item, number=numbers("rating"))),
        task=tasks("like"),
    )


def _genres(column: str) -> pl.Expr:
    parts = pl.col(column).fill_null("").str.split("|")
    return parts.list.eval(pl.element().filter((pl.element() != "") & (pl.element() != NO_GENRE)))


RATING = {"user_id": pl.col("user_id"), "item_id": pl.col("item_id"), "rating": pl.col("rating").cast(pl.Float32), "timestamp": pl.col("timestamp")}


def _open_100k(folder: Path, _: Choices) -> dict[str, KnownTable]:
    if find_any(folder, "*.inter"):
        return _open_100k_atomic(folder)
    flags = [f"genre_{k}" for k in range(len(GENRES))]
    films = text("item_id:int64", "title", "release_date", "video_release_date", "url", *(f"{flag}:int64" for flag in flags), separator="|")
    named = [pl.when(pl.col(flag) == 1).then(pl.lit(genre)) for flag, genre in zip(flags, GENRES, strict=True)]
    people = text("user_id:int64", "age:int64", "gender", "occupation", "zip", separator="|")
    return {
        "impressions": KnownTable(
            files=find(folder, "u.data"),
            read=text("user_id:int64", "item_id:int64", "rating:float64", "timestamp:int64", separator="\t"),
            columns=RATING,
        ),
        "users": KnownTable(files=find(folder, "u.user"), read=people, columns=same("user_id", "age", "gender", "occupation", "zip")),
        "items": KnownTable(
            files=find(folder, "u.item"),
            read={**films, "encoding": "latin-1"},
            columns={**same("item_id", "title", "release_date"), "genres": pl.concat_list(named).list.drop_nulls()},
        ),
    }


def _open_100k_atomic(folder: Path) -> dict[str, KnownTable]:
    key = {name: pl.col(name).cast(pl.Int64) for name in ("user_id", "item_id")}
    when = {"rating": pl.col("rating").cast(pl.Float32), "timestamp": whole("timestamp")}
    age = {"user_id": key["user_id"], "age": pl.col("age").cast(pl.Int64), **same("gender", "occupation"), "zip": pl.col("zip_code")}
    film = {
        "item_id": key["item_id"],
        "title": pl.col("movie_title").list.join(" "),
        "release_date": pl.col("release_year"),
        "genres": pl.col("class"),
    }
    return {
        "impressions": atomic_table(find(folder, "*.inter"), key | when),
        "users": atomic_table(find(folder, "*.user"), age),
        "items": atomic_table(find(folder, "*.item"), film),
    }


def _open_1m(folder: Path, _: Choices) -> dict[str, KnownTable]:
    double = {"separator": "::", "encoding": "latin-1", "quote": False}
    return {
        "impressions": KnownTable(
            files=find(folder, "ratings.dat"),
            read=text("user_id:int64", "item_id:int64", "rating:float64", "timestamp:int64", **double),
            columns=RATING,
        ),
        "users": KnownTable(
            files=find(folder, "users.dat"),
            read=text("user_id:int64", "gender", "age:int64", "occupation:int64", "zip", **double),
            columns=same("user_id", "age", "gender", "occupation", "zip"),
        ),
        "items": KnownTable(
            files=find(folder, "movies.dat"),
            read=text("item_id:int64", "title", "genres", **double),
            columns={**same("item_id", "title"), "genres": _genres("genres")},
        ),
    }


def _open_20m(folder: Path, _: Choices) -> dict[str, KnownTable]:
    key = {"user_id": pl.col("userId"), "item_id": pl.col("movieId")}
    return {
        "impressions": KnownTable(
            files=find(folder, "ratings.csv"),
            read={"types": typed("userId:int64", "movieId:int64", "rating:float64", "timestamp:int64")},
            columns=key | {name: RATING[name] for name in ("rating", "timestamp")},
        ),
        "items": KnownTable(
            files=find(folder, "movies.csv"),
            read={"types": typed("movieId:int64", "title", "genres")},
            columns={"item_id": key["item_id"], "title": pl.col("title"), "genres": _genres("genres")},
        ),
    }


def _with_users(tables: Tables) -> dict[str, Any]:
    return _definition(tables, users=("age", "gender", "occupation"))


DATA_SETS = (
    KnownDataSet(
        name="ml-100k",
        summary="100,000 ratings of films",
        terms=TERMS,
        files=("u.data, u.user, u.item", "or *.inter, *.user, *.item"),
        quirks=("u.item is Latin-1", "genres are 19 flags", "half of all neighbouring events share a second"),
        open=_open_100k,
        schema=_schema("age", "gender", "occupation"),
        definition=_with_users,
    ),
    KnownDataSet(
        name="ml-1m",
        summary="1,000,209 ratings of films",
        terms=TERMS,
        files=("ratings.dat", "users.dat", "movies.dat"),
        quirks=("fields are separated by ::", "Latin-1", "ages are codes", "zip codes are text"),
        open=_open_1m,
        schema=_schema("age", "gender", "occupation"),
        definition=_with_users,
    ),
    KnownDataSet(
        name="ml-20m",
        summary="20 million ratings of films; also for 25M, 32M and latest",
        terms=TERMS,
        files=("ratings.csv", "movies.csv"),
        quirks=("titles are UTF-8 and quoted where they hold a comma", "half stars", f"{NO_GENRE} is an empty list"),
        open=_open_20m,
        schema=_schema(),
        definition=_definition,
    ),
)
