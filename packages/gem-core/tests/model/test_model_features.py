"""Non-sequence tokens and the tables behind them."""

from types import ModuleType

import pytest
import torch

from gem_core.batch import Jagged, KeyedJagged, lengths_to_offsets
from gem_core.model.features import FeatureTokens, NumberCode, TokenLinear, target_tokens
from gem_core.model.gem import GemOptions
from gem_core.model.options import FeatureOptions
from gem_core.model.tables import bias_columns, make_tables, poolings
from gem_core.spec import DataSchema, IdFeature, RequestError, SequenceFeature, Task


def tokens_of(schema: DataSchema, dim: int = 8, wide: bool = False, **features: object) -> tuple[FeatureTokens, list[object]]:
    options = GemOptions.model_validate({"features": {"embedding_dim": 8} | features, "wide": wide})
    tables = make_tables(schema, options)
    return FeatureTokens(schema, tables, options.features, dim), tables


@pytest.mark.parametrize(
    ("numbers", "names"),
    [
        ("each", ("user", "item", "tags", "country", "age", "count", "vector")),
        ("group", ("user", "item", "tags", "country", "numbers.0", "numbers.1", "vector")),
        ("both", ("user", "item", "tags", "country", "age", "count", "numbers.0", "numbers.1", "vector")),
    ],
)
def test_one_token_a_feature_in_schema_order(kit: ModuleType, numbers: str, names: tuple[str, ...]) -> None:
    layer, tables = tokens_of(kit.FULL, numbers=numbers, group_tokens=2)
    batch = kit.make_batch(kit.FULL, [[1, 1]] * 3)
    x = layer(batch, kit.Lookup(tables)(batch.ids), layer.described(batch))
    assert layer.names == names
    assert x.shape == (3, layer.count, 8)
    empty = kit.make_batch(kit.FULL, [])
    assert layer(empty, kit.Lookup(tables)(empty.ids), layer.described(empty)).shape == (0, layer.count, 8)


def test_without_features_there_is_one_learned_token(kit: ModuleType) -> None:
    layer, _ = tokens_of(kit.SCHEMAS["sequences_only"])
    x = layer(kit.make_batch(kit.SCHEMAS["sequences_only"], [[1, 1]] * 2), {}, None)
    assert layer.names == ("constant",)
    assert layer.numbers_width == 0
    assert x.shape == (2, 1, 8)
    assert torch.equal(x[0], x[1])


def test_ids_go_through_unchanged_when_the_widths_agree(kit: ModuleType) -> None:
    layer, tables = tokens_of(kit.SCHEMAS["one_group"], norm=False)
    batch = kit.make_batch(kit.SCHEMAS["one_group"], [[1]] * 3)
    embedded = kit.Lookup(tables)(batch.ids)
    assert layer.project is None
    torch.testing.assert_close(layer(batch, embedded)[:, 1], embedded["item"])


def test_each_id_has_its_own_projection_when_they_differ(kit: ModuleType) -> None:
    layer, tables = tokens_of(kit.SCHEMAS["one_group"], dim=5, norm=False)
    batch = kit.make_batch(kit.SCHEMAS["one_group"], [[1]] * 3)
    embedded = kit.Lookup(tables)(batch.ids)
    assert layer.project is not None
    want = embedded["country"] @ layer.project.weight[3] + layer.project.bias[3]
    torch.testing.assert_close(layer(batch, embedded)[:, 3], want)


def test_first_order_terms_are_the_bias_columns(kit: ModuleType) -> None:
    layer, tables = tokens_of(kit.FULL, wide=True)
    batch = kit.make_batch(kit.FULL, [[1, 1]] * 3)
    embedded = kit.Lookup(tables)(batch.ids)
    first = layer.first_order(batch, embedded, 2)
    want = sum(embedded[name][:, 8:10] for name in ("user", "item", "tags", "country"))
    torch.testing.assert_close(first, want)


def test_a_single_feature_with_several_ids_is_named(kit: ModuleType) -> None:
    schema = DataSchema(ids=(IdFeature(name="a", cardinality=4),), tasks=(Task(name="y"),))
    layer, tables = tokens_of(schema)
    batch = kit.make_batch(schema, [[]] * 2)
    ids = KeyedJagged.from_columns({"a": Jagged(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]), 2)}, 2)
    with pytest.raises(RequestError, match=r"'a': 3 ids for 2 rows"):
        layer(batch, kit.Lookup(tables)(ids))


def test_multi_ids_of_a_table_that_events_share_are_averaged_here(kit: ModuleType) -> None:
    group = SequenceFeature(name="g", ids=(IdFeature(name="x", cardinality=9, table="t"),), max_length=4)
    schema = DataSchema(ids=(IdFeature(name="many", cardinality=9, multi=True, table="t"),), sequences=(group,), tasks=(Task(name="y"),))
    layer, tables = tokens_of(schema, norm=False)
    batch = kit.make_batch(schema, [[2], [0], [1]])
    many = Jagged(torch.tensor([1, 2, 3]), lengths_to_offsets(torch.tensor([2, 0, 1])), 2)
    embedded = {"many": torch.arange(24.0).view(3, 8)}
    ids = KeyedJagged.from_columns({"many": many, "g.x": batch.ids["g.x"]}, 3)
    batch.__dict__["ids"] = ids
    x = layer(batch, embedded)
    assert poolings(tables) == {"many": "none", "g.x": "none"}
    torch.testing.assert_close(x[:, 0], torch.stack([embedded["many"][:2].mean(0), torch.zeros(8), embedded["many"][2]]))


def test_a_number_does_not_depend_on_its_batch_and_keeps_its_digits(kit: ModuleType) -> None:
    """Counts beyond bf16's and even float32's spacing of integers are compressed in float32 before any low-precision matmul."""
    torch.manual_seed(0)
    code = NumberCode(1, FeatureOptions())
    alone, together = code(torch.tensor([[5.0]])), code(torch.tensor([[5.0], [1e9]]))
    assert torch.equal(alone[0], together[0])
    with torch.autocast("cpu", torch.bfloat16):
        close = code(torch.tensor([[1000.0], [1001.0]]))
    assert close.dtype == torch.float32
    assert not torch.equal(close[0], close[1])
    assert torch.isfinite(code(torch.tensor([[-1e30], [0.0]]))).all()


def test_number_code_is_value_sine_cosine() -> None:
    code = NumberCode(2, FeatureOptions(frequencies=1, compress=False))
    x = torch.tensor([[0.5, -2.0]])
    frequency = code.frequency
    assert frequency is not None
    angle = 2 * torch.pi * frequency[:, 0] * x[0]
    torch.testing.assert_close(code(x)[0], torch.stack([x[0], angle.sin(), angle.cos()], dim=1))
    plain = NumberCode(2, FeatureOptions(frequencies=0))
    torch.testing.assert_close(plain(x)[0, :, 0], torch.tensor([1.5, -3.0]).abs().log() * torch.tensor([1.0, -1.0]))
    assert plain.width == 1


def test_token_linear_flops_and_values() -> None:
    layer = TokenLinear(3, 4, 5)
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(layer(x)[1, 2], x[1, 2] @ layer.weight[2] + layer.bias[2])
    assert layer.flops(2) == 2 * 2 * 3 * 4 * 5


def test_features_flops_by_hand(kit: ModuleType) -> None:
    layer, _ = tokens_of(kit.FULL, dim=6, numbers="both", frequencies=2)
    ids, each, group, vector = 4 * 8 * 6, 2 * 5 * 6, 2 * 5 * 12 + 12 * 6, 3 * 6
    assert layer.flops(7) == 7 * 2 * (ids + each + group + vector)


def test_the_candidate_is_found_through_its_table(kit: ModuleType) -> None:
    names = tuple(feature.name for feature in kit.FULL.ids)
    assert target_tokens(kit.FULL, kit.CLICKS, names) == [1]
    assert target_tokens(kit.FULL, kit.VIEWS, names) == []


class TestTables:
    def test_shared_table_and_pooling(self, kit: ModuleType) -> None:
        tables = {t.name: t for t in make_tables(kit.FULL, GemOptions())}
        assert tables["item"].features == ("item", "clicks.item")
        assert {name: t.pooling for name, t in tables.items()} == {name: "mean" if name == "tags" else "none" for name in tables}
        assert tables["shop"].rows == 7
        assert all(t.dim == 32 and t.init_scale == 0.05 for t in tables.values())

    def test_bias_columns_only_where_rows_look_up(self, kit: ModuleType) -> None:
        dims = {t.name: t.dim for t in make_tables(kit.FULL, GemOptions(wide=True))}
        assert dims == {"user": 36, "item": 36, "tags": 36, "country": 36, "shop": 32, "page": 32}
        assert [bias_columns(n) for n in (1, 4, 5)] == [4, 4, 8]

    def test_pooled_histories(self, kit: ModuleType) -> None:
        pooled = {t.name: t.pooling for t in make_tables(kit.FULL, GemOptions(), pool_sequences=True)}
        assert pooled == {"user": "none", "item": "mean", "tags": "mean", "country": "none", "shop": "mean", "page": "mean"}
        assert "shop" not in {t.name for t in make_tables(kit.FULL, GemOptions(), sequences=False)}

    def test_one_table_two_cardinalities(self) -> None:
        schema = DataSchema(
            ids=(IdFeature(name="a", cardinality=4, table="t"), IdFeature(name="b", cardinality=5, table="t")), tasks=(Task(name="y"),)
        )
        with pytest.raises(RequestError, match=r"table 't'.*'a': 4, 'b': 5"):
            make_tables(schema, GemOptions())

    def test_multi_valued_event_column(self) -> None:
        group = SequenceFeature(name="g", ids=(IdFeature(name="x", cardinality=9, multi=True),), max_length=4)
        with pytest.raises(RequestError, match=r"event column 'g.x'"):
            make_tables(DataSchema(sequences=(group,), tasks=(Task(name="y"),)), GemOptions())
