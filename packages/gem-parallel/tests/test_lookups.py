"""Long histories cut into bags of few ids: the same vectors, gradients and updates, bit by bit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gem_core.batch import KeyedJagged
from gem_core.spec import SparseOptimizer, TableSpec
from gem_parallel.sparse import local
from gem_parallel.sparse.copies import copies_of
from gem_parallel.sparse.lookups import PIECE, short_bags, shorten_bags
from gem_parallel.sparse.placement import Cluster, Place
from gem_parallel.sparse.sharded import ShardedGroup, Storage, sharded_groups
from gem_parallel.sparse.shards import draw

Build = Callable[..., Any]
Keyed = Callable[[dict[str, list[list[int]]]], KeyedJagged]
Columns = dict[str, list[list[int]]]


def spec(name: str, *features: str, pooling: str = "none", dim: int = 4) -> TableSpec:
    return TableSpec(name=name, rows=10, dim=dim, features=features, pooling=pooling, init_scale=1.0)


TABLES = (spec("items", "item", "views.item"), spec("kinds", "views.kind"), spec("wide", "w", dim=8), spec("sums", "s", pooling="sum"))
KEYS = tuple(feature for table in TABLES for feature in table.features)


@st.composite
def batches(draw: st.DrawFn) -> Columns:
    """Columns over the same rows, none to four: single ids, short rows and one long one; ids repeat within and across rows."""
    rows = draw(st.integers(0, 4))
    sizes = st.one_of(st.just(0), st.just(1), st.integers(0, 9), st.just(70))
    return {key: [[(7 * i + row) % 10 for i in range(draw(sizes))] for row in range(rows)] for key in KEYS}


def bags_of(columns: KeyedJagged, offsets: Tensor) -> Tensor:
    """Lengths ``[columns, bags]``."""
    return offsets.diff().view(len(columns.keys), -1)


@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(columns=batches(), piece=st.integers(1, 80))
def test_bags_hold_every_id_once_and_stay_in_their_column(keyed: Keyed, columns: Columns, piece: int) -> None:
    batch = keyed(columns)
    offsets = short_bags(batch, piece)
    if max(batch.max_lengths) <= piece:
        assert offsets is batch.offsets
        return
    lengths = bags_of(batch, offsets)
    assert offsets.dtype == torch.int64
    assert offsets[0] == 0
    assert lengths.shape[1] >= batch.rows
    assert 0 <= int(lengths.min()) <= int(lengths.max()) <= piece
    assert (0, *lengths.sum(1).cumsum(0).tolist()) == batch.starts
    assert (lengths.max(1).values - lengths.min(1).values).max() <= 1  # no warp has more to do than another of its column


def test_single_ids_stay_apart_beside_a_long_history(keyed: Keyed) -> None:
    batch = keyed({"item": [[i] for i in range(8)], "views.item": [[1] * 40, *([[]] * 7)]})
    assert bags_of(batch, short_bags(batch, 10)).tolist() == [[1] * 8, [5] * 8]


def test_the_longest_column_decides_how_many_bags_there_are(keyed: Keyed) -> None:
    batch = keyed({"short": [[1], [2]], "long": [[3] * 9, [4] * 2]})
    assert bags_of(batch, short_bags(batch, 2)).tolist() == [[0, 0, 1, 0, 0, 1], [1, 2, 2, 2, 2, 2]]


def finer(engine: Any, piece: int) -> Any:
    """An engine on the CPU that cuts as one on a GPU does."""
    for group in engine._groups:
        group._piece = None if group._pooled else piece
    return engine


def train(engine: Any, data: list[KeyedJagged]) -> list[Tensor]:
    """Every vector of every step; backward gives each a gradient of its own."""
    found = []
    for batch in data:
        out = engine(batch)
        sum((vectors * torch.linspace(0.1, 0.9, vectors.numel()).view_as(vectors) + vectors**2).sum() for vectors in out.values()).backward()
        engine.step()
        found += [out[key].detach().clone() for key in KEYS]
    return found


def assert_same(ours: Any, theirs: Any, data: list[KeyedJagged]) -> None:
    assert all(torch.equal(got, want) for got, want in zip(train(ours, data), train(theirs, data), strict=True))
    got = ours.export_tables()
    for table, tensors in theirs.export_tables().items():
        assert all(torch.equal(got[table][name], tensor) for name, tensor in tensors.items() if isinstance(tensor, Tensor))


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "sgd"])
@settings(max_examples=15, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(columns=st.lists(batches(), min_size=3, max_size=3), piece=st.sampled_from([1, 3, 32]))
def test_case_B01_B02_cutting_changes_no_bit_of_vectors_and_tables(
    engine: Build, keyed: Keyed, optimizer: str, columns: list[Columns], piece: int
) -> None:
    """No rows, no ids, one long row, single ids, repeated ids, two tables in one look-up, row-wise AdaGrad over three steps."""
    data = [keyed(step) for step in columns]
    assert_same(finer(engine("torchrec", TABLES, optimizer), piece), engine("torchrec", TABLES, optimizer), data)


def test_a_cut_across_columns_is_seen(engine: Build, keyed: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: all ids cut evenly, whatever table they are of."""
    data = [keyed({key: [[i % 10 for i in range(5 + 40 * (key == "views.kind"))], []] for key in KEYS})]
    assert_same(finer(engine("torchrec", TABLES), 4), engine("torchrec", TABLES), data)

    def across(columns: KeyedJagged, piece: int) -> Tensor:
        bags = 20 * len(columns.keys)
        return torch.arange(bags + 1) * columns.starts[-1] // bags

    monkeypatch.setattr(local, "short_bags", across)
    with pytest.raises(AssertionError):
        assert_same(finer(engine("torchrec", TABLES), 4), engine("torchrec", TABLES), data)


def test_on_the_cpu_bags_are_the_rows(engine: Build) -> None:
    assert [group._piece for group in engine("torchrec", TABLES)._groups] == [None] * 3


def called(columns: int, offsets: Tensor) -> Tensor | None:
    """The offsets that ``shorten_bags`` puts in the place of these, None where it leaves them."""
    words = {"indices": torch.zeros(int(offsets[-1]), dtype=torch.int64), "offsets": offsets}
    found = shorten_bags(SimpleNamespace(feature_table_map=[0] * columns), (), words)
    if found is None:
        return None
    args, now = found
    assert args == ()
    assert now["indices"] is words["indices"]
    assert now.keys() == words.keys()
    cut: Tensor = now["offsets"]
    return cut


def test_without_numbers_of_the_host_columns_of_twice_the_mean_get_whole_pieces(keyed: Keyed) -> None:
    batch = keyed({"item": [[1], [2]], "views.item": [[3] * 255, []]})
    offsets = called(2, batch.offsets)
    assert offsets is not None
    assert bags_of(batch, offsets).sum(1).tolist() == [2, 255]
    assert sorted(bags_of(batch, offsets)[1].tolist()) == [28] * 6 + [29] * 3


def test_short_rows_and_no_ids_are_left_alone(keyed: Keyed) -> None:
    mean = keyed({"item": [[1] * PIECE] * 3, "views.item": [[2] * (2 * PIECE), [], [3] * PIECE]})
    assert called(2, mean.offsets) is None
    assert called(2, torch.zeros(7, dtype=torch.int64)) is None
    assert called(2, torch.cat([mean.offsets[:-1], mean.offsets[-1:] + 1])) is not None


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(hook: bool) -> ShardedGroup:
    """torchrec's collection of the tables of width 4 without pooling, on one rank; with the hook that a GPU has."""
    cluster = Cluster(world=1, local=1, device="cpu")
    places = {table.name: Place(sharding="table_wise", ranks=(0,)) for table in TABLES[:2]}
    (group,) = sharded_groups(TABLES[:2], places, SparseOptimizer(lr=0.1), torch.device("cpu"), Storage(), copies_of(cluster, 1))
    assert [len(tbe._forward_pre_hooks) for tbe in group.tbes] == [0]
    if hook:
        group.tbes[0].register_forward_pre_hook(shorten_bags, with_kwargs=True)
    draw(group.slices, TABLES, 1)
    return group


def test_torchrecs_collection_gives_the_same_bits_with_shorter_bags(one_rank: None, keyed: Keyed) -> None:
    """Long rows, then short ones that stay as they are."""
    history = {f"views.{name}": [[i % size for i in range(400)], [], [3]] for name, size in (("item", 7), ("kind", 9))}
    long = keyed({"item": [[1], [2], [1]]} | history)
    short = keyed({key: [[1, 1], [2], []] for key in ("item", "views.item", "views.kind")})
    found = []
    for hook in (True, False):
        group = sharded(hook)
        vectors = []
        for batch in (long, short, long):
            out = group.finish(group.look_up(group.start(batch)))
            sum((v * torch.linspace(0.1, 0.9, v.numel()).view_as(v)).sum() for v in out.values()).backward()
            vectors += [out[key].detach() for key in group.keys]
        found.append([*vectors, *(tensor.clone() for piece in group.slices for tensor in piece.tensors.values())])
    assert len(found[0]) == 9 + 4
    assert all(torch.equal(cut, whole) for cut, whole in zip(*found, strict=True))
