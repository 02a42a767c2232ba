"""Facts of a model for cost models: FLOPs and parameters add up, saved activations are counted once, and nothing of the model is changed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gem_core.batch import Batch, Jagged
from gem_core.builtin.precision import Fp32
from gem_core.cli import plan_facts
from gem_core.cli.plan_facts import blocks_of, few_rows, flops_of, looked_up, model_facts, saved_bytes, variation
from gem_core.config.load import load_config
from gem_core.plugins import host
from gem_core.spec import RequestError, TableSpec

EXPERTS = 'model.options.experts=[{kind = "wukong"}, {kind = "cross"}, {kind = "linear"}, {kind = "wukong"}]'


class Chain(nn.Module):
    """Two blocks and a head; ``[rows, 4]`` in ``embedded["x"]``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh())])
        self.silent = nn.ModuleList([nn.Identity()])
        self.head = nn.Linear(6, 1)

    def forward(self, batch: Any, embedded: dict[str, Tensor]) -> Tensor:
        x = embedded["x"]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("width", [4, 2])
def test_saved_activations_by_hand(width: int) -> None:
    """Each linear layer keeps its input, tanh its output, which is the head's input: kept once. Weights are no activations."""
    model, rows = Chain(), 5
    x = torch.zeros(rows, 4, requires_grad=True)
    saved = saved_bytes(model, blocks_of(model), None, {"x": x}, width)  # type: ignore[arg-type]
    assert saved == {"layers.0": rows * 4 * width, "layers.1": rows * (6 + 6) * width}


def test_a_kept_tensor_counts_where_it_is_first_kept() -> None:
    model = Chain()
    twice = nn.ModuleList([model, model])
    assert list(blocks_of(twice)) == []
    assert list(blocks_of(model)) == ["layers.0", "layers.1"]


@pytest.mark.parametrize("sets", [[], [EXPERTS, "model.options.layers=2"]])
def test_facts_add_up(sets: list[str]) -> None:
    loaded = load_config("toy", sets)
    config = loaded.config
    source = host().build("data_sources", config.data.source, config.data.options)
    model: Any = host().build("models", config.model.name, config.model.options, source.schema())
    facts = model_facts(loaded, source, model.tables(source.schema(), model.options), "cpu")
    batch = few_rows(source, 1)
    assert batch.rows == plan_facts.MEASURED_ROWS
    assert sum(block.flops for block in facts.blocks) * batch.rows == pytest.approx(model.flops(batch))
    assert sum(block.parameters for block in facts.blocks) == sum(p.numel() for p in model.parameters())
    assert [block.name for block in facts.blocks] == ["rest", *blocks_of(model)]
    assert facts.dtype == "fp32"
    assert facts.row_cv > 0
    assert all(block.saved > 0 for block in facts.blocks if block.flops)
    layers = [block for block in facts.blocks if block.experts]
    assert len(layers) == len(model.layers)
    for block, layer in zip(layers, model.layers, strict=True):
        experts = list(layer.ensemble.experts)
        assert block.experts == len(experts)
        assert block.expert_parameters == sum(p.numel() for p in layer.ensemble.experts.parameters()) < block.parameters
        assert block.expert_flops * batch.rows == pytest.approx(sum(expert.flops(batch.rows) for expert in experts))
        assert block.expert_flops < block.flops
        assert block.expert_numbers == (experts[0].tokens_in * layer.ensemble.dim, experts[0].tokens_out * layer.ensemble.dim)


def test_counting_leaves_the_model_as_it_was() -> None:
    loaded = load_config("toy")
    source = host().build("data_sources", loaded.config.data.source, loaded.config.data.options)
    model: Any = host().build("models", "gem", loaded.config.model.options, source.schema())
    batch = few_rows(source, 1)
    first, again = (flops_of(model, blocks_of(model), batch) for _ in range(2))
    assert first == again
    assert all("flops" not in vars(block) for block in blocks_of(model).values())


def test_numbers_of_the_compute_dtype_are_narrower() -> None:
    wide, narrow = (_facts_of(["model.options.dropout=0.0", f"precision.recipe={recipe}"]) for recipe in ("fp32", "bf16"))
    assert (wide.dtype, narrow.dtype) == ("fp32", "bf16")
    for one, other in zip(wide.blocks, narrow.blocks, strict=True):
        assert one.saved / 2 <= other.saved < one.saved  # offsets and ids stay as wide


def _facts_of(sets: list[str], device: str = "cpu") -> Any:
    loaded = load_config("toy", sets)
    source = host().build("data_sources", loaded.config.data.source, loaded.config.data.options)
    model: Any = host().load("models", "gem")
    return model_facts(loaded, source, model.tables(source.schema(), host().options("models", "gem", loaded.config.model.options)), device)


def test_a_recipe_is_prepared_for_the_planned_device_before_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the shapes of the model: what is measured is the model as it is without the recipe."""
    seen: list[Any] = []
    monkeypatch.setattr(Fp32, "prepare", lambda self, model, device: seen.append((device, {p.device.type for p in model.parameters()})))
    monkeypatch.setattr(Fp32, "compute_dtype", lambda self: "bf16" if seen else "fp32")
    assert _facts_of([], "cuda").dtype == "bf16"
    assert seen == [("cuda", {"meta"})]


def test_a_batch_larger_than_the_data_is_measured_on_few_rows() -> None:
    assert _facts_of(["data.batch_size=1000000"]) == _facts_of([])


def test_a_model_too_large_to_be_built_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_facts, "MOST_PARAMETERS", 100)
    with pytest.raises(RequestError, match=r"parameters, and its activations are measured by a forward pass of at most 100"):
        _facts_of([])


class Counting:
    """A model whose rows cost ``2 + their events``."""

    def flops(self, batch: Batch) -> int:
        return 2 * batch.rows + int(batch.event_offsets["g"].offsets[-1] - batch.event_offsets["g"].offsets[0])


def batch_of(lengths: list[int]) -> Batch:
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    events = {"g": Jagged(torch.empty(0, dtype=torch.int64), offsets, max(lengths, default=0))}
    empty: dict[str, Any] = {name: {} for name in ("labels", "dense", "event_dense", "event_time", "masks", "weights")}
    return Batch(rows=len(lengths), ids=None, event_offsets=events, **empty)  # type: ignore[arg-type]


@pytest.mark.parametrize(("lengths", "want"), [([3, 3, 3], 0.0), ([0, 4], 0.5), ([], 0.0), ([7], 0.0)])
def test_variation_of_rows(lengths: list[int], want: float) -> None:
    assert variation(Counting(), batch_of(lengths)) == pytest.approx(want)


def test_vectors_have_an_engines_shapes() -> None:
    loaded = load_config("toy")
    source = host().build("data_sources", loaded.config.data.source, loaded.config.data.options)
    batch = few_rows(source, 1)
    keys = batch.ids.keys[:2]
    tables = [
        TableSpec(name="a", rows=9, dim=4, features=keys[:1], init_scale=1.0),
        TableSpec(name="b", rows=9, dim=8, features=keys[1:], pooling="sum", init_scale=1.0),
    ]
    out = looked_up(tables, batch)
    assert out[keys[0]].shape == (batch.ids.ids(keys[0]).numel(), 4)
    assert out[keys[1]].shape == (batch.rows, 8)
    assert set(out) == set(keys)
