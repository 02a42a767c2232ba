"""Which rank holds which part of which table, and what is refused."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.spec import RequestError, SparseOptimizer, TableSpec
from gem_parallel.sparse.layout import lay_out
from gem_parallel.sparse.options import TableRule, TorchRecOptions
from gem_parallel.sparse.placement import Cluster, Place, column_parts, place, wishes

SGD = SparseOptimizer(name="sgd")


def spec(name: str, rows: int, dim: int = 8, pooling: str = "sum") -> TableSpec:
    return TableSpec(name=name, rows=rows, dim=dim, features=(name,), pooling=pooling, init_scale=1.0)


def cluster(world: int, *, local: int = 0, device: str = "cpu") -> Cluster:
    return Cluster(world=world, local=local or world, device=device)


def placed(tables: list[TableSpec], where: Cluster, sharding: str, optimizer: SparseOptimizer = SGD) -> dict[str, Place]:
    return place(tables, wishes(tables, sharding, "device", ()), optimizer, where)


def loads(tables: list[TableSpec], places: dict[str, Place], world: int) -> list[float]:
    out = [0.0] * world
    for table in tables:
        home = places[table.name]
        for rank in home.ranks:
            out[rank] += table.rows * table.dim / (1 if home.sharding == "data_parallel" else len(home.ranks))
    return out


@settings(max_examples=50, derandomize=True)
@given(
    st.lists(st.integers(8, 1000), min_size=1, max_size=12),
    st.integers(1, 8),
    st.sampled_from(["auto", "table_wise", "row_wise", "column_wise", "data_parallel"]),
)
def test_case_F08_every_table_is_placed_once(sizes: list[int], world: int, sharding: str) -> None:
    tables = [spec(f"t{i}", rows) for i, rows in enumerate(sizes)]
    places = placed(tables, cluster(world), sharding)
    assert set(places) == {table.name for table in tables}
    total = sum(table.rows * table.dim for table in tables)
    for home in places.values():
        assert set(home.ranks) <= set(range(world))
        assert len(set(home.ranks)) == len(home.ranks)
        assert len(home.ranks) == {"table_wise": 1, "column_wise": min(world, 2)}.get(home.sharding, world)
    assert sum(loads(tables, places, world)) == pytest.approx(total * (world if sharding == "data_parallel" else 1))
    if sharding == "auto":  # no rank carries more than twice its fair share
        assert max(loads(tables, places, world)) <= 2 * total / world + 1e-6
    else:
        assert {home.sharding for home in places.values()} == {sharding}


@settings(max_examples=30, derandomize=True)
@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.sampled_from([8, 12, 16, 24]), min_size=1, max_size=6))
def test_host_layouts_take_whole_hosts(hosts: int, local: int, widths: list[int]) -> None:
    tables = [spec(f"t{i}", 100 + i, dim) for i, dim in enumerate(widths)]
    where = cluster(hosts * local, local=local, device="cuda")
    for sharding in ("table_row_wise", "grid"):
        for table, home in ((t, placed(tables, where, sharding)[t.name]) for t in tables):
            count = Counter(rank // local for rank in home.ranks)
            assert set(count.values()) == {local}
            assert len(count) == (1 if sharding == "table_row_wise" else column_parts(table.dim, hosts))


def test_a_table_beyond_a_fair_share_is_spread_and_the_rest_balanced() -> None:
    tables = [spec("huge", 1000), spec("b", 100), spec("a", 100), spec("c", 90)]
    places = placed(tables, cluster(2), "auto")
    assert {name: (home.sharding, home.ranks) for name, home in places.items()} == {
        "huge": ("row_wise", (0, 1)),
        "a": ("table_wise", (0,)),
        "b": ("table_wise", (1,)),
        "c": ("table_wise", (0,)),
    }


def test_placement_does_not_depend_on_the_order_of_tables() -> None:
    tables = [spec(name, rows) for name, rows in (("a", 10), ("b", 20), ("c", 20), ("d", 5))]
    assert placed(tables, cluster(3), "table_wise") == placed(tables[::-1], cluster(3), "table_wise")


def test_the_first_rule_that_matches_counts() -> None:
    tables = [spec("item", 100), spec("item.seen", 100), spec("user", 100)]
    rules = [
        TableRule(pattern="item", sharding="data_parallel"),
        TableRule(pattern="item*", memory="uvm"),
        TableRule(pattern="*", sharding="row_wise"),
    ]
    assert wishes(tables, "auto", "device", rules) == {
        "item": ("data_parallel", "device"),
        "item.seen": ("auto", "uvm"),
        "user": ("row_wise", "device"),
    }


def test_a_pattern_without_a_table_is_refused() -> None:
    with pytest.raises(RequestError, match=r"'itm\*'.*none of item, user"):
        wishes([spec("user", 10), spec("item", 10)], "auto", "device", [TableRule(pattern="itm*", sharding="row_wise")])


@pytest.mark.parametrize(
    ("table", "where", "sharding", "optimizer", "words"),
    [
        (
            spec("t", 2),
            cluster(4),
            "row_wise",
            "sgd",
            "'row_wise' on cpu for table 't' with pooling sum: .* 2 rows for 4 ranks.*nearest.*table_wise",
        ),
        (spec("t", 90, pooling="none"), cluster(4, device="cuda"), "grid", "sgd", "'grid' on cuda .* without pooling: .*nearest .* row_wise"),
        (spec("t", 90), cluster(4), "table_row_wise", "sgd", "'table_row_wise' on cpu .*gloo.*nearest .* row_wise"),
        (spec("t", 90), cluster(6, local=4, device="cuda"), "table_row_wise", "sgd", "6 ranks are no whole number of hosts of 4"),
        (spec("t", 3), cluster(8, local=4, device="cuda"), "table_row_wise", "sgd", "3 rows for the 4 ranks of a host.*nearest .* table_wise"),
        (spec("t", 90), cluster(4), "column_wise", "rowwise_adagrad", "one state a row"),
        (spec("t", 90), cluster(4, device="cuda"), "grid", "rowwise_adagrad", "one state a row"),
        (spec("t", 90, dim=4), cluster(4), "column_wise", "sgd", "width 4 cannot be cut"),
        (spec("t", 90), cluster(4, device="cuda"), "data_parallel", "adam", "updated once a step"),
    ],
)
def test_case_F05_F09_a_layout_that_does_not_work_is_refused(table: TableSpec, where: Cluster, sharding: str, optimizer: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        placed([table], where, sharding, SparseOptimizer(name=optimizer))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"replicas": 2, "dtype": "fp16"}, "replicas = 2 with dtype 'fp16'.*loses small updates"),
        ({"replicas": 2, "sharding": "table_row_wise"}, "'table_row_wise' for table 't' with replicas = 2.*row_wise"),
        ({"sharding": "data_parallel", "memory": "uvm"}, "'data_parallel' for table 't'.*plain float32"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], words: str) -> None:
    where = cluster(4, local=2, device="cuda")
    with pytest.raises(RequestError, match=words):
        lay_out([spec("t", 90)], SGD, where, TorchRecOptions(**options))
    alone = {name: value for name, value in options.items() if name != "replicas" and name != "memory"}
    assert lay_out([spec("t", 90)], SGD, where, TorchRecOptions(**alone))


def test_tiny_tables_stay_whole_with_auto() -> None:
    assert placed([spec("tiny", 2)], cluster(4), "auto")["tiny"] == Place(sharding="table_wise", ranks=(0,))
