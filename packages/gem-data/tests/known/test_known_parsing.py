"""Parsers of unusual forms against plain Python, on drawn inputs."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_data.known.ali_ccp import OWN_MANY, OWN_ONE, parse_features
from gem_data.known.avazu import CODES, SITE
from gem_data.known.registry import known_data_set
from gem_data.known.tables import FILE

FIELDS = (*OWN_ONE, *OWN_MANY, "999")
FEATURES = st.lists(st.tuples(st.sampled_from(FIELDS), st.integers(0, 10**12), st.integers(0, 64).map(lambda k: k / 8)), max_size=8)


def reference(features: list[tuple[str, int, float]]) -> dict[str, Any]:
    """One row's columns, feature after feature."""
    out: dict[str, Any] = {}
    for field in (*OWN_ONE, *OWN_MANY):
        ids, values = ([f[k] for f in features if f[0] == field] for k in (1, 2))
        many = field in OWN_MANY
        out[field], out[f"{field}.value"] = (ids, values) if many else (next(iter(ids), None), next(iter(values), None))
    return out


@given(st.lists(FEATURES, min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_ali_ccp_features_are_those_of_a_plain_loop(rows: list[list[tuple[str, int, float]]]) -> None:
    fields = ["\x01".join(f"{field}\x02{identity}\x03{value}" for field, identity, value in row) or None for row in rows]
    piece = pl.DataFrame({"features": pl.Series(fields, dtype=pl.String), "count": [len(row) for row in rows], FILE: "f"})
    found = parse_features("features", "count", OWN_ONE, OWN_MANY)(piece)
    assert found.drop("features", "count", FILE).to_dicts() == [reference(row) for row in rows]


@given(st.datetimes(datetime(2014, 1, 1), datetime(2015, 12, 31)))
@settings(max_examples=25, deadline=None)
def test_case_H19_any_avazu_hour(tmp_path_factory: pytest.TempPathFactory, when: datetime) -> None:
    folder = Path(tmp_path_factory.mktemp("avazu"))
    line = ",".join(["1", "0", when.strftime("%y%m%d%H"), *["1"] * (len(SITE) + len(CODES))])
    names = "id,click,hour,C1,banner_pos," + ",".join([*SITE, *CODES[2:]])
    (folder / "train").write_text(f"{names}\n{line}\n")
    (batch,) = known_data_set("avazu").tables(folder)["impressions"].batches()
    assert batch.column("timestamp").to_pylist() == [int(when.replace(minute=0, second=0, microsecond=0, tzinfo=UTC).timestamp())]
    assert set(batch.schema.names) == {"id", "click", "user_id", "timestamp", *SITE, *CODES}


@given(st.lists(st.integers(0, 255), min_size=1, max_size=10))
@settings(max_examples=15, deadline=None)
def test_case_H03_any_kuairand_feedback_in_one_number(tmp_path_factory: pytest.TempPathFactory, actions: list[int]) -> None:
    from gem_data.known.kuairand import FEEDBACK, LOG, _log

    folder = Path(tmp_path_factory.mktemp("kuairand"))
    lines = [",".join(str(int(bool(action & FEEDBACK[name]))) if name in FEEDBACK else "7" for name in LOG) for action in actions]
    (folder / "log.csv").write_text(",".join(LOG) + "\n" + "\n".join(lines) + "\n")
    (batch,) = _log([folder / "log.csv"]).batches()
    assert batch.column("action").to_pylist() == actions
    for name, bit in FEEDBACK.items():
        assert batch.column(name).to_pylist() == [int(bool(action & bit)) for action in actions]
