"""Which rank holds which table."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.spec import RequestError, TableSpec
from gem_parallel.sparse.placement import place


def spec(name: str, rows: int, dim: int = 4) -> TableSpec:
    return TableSpec(name=name, rows=rows, dim=dim, features=(name,), init_scale=1.0)


def loads(tables: list[TableSpec], places: dict[str, int | None], world: int) -> list[float]:
    out = [0.0] * world
    for table in tables:
        home = places[table.name]
        for rank in range(world) if home is None else (home,):
            out[rank] += table.rows * table.dim / (world if home is None else 1)
    return out


@settings(max_examples=50, derandomize=True)
@given(st.lists(st.integers(8, 1000), min_size=1, max_size=12), st.integers(1, 8), st.sampled_from(["auto", "table_wise", "row_wise"]))
def test_case_F08_every_table_is_placed_once(sizes: list[int], world: int, sharding: str) -> None:
    tables = [spec(f"t{i}", rows) for i, rows in enumerate(sizes)]
    places = place(tables, world, sharding)
    assert set(places) == {table.name for table in tables}
    assert all(home is None or 0 <= home < world for home in places.values())
    if sharding == "row_wise":
        assert set(places.values()) == {None}
    if sharding == "table_wise":
        assert None not in places.values()
    if sharding == "auto":  # no rank carries more than twice its fair share
        total = sum(table.rows * table.dim for table in tables)
        assert max(loads(tables, places, world)) <= 2 * total / world + 1e-6


def test_a_table_beyond_a_fair_share_is_spread_and_the_rest_balanced() -> None:
    tables = [spec("huge", 1000), spec("b", 100), spec("a", 100), spec("c", 90)]
    assert place(tables, 2, "auto") == {"huge": None, "a": 0, "b": 1, "c": 0}


def test_placement_does_not_depend_on_the_order_of_tables() -> None:
    tables = [spec(name, rows) for name, rows in (("a", 10), ("b", 20), ("c", 20), ("d", 5))]
    assert place(tables, 3, "table_wise") == place(tables[::-1], 3, "table_wise")


def test_a_table_with_fewer_rows_than_ranks() -> None:
    assert place([spec("tiny", 2)], 4, "auto") == {"tiny": 0}
    with pytest.raises(RequestError, match="2 rows for 4 ranks"):
        place([spec("tiny", 2)], 4, "row_wise")
