"""The ``torch`` engine against a dense float64 embedding with hand-written update rules."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import embedding_bag

from gem_core.batch import Jagged, KeyedJagged, lengths_to_offsets
from gem_core.builtin.embedding import TorchEmbeddings
from gem_core.ops.rows import sum_rows
from gem_core.spec import RequestError, SparseOptimizer, TableSpec, table_seed, table_state

torch.set_num_threads(1)
OPTIMIZERS = ("rowwise_adagrad", "sgd", "adam")
POOLINGS = ("none", "sum", "mean")


def spec(name: str = "t", **fields: object) -> TableSpec:
    words = {"rows": 10, "dim": 4, "features": ("f",), "init_scale": 1.0} | fields
    return TableSpec(name=name, **words)  # type: ignore[arg-type]


def keyed(columns: dict[str, list[list[int]]]) -> KeyedJagged:
    """A batch from lists: ``{feature: [ids of each row]}``."""
    rows = len(next(iter(columns.values())))
    packed = {}
    for key, lists in columns.items():
        lengths = torch.tensor([len(ids) for ids in lists], dtype=torch.int64)
        packed[key] = Jagged(torch.tensor([i for ids in lists for i in ids], dtype=torch.int64), lengths_to_offsets(lengths), 0)
    return KeyedJagged.from_columns(packed, rows)


def engine(*tables: TableSpec, optimizer: str = "sgd", lr: float = 0.1, seed: int = 1) -> TorchEmbeddings:
    return TorchEmbeddings(tables, SparseOptimizer(name=optimizer, lr=lr), device="cpu", seed=seed)


class Dense:
    """One table as a dense float64 parameter, updated by the formulas of ``SparseOptimizer`` on the rows that were looked up."""

    def __init__(self, weight: Tensor, pooling: str, optimizer: str, lr: float) -> None:
        self.weight = weight.double().clone().requires_grad_()
        self.pooling, self.optimizer, self.lr, self.updates = pooling, optimizer, lr, 0
        self.state = torch.zeros(weight.shape[0], dtype=torch.float64)
        self.first, self.second = torch.zeros_like(self.weight).detach(), torch.zeros_like(self.weight).detach()

    def __call__(self, column: Jagged) -> Tensor:
        if self.pooling == "none":
            return self.weight[column.values]
        if column.rows == 0:
            return self.weight[:0]
        return embedding_bag(column.values, self.weight, column.offsets, mode=self.pooling, include_last_offset=True)

    @torch.no_grad()
    def step(self, touched: Tensor) -> None:
        self.updates += 1
        grad = torch.zeros_like(self.weight) if self.weight.grad is None else self.weight.grad
        for row in touched.unique().tolist():
            g = grad[row]
            if self.optimizer == "sgd":
                change = g
            elif self.optimizer == "rowwise_adagrad":
                self.state[row] += (g**2).mean()
                change = g / (self.state[row].sqrt() + 1e-8)
            else:
                self.first[row] = 0.9 * self.first[row] + 0.1 * g
                self.second[row] = 0.999 * self.second[row] + 0.001 * g**2
                change = self.first[row] / (1 - 0.9**self.updates) / ((self.second[row] / (1 - 0.999**self.updates)).sqrt() + 1e-8)
            self.weight[row] -= self.lr * change
        self.weight.grad = None


def jagged_rows(high: int) -> st.SearchStrategy[list[list[int]]]:
    return st.lists(st.lists(st.integers(0, high - 1), max_size=5), min_size=4, max_size=4)


@pytest.mark.parametrize(("optimizer", "pooling"), list(itertools.product(OPTIMIZERS, POOLINGS)))
@settings(max_examples=20, derandomize=True, deadline=None)
@given(batches=st.lists(st.tuples(jagged_rows(10), jagged_rows(10)), min_size=2, max_size=3))
def test_equals_a_dense_float64_embedding(optimizer: str, pooling: str, batches: list[tuple[list[list[int]], list[list[int]]]]) -> None:
    """Forward, gradient and several updates, with duplicates inside and across two features of one table."""
    tables = engine(spec(features=("a", "b"), pooling=pooling), optimizer=optimizer)
    dense = Dense(tables.weights[0].detach(), pooling, optimizer, 0.1)
    for a, b in batches:
        batch = keyed({"a": a, "b": b})
        got = tables(batch)
        want = {key: dense(batch[key]) for key in ("a", "b")}
        for key in ("a", "b"):
            assert got[key].dtype == torch.float32
            torch.testing.assert_close(got[key].double(), want[key], rtol=1e-5, atol=1e-5)
        for out in (got, want):
            factor = torch.linspace(-1, 2, 4, dtype=out["a"].dtype)
            ((out["a"] * factor).sum() + (out["b"] * factor).sum() * 2).backward()
        tables.step()
        dense.step(batch.values)
    torch.testing.assert_close(tables.weights[0].double(), dense.weight, rtol=2e-5, atol=2e-5)


def test_the_dense_comparison_sees_a_planted_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that counts a repeated id once must not pass the comparison above."""

    def first_only(ids: Tensor, rows: Tensor, limit: int, source: Tensor | None = None) -> tuple[Tensor, Tensor]:
        unique, sums = sum_rows(ids, rows, limit, source)
        _, counts = ids.sort().values.unique_consecutive(return_counts=True)
        return unique, sums / counts[:, None]

    monkeypatch.setattr("gem_core.builtin.embedding.sum_rows", first_only)
    with pytest.raises(AssertionError):
        test_equals_a_dense_float64_embedding.hypothesis.inner_test("sgd", "none", [([[3, 3]] * 4, [[3]] * 4)])  # type: ignore[attr-defined]


@settings(max_examples=50, derandomize=True, deadline=None)
@given(ids=st.lists(st.integers(0, 6), max_size=40), limit=st.sampled_from([7, 2**40]))
def test_sum_rows_equals_index_add(ids: list[int], limit: int) -> None:
    index = torch.tensor(ids, dtype=torch.int64)
    rows = torch.arange(len(ids) * 3, dtype=torch.float32).view(-1, 3)
    unique, sums = sum_rows(index, rows, limit)
    assert unique.dtype == torch.int64
    assert unique.tolist() == sorted(set(ids))
    assert torch.equal(torch.zeros(7, 3).index_add(0, index, rows)[unique], sums)


# ---- pooling and shapes ------------------------------------------------------------------------------------------------------------


def test_case_B18_mean_of_an_empty_bag_is_zero_with_zero_gradient() -> None:
    tables = engine(spec(pooling="mean"))
    before = tables.weights[0].detach().clone()
    out = tables(keyed({"f": [[], [2, 3], []]}))["f"]
    assert torch.equal(out[[0, 2]], torch.zeros(2, 4))
    (out[0] * 7 + out[2]).sum().backward()  # only the empty bags have a gradient
    tables.step()
    assert torch.equal(tables.weights[0], before)
    assert torch.isfinite(tables.weights[0]).all()


@pytest.mark.parametrize("pooling", POOLINGS)
def test_case_B02_a_batch_without_rows_or_without_ids(pooling: str) -> None:
    tables = engine(spec(features=("a", "b"), pooling=pooling), optimizer="rowwise_adagrad")
    before = tables.weights[0].detach().clone()
    for batch in (keyed({"a": [], "b": []}), keyed({"a": [[], []], "b": [[], []]})):
        out = tables(batch)
        rows = 0 if pooling == "none" else batch.rows
        assert {key: tuple(vectors.shape) for key, vectors in out.items()} == {"a": (rows, 4), "b": (rows, 4)}
        sum(vectors.sum() for vectors in out.values()).backward()
        tables.step()
    assert torch.equal(tables.weights[0], before)


def test_case_B02_empty_float_ids_become_int64() -> None:
    batch = KeyedJagged(("f",), torch.tensor([]), torch.zeros(3, dtype=torch.int64), 2, (0, 0), (0,))
    assert batch.values.dtype == torch.int64
    assert engine(spec())(batch)["f"].shape == (0, 4)


def test_case_B17_empty_outputs_are_float32() -> None:
    for pooling in POOLINGS:
        assert engine(spec(pooling=pooling))(keyed({"f": []}))["f"].dtype == torch.float32


def test_case_C08_int32_ids_are_widened() -> None:
    ids = torch.tensor([1, 2], dtype=torch.int32)
    batch = KeyedJagged(("f",), ids, torch.tensor([0, 2]), 1, (0, 2), (2,))
    assert batch.values.dtype == torch.int64
    assert torch.equal(engine(spec())(batch)["f"], engine(spec())(keyed({"f": [[1, 2]]}))["f"])


def test_float_ids_are_refused() -> None:
    with pytest.raises(RequestError, match="float32"):
        KeyedJagged(("f",), torch.tensor([1.5]), torch.tensor([0, 1]), 1, (0, 1), (1,))
    with pytest.raises(RequestError, match=r"'f'.*float32"):
        KeyedJagged.from_columns({"f": Jagged(torch.tensor([1.5]), torch.tensor([0, 1]), 1)}, 1)


def test_case_B16_features_of_one_table_keep_their_boundaries() -> None:
    """33 and 1280 look-ups with shared ids, in a batch whose other columns lie between them."""
    g = torch.Generator().manual_seed(0)
    short, long = torch.randint(0, 50, (33,), generator=g), torch.randint(0, 50, (1280,), generator=g)
    tables = engine(spec("item", rows=50, features=("candidate", "history")), spec("other", features=("between",)))
    batch = KeyedJagged.from_columns(
        {
            "candidate": Jagged(short, lengths_to_offsets(torch.ones(33)), 1),
            "between": Jagged(torch.zeros(0), torch.zeros(34, dtype=torch.int64), 0),
            "history": Jagged(long, lengths_to_offsets(torch.tensor([1280] + [0] * 32)), 1280),
        },
        33,
    )
    out = tables(batch)
    weight = tables.weights[0].detach().clone()
    assert torch.equal(out["candidate"], weight[short])
    assert torch.equal(out["history"], weight[long])
    (out["candidate"].sum() + out["history"].sum()).backward()
    tables.step()
    counts = torch.bincount(torch.cat([short, long]), minlength=50)
    torch.testing.assert_close(tables.weights[0], weight - 0.1 * counts[:, None])


def test_case_F13_two_engines_share_one_batch() -> None:
    batch = keyed({"f": [[1], [2]]})
    first, second = engine(spec()), engine(spec())
    (first(batch)["f"].sum() + second(batch)["f"].sum()).backward()
    first.step(), second.step()
    assert torch.equal(first.weights[0], second.weights[0])


def test_case_G01_outputs_are_float32_under_autocast() -> None:
    tables = engine(spec(pooling="sum"), spec("u", features=("g",)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = tables(keyed({"f": [[1, 2]], "g": [[3]]}))
    assert {vectors.dtype for vectors in out.values()} == {torch.float32}


def test_case_G02_long_bags_accumulate_in_float32() -> None:
    tables = engine(spec(rows=10_000, pooling="sum"))
    out = tables(keyed({"f": [list(range(10_000))]}))["f"]
    torch.testing.assert_close(out[0].double(), tables.weights[0].detach().double().sum(0), rtol=1e-5, atol=1e-3)


def test_a_hundred_thousand_ids() -> None:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 5000, (100_000,), generator=g)
    tables = engine(spec(rows=5000, dim=8), optimizer="sgd", lr=1.0)
    before = tables.weights[0].detach().clone()
    batch = KeyedJagged(("f",), ids, torch.tensor([0, 100_000]), 1, (0, 100_000), (100_000,))
    grad = torch.randn(100_000, 8, generator=g)
    tables(batch)["f"].backward(grad)
    tables.step()
    want = before.double().index_add(0, ids, grad.double(), alpha=-1.0)
    torch.testing.assert_close(tables.weights[0].double(), want, rtol=1e-4, atol=1e-4)


def test_case_E11_adam_moments_of_narrow_tables_beside_wide_ones() -> None:
    """Tables of width 8, 6 and 4: three updates equal torch's Adam, with every row looked up each time."""
    widths = (8, 6, 4)
    tables = engine(*(spec(f"t{w}", rows=3, dim=w, features=(f"f{w}",)) for w in widths), optimizer="adam", lr=0.01)
    params = [weight.detach().clone().requires_grad_() for weight in tables.weights]
    adam = torch.optim.Adam(params, lr=0.01, eps=1e-8)
    batch = keyed({f"f{w}": [[0, 1, 2]] for w in widths})
    for step in range(3):
        out = tables(batch)
        sum((vectors**2 * (step + 1)).sum() for vectors in out.values()).backward()
        tables.step()
        adam.zero_grad()
        sum((param**2 * (step + 1)).sum() for param in params).backward()
        adam.step()
    for weight, param, tensors in zip(tables.weights, params, tables.export_tables().values()):
        torch.testing.assert_close(weight, param, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(tensors["exp_avg_sq"], adam.state[param]["exp_avg_sq"], rtol=1e-5, atol=1e-6)


# ---- updates -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_that_were_not_looked_up_keep_their_bits(optimizer: str) -> None:
    tables = engine(spec(), optimizer=optimizer)
    before = tables.weights[0].detach().clone()
    for _ in range(2):
        tables(keyed({"f": [[2, 7, 2]]}))["f"].sum().backward()
        tables.step()
    changed = (tables.weights[0] != before).any(1)
    assert changed.nonzero().flatten().tolist() == [2, 7]


def test_gradients_accumulate_until_step_and_zero_grad_drops_them() -> None:
    batch = keyed({"f": [[1], [1, 4]]})
    once, twice, dropped = engine(spec()), engine(spec()), engine(spec())
    (once(batch)["f"].sum() * 2).backward()
    for _ in range(2):
        twice(batch)["f"].sum().backward()
    dropped(batch)["f"].sum().backward()
    dropped.zero_grad()
    before = dropped.weights[0].detach().clone()
    once.step(), twice.step(), dropped.step()
    torch.testing.assert_close(once.weights[0], twice.weights[0])
    assert torch.equal(dropped.weights[0], before)


def test_evaluation_changes_nothing() -> None:
    tables = engine(spec(pooling="sum"), optimizer="adam")
    before = tables.export_tables()
    with torch.no_grad():
        out = tables(keyed({"f": [[1], [2]]}))["f"]
    assert not out.requires_grad
    after = tables.export_tables()
    assert all(torch.equal(before["t"][name], after["t"][name]) for name in before["t"])


def test_set_lr_scales_the_next_update() -> None:
    tables = engine(spec(), lr=0.1)
    before = tables.weights[0].detach().clone()
    tables.set_lr(0.5)
    tables(keyed({"f": [[3]]}))["f"].sum().backward()
    tables.step()
    torch.testing.assert_close(tables.weights[0][3], before[3] - 0.5)
    for bad in (-0.1, float("nan"), float("inf")):
        with pytest.raises(RequestError, match="learning rate"):
            tables.set_lr(bad)


def test_weight_grad_stays_empty() -> None:
    """A dense optimiser or gradient clipping that is handed the tables by mistake finds nothing to do."""
    tables = engine(spec())
    tables(keyed({"f": [[3]]}))["f"].sum().backward()
    assert tables.weights[0].grad is None


# ---- first weights and whole tables -------------------------------------------------------------------------------------------------


def test_first_weights_depend_on_seed_and_name_alone() -> None:
    pair = engine(spec("a", features=("x",)), spec("b", features=("y",), init_scale=0.25)).export_tables()
    alone = engine(spec("b", features=("z",), pooling="sum", init_scale=0.25)).export_tables()
    other = engine(spec("b", features=("z",), init_scale=0.25), seed=2).export_tables()
    assert torch.equal(pair["b"]["weight"], alone["b"]["weight"])
    assert not torch.equal(other["b"]["weight"], alone["b"]["weight"])
    assert not torch.equal(pair["a"]["weight"], pair["b"]["weight"] * 4)
    assert float(pair["b"]["weight"].abs().max()) <= 0.25 < float(pair["a"]["weight"].abs().max())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_case_E08_export_and_import_continue_bit_equal(optimizer: str) -> None:
    tables = (spec("a", features=("x",)), spec("b", features=("y",), pooling="mean", dim=8))
    batch = keyed({"x": [[1, 2], [3]], "y": [[4], []]})

    def advance(target: TorchEmbeddings) -> None:
        sum((vectors**2).sum() for vectors in target(batch).values()).backward()
        target.step()

    first = engine(*tables, optimizer=optimizer)
    advance(first)
    saved = first.export_tables()
    for table in tables:
        assert {name: tuple(t.shape) for name, t in saved[table.name].items()} == table_state(table, SparseOptimizer(name=optimizer))
    second = engine(*tables, optimizer=optimizer, seed=9)
    second.import_tables(saved)
    advance(first), advance(second)
    for table, tensors in first.export_tables().items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, second.export_tables()[table][name]), (table, name)
    assert not torch.equal(saved["a"]["weight"], first.export_tables()["a"]["weight"])  # the export was a copy


def test_the_seed_of_a_table_is_pinned() -> None:
    """Another value would silently change every run's first weights."""
    assert table_seed(1, "item") == 1666290551860898062
    assert len({table_seed(seed, name) for seed in (1, 2) for name in ("item", "user", "1/item")}) == 6


def test_case_E10_weights_alone_can_be_loaded() -> None:
    trained = engine(spec(), optimizer="adam")
    trained(keyed({"f": [[1]]}))["f"].sum().backward()
    trained.step()
    weights = {"t": {"weight": trained.export_tables()["t"]["weight"]}}
    trained.import_tables(weights)
    fresh = trained.export_tables()["t"]
    assert int(fresh["step"]) == 0
    assert not fresh["exp_avg"].any()
    assert torch.equal(fresh["weight"], weights["t"]["weight"])


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "missing"),
        ({"t": {"weight": torch.zeros(10, 4)}, "u": {"weight": torch.zeros(1, 1)}}, r"not in this model \['u'\]"),
        ({"t": {"weight": torch.zeros(9, 4)}}, "shape"),
        ({"t": {"weight": torch.zeros(10, 4), "exp_avg": torch.zeros(10, 4)}}, "keeps"),
        ({"t": {"weight": torch.zeros(10, 4), "state": torch.zeros(10, 4)}}, "shape"),
    ],
)
def test_an_import_that_does_not_fit_changes_nothing(entries: dict[str, dict[str, Tensor]], message: str) -> None:
    tables = engine(spec(), optimizer="rowwise_adagrad")
    before = tables.export_tables()
    with pytest.raises(RequestError, match=message):
        tables.import_tables(entries)
    assert torch.equal(tables.export_tables()["t"]["weight"], before["t"]["weight"])


def test_tables_of_different_updates_are_not_mixed() -> None:
    tables = engine(spec("a", features=("x",)), spec("b", features=("y",)), optimizer="adam")
    entries = tables.export_tables()
    entries["b"]["step"] = torch.tensor(3)
    with pytest.raises(RequestError, match=r"\[0, 3\]"):
        tables.import_tables(entries)


# ---- bad input ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [10, 1000, -1, 2**40])
def test_case_H10_B15_an_id_without_a_row_names_feature_table_and_id(bad: int) -> None:
    tables = engine(spec("item", features=("candidate", "history")))
    with pytest.raises(RequestError) as caught:
        tables(keyed({"candidate": [[1]], "history": [[9, bad]]}))
    for word in ("'history'", "'item'", str(bad), "10"):
        assert word in str(caught.value)


def test_a_missing_feature_is_named() -> None:
    with pytest.raises(RequestError, match=r"'f'.*other"):
        engine(spec())(keyed({"other": [[1]]}))


def test_broken_offsets_are_refused() -> None:
    fine = {"keys": ("f",), "values": torch.tensor([1, 2]), "rows": 2, "starts": (0, 2), "max_lengths": (2,)}
    for offsets, message in (([0, 3, 2], "fall"), ([0, 1, 1], "last offset"), ([0, 2], "offsets for 1 columns"), ([1, 1, 2], "first offset")):
        with pytest.raises(RequestError, match=message):
            engine(spec())(KeyedJagged(offsets=torch.tensor(offsets), **fine))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ((spec(features=("a",), pooling="sum"), spec(features=("b",), pooling="mean")), "'sum' and 'mean'"),
        ((spec("a"), spec("b")), "both list it"),
        ((spec(pooling="max"),), "none, sum, mean"),
        ((spec(rows=0),), "0 rows"),
        ((spec(features=()),), "0 features"),
        ((spec(init_scale=-1.0),), "init_scale"),
        ((spec(init_scale=float("nan")),), "init_scale"),
    ],
)
def test_unsound_tables_are_refused(tables: tuple[TableSpec, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine(*tables)


@pytest.mark.parametrize(("fields", "message"), [({"name": "lamb"}, "rowwise_adagrad"), ({"eps": 0.0}, "eps"), ({"lr": -1.0}, "learning rate")])
def test_unsound_optimizers_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        TorchEmbeddings([spec()], SparseOptimizer(**fields), device="cpu", seed=1)  # type: ignore[arg-type]


def test_no_tables_at_all() -> None:
    tables = engine()
    assert tables(KeyedJagged.from_columns({}, 3)) == {}
    tables.step()
    assert tables.export_tables() == {}
