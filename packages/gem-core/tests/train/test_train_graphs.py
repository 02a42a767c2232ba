"""Forward and backward by recordings: the same run as without, dummy rows that leave no trace, and what cannot be recorded."""

import gc
import json
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gem_core.bench.step import take, works_of
from gem_core.builtin.toy import SCHEMA, ToySource
from gem_core.config.load import load_config
from gem_core.spec import RequestError
from gem_core.train import graphs, static_inputs
from gem_core.train.compose import compose, graphs_of
from gem_core.train.composed import Run
from gem_core.train.graphs import GraphedLoss
from gem_core.train.static_inputs import DUMMIES, ROWS, Extents, StaticInputs

EXTENTS = Extents(SCHEMA, frozenset())
SMALL = [
    "run.device=cpu", "run.threads=1", "model.name=gem", "model.options.dim=16", "model.options.layers=1", "model.options.tokens=4",
    "model.options.sequence={dim=16, heads=2}", "data.options.rows=800", "data.batch_size=32", "kernels.prefer=['reference']",
    "train.checkpoint_last=false", "optim.clip_norm=0", "optim.eps=1e-4",
]  # fmt: skip


SURVEYED = 16


@pytest.fixture(autouse=True)
def few_are_surveyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "SURVEYED", SURVEYED)


def rerun(function: Callable[[], Sequence[Tensor | None]]) -> tuple[Sequence[Tensor | None], Callable[[], None]]:
    """Records for a CPU: a replay computes anew, on the same inputs, into the same outputs."""
    outputs = function()

    def replay() -> None:
        with torch.enable_grad():
            again = function()
        for old, new in zip(outputs, again, strict=True):
            if old is not None and new is not None:
                old.copy_(new)

    return outputs, replay


def composed(folder: Path, *overrides: str, count: int = 0) -> Run:
    run = compose(load_config("toy", [*SMALL, f"run.out={json.dumps(str(folder))}", *overrides]))
    run.learner.graphs = graphs_of(run, count=count, recorder=rerun) if count else None
    return run


def taken(run: Run, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Norms of the gradients of so many steps, and the weights after them, tables included.

    ``optim.eps`` is large: some biases have no gradient but rounding, which AdamW would otherwise blow up.
    """
    works, norms = works_of(run), []
    run.ledger.begin(0)
    for _ in range(steps):
        take(run, *next(works))
        assert all(p.grad.is_contiguous() for p in run.model.parameters() if p.grad is not None)
        norms.append(float(torch.stack([p.grad.norm() for p in run.model.parameters() if p.grad is not None]).norm()))
    tables = {name: table["weight"] for name, table in run.embeddings.export_tables().items()}
    return norms, {**{name: p.detach().clone() for name, p in run.model.named_parameters()}, **tables}


@pytest.mark.parametrize(("count", "accumulate", "recipe"), [(1, 1, "fp32"), (4, 1, "fp32"), (4, 2, "fp32"), (2, 1, "bf16")])
def test_a_recorded_run_is_the_run_as_ever(tmp_path: Path, count: int, accumulate: int, recipe: str) -> None:
    settings = (f"optim.accumulate={accumulate}", f"precision.recipe={recipe}")
    steps = 24 // accumulate + 2  # into the second epoch, over its last, short batch
    plain, recorded = composed(tmp_path / "plain", *settings), composed(tmp_path / "recorded", *settings, count=count)
    try:
        want, weights = taken(plain, steps)
        norms, found = taken(recorded, steps)
        assert recorded.learner.graphs is not None
        told = recorded.learner.graphs.told()
    finally:
        plain.close()
        recorded.close()
    assert norms == pytest.approx(want, rel=1e-4 if recipe == "fp32" else 0.05)
    assert told["graphs"] in range(1, count + 1)
    assert told["replayed"] >= 5
    assert SURVEYED <= told["other"] <= SURVEYED + 6
    for name, value in weights.items():
        assert torch.allclose(found[name], value, atol=2e-4 if recipe == "fp32" else 2e-2), name


def test_planted_fault_a_dummy_row_that_counts_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(StaticInputs):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            for task in SCHEMA.tasks:
                self._whole["masks", task.name][:] = True
            self._whole["weights", "ctr"][:] = 1.0

    monkeypatch.setattr(graphs, "StaticInputs", Counting)
    plain, recorded = composed(tmp_path / "plain"), composed(tmp_path / "recorded", count=1)
    try:
        assert taken(recorded, 3)[0] != pytest.approx(taken(plain, 3)[0], rel=1e-4)
    finally:
        plain.close()
        recorded.close()


def test_a_batch_without_room_is_computed_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = composed(tmp_path / "run", count=1)
    try:
        monkeypatch.setattr(StaticInputs, "fits", lambda self, sizes: False)
        taken(run, SURVEYED + 3)
        assert run.learner.graphs is not None
        assert run.learner.graphs.told() == {"graphs": 1, "replayed": 0, "other": SURVEYED + 3, "recorded": 1}
    finally:
        run.close()


def test_graphs_give_way_to_a_batch_that_does_not_fit_beside_them_and_come_back_larger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = composed(tmp_path / "run", count=1)
    try:
        taken(run, SURVEYED + 1)
        found = run.learner.graphs
        assert found is not None
        room, released = found._graphs[0].inputs.capacity, weakref.ref(found._graphs[0])
        monkeypatch.setattr(graphs, "free_bytes", lambda: -1)
        batch = next(run.source.batches("train", batch_size=32, seed=5))
        sizes = Extents.sizes(EXTENTS, batch)
        monkeypatch.setattr(Extents, "sizes", lambda self, batch: {**sizes, "views": room["views"] + 5})
        monkeypatch.setattr(GraphedLoss, "_as_ever", lambda self, *_: (torch.zeros(()), torch.zeros(())))
        found(batch, {}, [1.0, 1.0])
        assert not found.recorded
        gc.collect()
        assert released() is None
        monkeypatch.undo()
        monkeypatch.setattr(graphs, "SURVEYED", SURVEYED)
        taken(run, 2)
        assert found.told()["recorded"] == 2
        assert found._graphs[0].inputs.capacity["views"] >= room["views"] + 5
    finally:
        run.close()


# ---- static inputs ------------------------------------------------------------------------------------------------------------------------


def room_for(sizes: dict[str, int], spare: int) -> dict[str, int]:
    return {name: sizes[name] + spare for name in EXTENTS.names}


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 99), rows=st.integers(1, 40), spare=st.integers(0, 30))
def test_any_batch_that_fits_lies_unchanged_before_sound_dummy_rows(seed: int, rows: int, spare: int) -> None:
    source = ToySource(rows=80, seed=seed)
    first, second, *_ = (batch for batch in source.batches("train", batch_size=rows, seed=seed) if batch.rows == rows) if rows < 40 else [None, None]
    if first is None:
        first = second = next(source.batches("train", batch_size=rows, seed=seed))
    sizes = {name: max(EXTENTS.sizes(first)[name], EXTENTS.sizes(second)[name]) for name in EXTENTS.sizes(first)}
    inputs = StaticInputs(EXTENTS, SCHEMA.tasks, rows, room_for(sizes, spare), first)
    fresh = inputs.batch
    fresh.ids.check_ids(dict.fromkeys(fresh.ids.keys, ("t", 10000)))
    for batch in (first, second, first):
        inputs.fill(batch, [0.5, 0.25])
        assert inputs.scales.tolist() == [0.5, 0.25]
        assert inputs.batch is fresh
        assert fresh.rows == rows + DUMMIES
        for key in fresh.ids.keys:
            mine, theirs = fresh.ids[key], batch.ids[key]
            assert torch.equal(mine.offsets[: rows + 1], theirs.offsets)
            assert torch.equal(mine.values[: theirs.values.shape[0]], theirs.values)
            assert int(mine.offsets[-1]) == mine.values.shape[0]
            assert (mine.offsets.diff() >= 0).all()
        for name, span in fresh.event_offsets.items():
            assert torch.equal(span.offsets, fresh.ids[f"{name}.item"].offsets)
            lengths = span.offsets.diff()[rows:]
            assert int(lengths.max() - lengths.min()) <= 1
        for field, key, rows_of in (("labels", "ctr", rows), ("dense", "picture", rows), ("event_dense", "views.dwell", None)):
            mine, theirs = getattr(fresh, field)[key], getattr(batch, field)[key]
            assert torch.equal(mine[: theirs.shape[0]], theirs), (field, rows_of)
        assert fresh.masks["cvr"].tolist() == [True] * rows + [False] * DUMMIES


def test_a_capacity_holds_what_its_dummy_rows_can_take() -> None:
    batch = next(ToySource(rows=64).batches("train", batch_size=16))
    sizes = EXTENTS.sizes(batch)
    longest = {name: EXTENTS.longest(name) for name in EXTENTS.names}
    assert longest == {"views": 12, "buys": 6, "tags": None}
    inputs = StaticInputs(EXTENTS, SCHEMA.tasks, 16, {**sizes, "views": sizes["views"] + DUMMIES * 12}, batch)
    assert inputs.fits(sizes)
    assert inputs.fits({**sizes, "tags": 0})
    assert not inputs.fits({**sizes, "views": sizes["views"] - 1}), "dummy rows would be longer than any row may be"
    assert not inputs.fits({**sizes, "buys": sizes["buys"] + 1})
    assert not inputs.fits({**sizes, ROWS: 15})


def test_sizes_of_groups_without_ids_are_those_of_their_numbers_or_times() -> None:
    batch = next(ToySource(rows=64).batches("train", batch_size=16))
    views, buys = SCHEMA.sequences
    schema = replace(SCHEMA, sequences=(replace(views, ids=()), replace(buys, ids=(), dense=())))
    bare = replace(batch, ids=batch.ids.select(["user", "item", "tags"]))
    assert Extents(schema, frozenset()).sizes(bare) == EXTENTS.sizes(batch)


def test_vectors_pooled_by_their_table_count_rows() -> None:
    assert Extents(SCHEMA, frozenset({"tags"})).of_vectors("tags") == ROWS
    assert EXTENTS.of_vectors("tags") == "tags"
    assert [EXTENTS.of_vectors(key) for key in ("user", "views.action", "buys.item")] == [ROWS, "views", "buys"]


# ---- what cannot be recorded --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "so"),
    [
        (["run.device=cpu"], "the run computes on cpu"),
        (["compile.blocks=reduce-overhead"], "records graphs of its own"),
        (['parallel.strategies=["ddp"]'], "with strategies \\['ddp'\\]"),
        (["precision.recipe=changing"], "recipe 'fp32': it changes with the step, or rounds weights between steps"),
        (["precision.recipe=told"], "recipe 'fp32': its ramp"),
        (["model with batch norm"], "0 of the model take statistics over the rows"),
        (["GEM_CHECK=full"], "GEM_CHECK=full waits for the GPU"),
    ],
)
def test_what_cannot_be_recorded_is_refused(monkeypatch: pytest.MonkeyPatch, overrides: list[str], so: str) -> None:
    from gem_core.config.schema import RunConfig
    from gem_core.train.graphs import check_recordable
    from gem_core.train.world import World

    class Holding:
        def weights_changed(self) -> None: ...

    class Telling(Holding):
        def not_recordable(self) -> str | None:
            return "its ramp"

    config: Any = RunConfig.model_validate(
        {
            "compile": {"graphs": 2, "blocks": "reduce-overhead" if "reduce-overhead" in overrides[0] else "off"},
            "parallel": {"strategies": ["ddp"] if "ddp" in overrides[0] else ["single"]},
        }
    )
    device = torch.device("cpu" if "cpu" in overrides[0] else "cuda")
    precision: Any = Holding() if "changing" in overrides[0] else Telling() if "told" in overrides[0] else object()
    model = nn.Sequential(nn.BatchNorm1d(4) if "batch norm" in overrides[0] else nn.LayerNorm(4))
    monkeypatch.setenv("GEM_CHECK", "full" if "GEM_CHECK" in overrides[0] else "")
    with pytest.raises(RequestError, match=so):
        check_recordable(World(device=device), precision, config, model)


def test_a_plain_run_on_one_gpu_can_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    from gem_core.builtin.precision import Fp32
    from gem_core.config.schema import RunConfig
    from gem_core.train.world import World

    monkeypatch.delenv("GEM_CHECK", raising=False)
    graphs.check_recordable(World(device=torch.device("cuda")), Fp32(), RunConfig.model_validate({"compile": {"graphs": 2}}), nn.LayerNorm(4))


def test_a_run_on_a_cpu_refuses_graphs_while_composing(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="CUDA graphs need a GPU"):
        composed(tmp_path / "run", "compile.graphs=2")


def test_the_dummy_rows_are_whole_eights() -> None:
    assert static_inputs.DUMMIES % 8 == 0
