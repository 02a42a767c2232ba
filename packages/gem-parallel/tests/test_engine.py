"""The ``torchrec`` engine in one process against core's ``torch`` engine, which is itself tested against a dense float64 embedding."""

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gem_core.batch import KeyedJagged
from gem_core.spec import MachineError, RequestError, SparseOptimizer, TableSpec, load_object, table_state
from gem_parallel import plugin
from gem_parallel.sparse.options import TorchRecOptions

OPTIMIZERS = ("rowwise_adagrad", "sgd")
Build = Callable[..., Any]
Keyed = Callable[[dict[str, list[list[int]]]], KeyedJagged]


def spec(name: str = "t", *, rows: int = 10, dim: int = 4, features: tuple[str, ...] = ("f",), pooling: str = "none") -> TableSpec:
    return TableSpec(name=name, rows=rows, dim=dim, features=features, pooling=pooling, init_scale=1.0)


TABLES = (
    spec("ids", features=("a", "b")),
    spec("more.ids", features=("c",), dim=8),
    spec("sums", features=("d",), pooling="sum"),
    spec("means", features=("e", "f"), pooling="mean", dim=12),
    spec("other.means", features=("g",), pooling="mean"),
)
KEYS = "cadbgef"  # neither by table nor by pooling


def same(got: dict[str, dict[str, Tensor]], want: dict[str, dict[str, Tensor]], **bounds: float) -> None:
    assert set(got) == set(want)
    for table, tensors in want.items():
        assert set(got[table]) == set(tensors)
        for name, tensor in tensors.items():
            torch.testing.assert_close(got[table][name], tensor, **bounds)


def train(engine: Any, batches: list[KeyedJagged]) -> list[dict[str, Tensor]]:
    outputs = []
    for step, batch in enumerate(batches):
        engine.set_lr(0.1 / (step + 1))
        engine.zero_grad()
        out = engine(batch)
        sum((vectors * torch.arange(1.0, vectors.shape[1] + 1, device=vectors.device) + vectors**2).sum() for vectors in out.values()).backward()
        engine.step()
        outputs.append({key: vectors.detach().clone().cpu() for key, vectors in out.items()})
    return outputs


def ids() -> st.SearchStrategy[list[list[int]]]:
    return st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=3, max_size=3)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@settings(max_examples=20, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(columns=st.lists(st.fixed_dictionaries({key: ids() for key in KEYS}), min_size=5, max_size=5))
def test_five_steps_equal_the_torch_engine(engine: Build, keyed: Keyed, optimizer: str, columns: list[dict[str, list[list[int]]]]) -> None:
    batches = [keyed(step) for step in columns]
    ours, theirs = engine("torchrec", TABLES, optimizer), engine("torch", TABLES, optimizer)
    for got, want in zip(train(ours, batches), train(theirs, batches)):
        assert set(got) == set(want) == set(KEYS)
        for key, vectors in want.items():
            assert got[key].dtype == torch.float32
            torch.testing.assert_close(got[key], vectors, rtol=1e-5, atol=1e-5)
    same(ours.export_tables(), theirs.export_tables(), rtol=1e-5, atol=1e-5)


def test_the_comparison_sees_a_planted_fault(engine: Build, keyed: Keyed) -> None:
    """One wrong id in one feature of one step turns it red."""
    columns = {key: [[1, 3], [2]] for key in KEYS}
    ours, theirs = engine("torchrec", TABLES), engine("torch", TABLES)
    train(ours, [keyed(columns), keyed(columns)])
    train(theirs, [keyed(columns), keyed({**columns, "f": [[1, 4], [2]]})])
    with pytest.raises(AssertionError):
        same(ours.export_tables(), theirs.export_tables(), rtol=1e-5, atol=1e-5)


# ---- edges -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["none", "sum", "mean"])
def test_case_B02_B17_no_rows_or_no_ids(engine: Build, keyed: Keyed, pooling: str) -> None:
    tables = engine("torchrec", (spec(features=("a", "b"), pooling=pooling),))
    before = tables.export_tables()["t"]["weight"]
    for batch in (keyed({"a": [], "b": []}), keyed({"a": [[], []], "b": [[], []]})):
        out = tables(batch)
        rows = 0 if pooling == "none" else batch.rows
        assert {key: (tuple(vectors.shape), vectors.dtype) for key, vectors in out.items()} == dict.fromkeys(("a", "b"), ((rows, 4), torch.float32))
        sum(vectors.sum() for vectors in out.values()).backward()
    assert torch.equal(tables.export_tables()["t"]["weight"], before)


def test_case_B02_empty_float_ids(engine: Build) -> None:
    """fbgemm stops on them: its bounds check has no float kernel."""
    batch = KeyedJagged(("f",), torch.tensor([]), torch.zeros(3, dtype=torch.int64), 2, (0, 0), (0,))
    assert engine("torchrec", (spec(),))(batch)["f"].shape == (0, 4)


def test_case_B01_keys_without_rows_keep_their_keys(engine: Build, keyed: Keyed) -> None:
    out = engine("torchrec", TABLES)(keyed({key: [] for key in KEYS}))
    assert set(out) == set(KEYS)


def test_case_B16_features_of_one_table_keep_their_boundaries(engine: Build, keyed: Keyed) -> None:
    g = torch.Generator().manual_seed(0)
    short, long = torch.randint(0, 50, (33, 1), generator=g).tolist(), torch.randint(0, 50, (1280,), generator=g).tolist()
    columns = {"short": short, "long": [long] + [[]] * 32}
    tables = engine("torchrec", (spec(rows=50, features=("long", "short")),), "sgd")
    weight = tables.export_tables()["t"]["weight"]
    out = tables(keyed(columns))
    assert torch.equal(out["short"], weight[[ids[0] for ids in short]])
    assert torch.equal(out["long"], weight[long])


def test_case_B18_C08_G02_means_of_empty_and_long_bags_and_int32_ids(engine: Build) -> None:
    """An empty bag is zero, a bag of 10,000 sums in float32, and int32 ids are widened before they address a row."""
    ids = torch.arange(10_000, dtype=torch.int32)
    batch = KeyedJagged(("f",), ids, torch.tensor([0, 0, 10_000]), 2, (0, 10_000), (10_000,))
    tables = engine("torchrec", (spec(rows=10_000, pooling="mean"),))
    out = tables(batch)["f"]
    assert torch.equal(out[0], torch.zeros(4))
    torch.testing.assert_close(out[1].double(), tables.export_tables()["t"]["weight"].double().mean(0), rtol=1e-4, atol=1e-6)


def test_case_F13_two_engines_share_one_batch(engine: Build, keyed: Keyed) -> None:
    batch = keyed({key: [[1], [2]] for key in KEYS})
    first, second = engine("torchrec", TABLES), engine("torchrec", TABLES)
    (sum(v.sum() for v in first(batch).values()) + sum(v.sum() for v in second(batch).values())).backward()
    same(first.export_tables(), second.export_tables(), rtol=0, atol=0)


def test_case_G01_outputs_are_float32_under_autocast(engine: Build, keyed: Keyed) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = engine("torchrec", TABLES)(keyed({key: [[1], []] for key in KEYS}))
    assert {vectors.dtype for vectors in out.values()} == {torch.float32}


def test_a_hundred_thousand_ids(engine: Build) -> None:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 5000, (100_000,), generator=g)
    batch = KeyedJagged(("f",), ids, torch.tensor([0, 100_000]), 1, (0, 100_000), (100_000,))
    grad = torch.randn(100_000, 8, generator=g)
    engines = [engine(name, (spec(rows=5000, dim=8),)) for name in ("torchrec", "torch")]
    for tables in engines:
        tables(batch)["f"].backward(grad)
        tables.step()
    same(engines[0].export_tables(), engines[1].export_tables(), rtol=1e-4, atol=1e-4)


def test_no_tables_at_all(engine: Build) -> None:
    tables = engine("torchrec", ())
    assert tables(KeyedJagged.from_columns({}, 3)) == {}
    assert tables.export_tables() == {}


# ---- updates and state ---------------------------------------------------------------------------------------------------------------


def test_evaluation_changes_nothing(engine: Build, keyed: Keyed) -> None:
    tables = engine("torchrec", TABLES)
    before = tables.export_tables()
    with torch.no_grad():
        out = tables(keyed({key: [[1], [2]] for key in KEYS}))
    assert not any(vectors.requires_grad for vectors in out.values())
    same(tables.export_tables(), before, rtol=0, atol=0)


def test_set_lr_before_forward_counts_and_later_is_an_error(engine: Build, keyed: Keyed) -> None:
    """fbgemm reads the rate in forward, so a later change would be lost without a word."""
    tables = engine("torchrec", (spec(),), "sgd")
    before = tables.export_tables()["t"]["weight"]
    tables.set_lr(0.5)
    out = tables(keyed({"f": [[3]]}))["f"]
    tables.set_lr(0.5)  # the same rate is no change
    with pytest.raises(RequestError, match="before the forward pass"):
        tables.set_lr(0.25)
    out.sum().backward()
    tables.step()
    tables.set_lr(0.25)
    torch.testing.assert_close(tables.export_tables()["t"]["weight"][3], before[3] - 0.5)
    with pytest.raises(RequestError, match="learning rate"):
        tables.set_lr(float("nan"))


def test_first_weights_equal_the_torch_engines(engine: Build) -> None:
    for seed in (1, 2):
        ours, theirs = (engine(name, TABLES, seed=seed).export_tables() for name in ("torchrec", "torch"))
        same(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(["torch", "torchrec"], 2)))
def test_case_E02_E08_a_checkpoint_moves_between_engines(engine: Build, keyed: Keyed, optimizer: str, source: str, target: str) -> None:
    batches = [keyed({key: [[i, 3], [], [9]] for i, key in enumerate(KEYS)})] * 2
    first, second = engine(source, TABLES, optimizer), engine(target, TABLES, optimizer, seed=7)
    train(first, batches)
    saved = first.export_tables()
    for table in TABLES:
        assert {name: tuple(t.shape) for name, t in saved[table.name].items()} == table_state(table, SparseOptimizer(name=optimizer))
    second.import_tables(saved)
    same(second.export_tables(), saved, rtol=0, atol=0)
    train(first, batches), train(second, batches)
    same(second.export_tables(), first.export_tables(), rtol=1e-5, atol=1e-5)


def test_case_E10_weights_alone_can_be_loaded(engine: Build, keyed: Keyed) -> None:
    tables = engine("torchrec", TABLES)
    train(tables, [keyed({key: [[1], [2]] for key in KEYS})])
    weights = {name: {"weight": tensors["weight"]} for name, tensors in tables.export_tables().items()}
    tables.import_tables(weights)
    for name, tensors in tables.export_tables().items():
        assert torch.equal(tensors["weight"], weights[name]["weight"])
        assert not tensors["state"].any()


def test_an_import_that_does_not_fit_changes_nothing(engine: Build) -> None:
    tables = engine("torchrec", (spec(),))
    before = tables.export_tables()
    for entries in ({}, {"t": {"weight": torch.zeros(3, 4)}}, {"t": {"weight": torch.zeros(10, 4), "exp_avg": torch.zeros(10, 4)}}):
        with pytest.raises(RequestError, match="import"):
            tables.import_tables(entries)
    same(tables.export_tables(), before, rtol=0, atol=0)


# ---- bad input ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [10, 1000, -1])
def test_case_H10_an_id_without_a_row_is_named(engine: Build, keyed: Keyed, bad: int) -> None:
    """fbgemm reads row 0 for an id beyond the table."""
    with pytest.raises(RequestError) as caught:
        engine("torchrec", (spec("item", features=("candidate", "history")),))(keyed({"candidate": [[1]], "history": [[9, bad]]}))
    for word in ("'history'", "'item'", str(bad)):
        assert word in str(caught.value)


def test_negative_lengths_are_refused(engine: Build) -> None:
    """fbgemm moves the offsets into range and goes on."""
    batch = KeyedJagged(("f",), torch.tensor([1, 2, 3]), torch.tensor([0, 2, 1, 3]), 3, (0, 3), (2,))
    with pytest.raises(RequestError, match="fall from 2 to 1"):
        engine("torchrec", (spec(),))(batch)


def test_case_E11_adam_on_the_cpu_and_odd_widths_are_refused(engine: Build) -> None:
    with pytest.raises(MachineError, match="no Adam on the CPU"):
        engine("torchrec", (spec(),), "adam")
    with pytest.raises(RequestError, match=r"'narrow' \(6\).*multiple of 4"):
        engine("torchrec", (spec(), spec("narrow", features=("g",), dim=6)))


def test_unsound_tables_are_refused(engine: Build) -> None:
    with pytest.raises(RequestError, match="'sum' and 'mean'"):
        engine("torchrec", (spec(pooling="sum"), spec(features=("g",), pooling="mean")))


# ---- how it is declared ---------------------------------------------------------------------------------------------------------------


def test_the_root_logger_gets_no_handler(engine: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    engine("torchrec", (spec(),))
    assert logging.getLogger().handlers == []


def test_declarations_load_and_options_are_checked() -> None:
    declared = plugin.gem_embedding_engines()[0]
    assert declared.name == "torchrec"
    assert load_object(declared.options) is TorchRecOptions
    assert TorchRecOptions().sharding == "auto"
    for wrong in (
        {"sharding": "sideways"},
        {"tables": [{"pattern": "x", "sharding": "auto"}]},
        {"dtype": "fp8"},
        {"replicas": True},
        {"forward_comm": "int8"},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            TorchRecOptions(**wrong)  # type: ignore[arg-type]
    made = load_object(declared.load)((spec(),), SparseOptimizer(), device="cpu", seed=1, **TorchRecOptions().model_dump())
    assert list(made.table_names()) == ["t"]
