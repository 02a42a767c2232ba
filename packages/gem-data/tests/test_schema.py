"""schema.toml: what it may say, what it may not, and what models get of it."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.spec import RequestError
from gem_data.schema import Embedding, Id, MultiId, Number, Schema, Sequence, Task, read_schema, to_data_schema, write_schema
from gem_data.schema.files import parse_schema

FULL = """
user = "user_id"
request = "request_id"
time = "timestamp"

[[id]]
name = "item"
encode = "hash"
rows = 100_000

[[id]]
name = "city"
column = "home town"
encode = "vocabulary"
rows = 11
min_count = 3
unknown = "error"

[[multi_id]]
name = "tags"
encode = "pass"
rows = 50
weights = "tag_weights"

[[number]]
name = "price"

[[embedding]]
name = "picture"
width = 64

[[sequence]]
name = "clicks"
max_length = 200
time = "time"

[[sequence.id]]
name = "item"
encode = "hash"
rows = 100_000
table = "item"

[[sequence.id]]
name = "shop"
column = "click_shops"
encode = "hash"
rows = 500

[[sequence.number]]
name = "seconds"

[[sequence]]
name = "likes"
max_length = 20
time = "time"
time_column = "when liked"
truncate = "error"

[[task]]
name = "ctr"
label = "click"

[[task]]
name = "cvr"
label = "bought"
mask = "attributed"
weight = "value"
delay = "wait"
condition = "ctr"
loss_weight = 2
"""


def full() -> dict[str, Any]:
    return tomllib.loads(FULL)


def refused(content: dict[str, Any]) -> str:
    with pytest.raises(RequestError) as caught:
        parse_schema(content)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_every_column_is_listed_once_in_order(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(FULL)
    schema = read_schema(tmp_path / "schema.toml")
    assert schema.columns() == [
        *("user_id", "request_id", "timestamp", "item", "home town", "tags", "price", "picture", "tag_weights"),
        *("clicks.item", "click_shops", "clicks.seconds", "clicks.time", "when liked", "click", "bought", "attributed", "value", "wait"),
    ]
    assert [(key, column) for key, column, _ in schema.id_columns()] == [
        *(("item", "item"), ("city", "home town"), ("tags", "tags"), ("clicks.item", "clicks.item"), ("clicks.shop", "click_shops"))
    ]


def test_models_get_the_same_features_tables_and_tasks() -> None:
    found = to_data_schema(parse_schema(full()))
    ids = found.all_id_features()
    assert {key: (f.cardinality, f.table_name, f.multi) for key, f in ids.items()} == {
        "item": (100_000, "item", False),
        "city": (11, "city", False),
        "tags": (50, "tags", True),
        "clicks.item": (100_000, "item", False),
        "clicks.shop": (500, "shop", False),
    }
    assert [(f.name, f.width) for f in found.dense] == [("price", 1), ("picture", 64)]
    assert [(s.name, s.time, s.max_length, [f.name for f in s.dense]) for s in found.sequences] == [
        ("clicks", True, 200, ["seconds"]),
        ("likes", True, 20, []),
    ]
    assert [(t.name, t.condition, t.weight) for t in found.tasks] == [("ctr", None, 1.0), ("cvr", "ctr", 2.0)]
    assert found.group
    assert not to_data_schema(Schema(task=(Task(name="a", label="b"),))).group


def test_what_is_not_known_yet_is_refused_for_models() -> None:
    with pytest.raises(RequestError, match=r"id 'city': its vocabulary is not built.*gem data prepare"):
        to_data_schema(Schema(id=(Id(name="city", encode="vocabulary"),), task=(Task(name="a", label="b"),)))
    with pytest.raises(RequestError, match="it declares no task"):
        to_data_schema(Schema(id=(Id(name="city", encode="hash", rows=5),)))


COLUMNS = st.text(min_size=1, max_size=8)
NAMES = st.from_regex(r"\A[^./\\\s][^/\\\x00-\x1f]{0,6}\Z")
IDS = st.builds(
    Id, name=NAMES, column=st.none() | NAMES, encode=st.just("hash"), rows=st.integers(2, 2**40), unknown=st.sampled_from(["row0", "error"])
)


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    names = draw(st.lists(NAMES, min_size=2, max_size=2, unique=True))
    ids = draw(st.lists(IDS, max_size=3, unique_by=lambda f: f.name))
    single = [f.model_copy(update={"name": f"i{k}", "column": f"c{k}"}) for k, f in enumerate(ids)]
    group = Sequence(name=names[0], max_length=draw(st.integers(1, 10**6)), time=draw(st.none() | st.just("t")), number=(Number(name=names[1]),))
    return Schema(
        user=draw(st.none() | COLUMNS),
        id=tuple(single),
        multi_id=(MultiId(name="many", column=draw(COLUMNS), encode="vocabulary", min_count=draw(st.integers(1, 9)), weights=draw(COLUMNS)),),
        embedding=(Embedding(name="e", width=draw(st.integers(1, 9))),) if draw(st.booleans()) else (),
        sequence=(group,) if names[1] != "t" else (),
        task=(Task(name="y", label="the label", loss_weight=draw(st.floats(0.1, 9))),) if draw(st.booleans()) else (),
    )


@settings(max_examples=40, deadline=None)
@given(schemas())
def test_a_schema_is_read_back_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, schema: Schema) -> None:
    path = tmp_path_factory.mktemp("s") / "schema.toml"
    write_schema(schema, path)
    assert read_schema(path) == schema


def test_the_written_file_has_a_heading_for_each_entry_and_no_defaults(tmp_path: Path) -> None:
    write_schema(parse_schema(full()), tmp_path / "out.toml")
    text = (tmp_path / "out.toml").read_text()
    assert text.count("[[sequence.id]]") == 2
    assert "row0" not in text
    assert tomllib.loads(text) == full() | {"task": [full()["task"][0], {**full()["task"][1], "loss_weight": 2.0}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"usr": "u"}, "usr is no key of a schema; did you mean 'user'?"),
        ({"zzz": "u"}, "zzz is no key of a schema; keys here are user, request, time"),
        ({"user": 7}, "user: Input should be a valid string"),
        ({"user": ""}, "user: String should have at least 1 character"),
        ({"number": [{"name": "a/b"}]}, "number[0].name: String should match pattern"),
        ({"number": [{"name": ".a"}]}, "number[0].name: String should match pattern"),
        ({"number": [{"name": "clicks.shop"}]}, "feature 'clicks.shop' and sequence 'clicks': two of their columns would be called 'clicks.shop'"),
        ({"id": [{"name": "a", "encod": "hash"}]}, "id[0].encod is no key of a schema; did you mean 'encode'?"),
        ({"id": [{"name": "a", "encode": "hsh", "rows": 5}]}, "id[0].encode: Input should be 'hash', 'vocabulary' or 'pass'"),
        ({"id": [{"name": "a", "encode": "hash", "rows": 1}]}, "id[0].rows: Input should be greater than or equal to 2"),
        ({"id": [{"name": "a", "encode": "hash", "rows": "9"}]}, "id[0].rows: Input should be a valid integer"),
        ({"id": [{"name": "a", "encode": "hash", "rows": 9.0}]}, "id[0].rows: Input should be a valid integer"),
        ({"id": [{"name": "a", "encode": "hash"}]}, "id 'a' is encoded by 'hash' but gives no rows"),
        ({"id": [{"name": "a", "encode": "pass"}]}, "id 'a' is encoded by 'pass' but gives no rows"),
        ({"sequence": [{"name": "s", "max_length": 3}]}, "sequence 's' has no column"),
        ({"sequence": [{"name": "s", "max_length": 0, "time": "t"}]}, "sequence[0].max_length: Input should be greater than or equal to 1"),
        ({"sequence": [{"name": "s", "max_length": 3, "time": "t", "number": [{"name": "t"}]}]}, "sequence 's' declares 't' twice"),
        ({"sequence": [{"name": "s", "max_length": 3, "time_column": "t", "number": [{"name": "x"}]}]}, "gives time_column but no time"),
        (
            {"sequence": [{"name": "s", "max_length": 3, "time": "t", "id": [{"nam": "x"}]}]},
            "sequence[0].id[0].nam is no key of a schema",
        ),
        ({"task": [{"name": "a", "label": "x", "mask": "x"}]}, "task 'a' uses column 'x' as its label and its mask"),
        ({"task": [{"name": "a", "label": "x", "mask": "m", "weight": "m"}]}, "task 'a' uses column 'm' as its mask and its weight"),
        ({"task": [{"name": "a", "label": "x", "weight": "x"}]}, "task 'a' uses column 'x' as its label and its weight"),
        ({"task": [{"name": "a", "label": "x", "condition": "b"}]}, "task 'a' is conditional on 'b', which is no task"),
        ({"task": [{"name": "a", "label": "x", "condition": "a"}]}, "the conditions of tasks run in a circle: a -> a"),
        ({"task": [{"name": "a", "label": "x", "loss_weight": 0}]}, "task[0].loss_weight: Input should be greater than 0"),
        (
            {"task": [{"name": "a", "label": "price"}]},
            "column 'price' is the label of task 'a' and also feature 'price'; the model",
        ),
        ({"task": [{"name": "a", "label": "x", "delay": "price"}]}, "column 'price' is the delay of task 'a' and also feature 'price'"),
    ],
)
def test_a_wrong_schema_is_refused_by_the_place_of_the_fault(change: dict[str, Any], message: str) -> None:
    assert message in refused(full() | change)


@pytest.mark.parametrize("kind", ["id", "multi_id", "number", "embedding", "sequence", "task"])
def test_names_are_used_once(kind: str) -> None:
    content = full()
    content[kind] = [*content[kind], content[kind][0]]
    what = {"sequence": "sequence", "task": "task"}.get(kind, "feature")
    assert f"{what} {content[kind][0]['name']!r} is declared twice" in refused(content)


def test_a_row_feature_of_another_kind_may_not_have_the_same_name() -> None:
    assert "feature 'item' is declared twice" in refused(full() | {"number": [{"name": "item"}]})


@pytest.mark.parametrize(("key", "value"), [("rows", 7), ("encode", "pass"), ("min_count", 2)])
def test_features_of_one_table_encode_alike(key: str, value: object) -> None:
    content = full()
    content["sequence"][0]["id"][0][key] = value
    assert f"ids 'item' and 'clicks.item' share table 'item' but differ in {key}" in refused(content)


def test_all_faults_are_told_at_once() -> None:
    message = refused({"usr": "u", "id": [{"name": "a"}], "task": [{"name": "b"}]})
    assert "usr" in message
    assert "id[0].encode: Field required" in message
    assert "task[0].label: Field required" in message


def test_a_missing_file_and_one_that_is_no_toml_are_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"none\.toml: there is no such file.*gem data inspect"):
        read_schema(tmp_path / "none.toml")
    with pytest.raises(RequestError, match="it cannot be read"):
        read_schema(tmp_path)
    (tmp_path / "bad.toml").write_text("user = ")
    with pytest.raises(RequestError, match=r"bad\.toml: it is no TOML"):
        read_schema(tmp_path / "bad.toml")
    (tmp_path / "bad.toml").write_bytes(b'user = "\xff"')
    with pytest.raises(RequestError, match="it is no TOML"):
        read_schema(tmp_path / "bad.toml")
