import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st

from gem_core.batch import check_offsets
from gem_core.spec import DataSchema, DenseFeature, IdFeature, SequenceFeature, Task
from gem_core.testing.strategies import batches, jagged_lengths, jagged_offsets, random_batch

SCHEMA = DataSchema(
    ids=(IdFeature(name="user", cardinality=9), IdFeature(name="tags", cardinality=4, multi=True)),
    dense=(DenseFeature(name="age"), DenseFeature(name="text", width=3)),
    sequences=(
        SequenceFeature(name="clicks", ids=(IdFeature(name="item", cardinality=7),), dense=(DenseFeature(name="price"),), time=True, max_length=12),
        SequenceFeature(name="views", ids=(IdFeature(name="item", cardinality=7),), max_length=5),
    ),
    tasks=(Task(name="ctr"), Task(name="cvr", condition="ctr")),
    group=True,
)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(lengths=jagged_lengths(min_rows=1, max_rows=4, max_length=33))
def test_lengths_keep_their_limits(lengths):
    assert 1 <= len(lengths) <= 4
    assert all(0 <= length <= 33 for length in lengths)


def test_lengths_reach_the_awkward_cases_and_shrink_to_little():
    quick = settings(derandomize=True, database=None, max_examples=500)
    assert find(jagged_lengths(), lambda lengths: True, settings=quick) == []
    assert find(jagged_lengths(), lambda lengths: len(lengths) > 2 and not any(lengths), settings=quick) == [0, 0, 0]
    assert find(jagged_lengths(), lambda lengths: max(lengths, default=0) > 64, settings=quick) == [65]
    assert find(jagged_lengths(), lambda lengths: 0 in lengths and max(lengths) > 20, settings=quick)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(offsets=jagged_offsets(max_rows=5, max_length=9))
def test_offsets_are_sound(offsets):
    check_offsets(offsets, int(offsets[-1]), "drawn")


@settings(max_examples=30, deadline=None, derandomize=True)
@given(batch=batches(SCHEMA, max_rows=5))
def test_batches_fit_their_schema(batch):
    batch.check_labels()
    assert batch.ids.keys == ("user", "tags", "clicks.item", "views.item")
    assert len(batch.labels["ctr"]) == batch.rows == batch.ids.rows
    for key, feature in SCHEMA.all_id_features().items():
        column = batch.ids[key]
        assert column.rows == batch.rows
        assert not column.values.numel() or int(column.values.max()) < feature.cardinality
    for group in SCHEMA.sequences:
        jagged = batch.event_offsets[group.name]
        assert torch.equal(jagged.offsets, batch.ids[f"{group.name}.item"].offsets)
        assert jagged.max_length <= group.max_length
    assert batch.event_dense["clicks.price"].shape == (len(batch.event_time["clicks"]), 1)
    assert batch.dense["text"].shape == (batch.rows, 3)
    assert "views" not in batch.event_time
    assert batch.groups is not None


def test_a_batch_may_have_no_rows_and_equal_seeds_agree():
    assert find(batches(SCHEMA), lambda batch: True, settings=settings(derandomize=True, database=None)).rows == 0
    one, two, other = (random_batch(SCHEMA, 5, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.ids.values, two.ids.values)
    assert not torch.equal(one.dense["text"], other.dense["text"])


def test_strategies_are_hypothesis_strategies():
    assert isinstance(jagged_lengths(), st.SearchStrategy)
