"""Facts of a model for cost models: FLOPs and parameters add up, saved activations are counted once, and shapes tell what numbers would."""

import resource
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gem_core.batch import Batch, Jagged
from gem_core.builtin.precision import Fp32
from gem_core.cli import plan_facts, plan_shapes
from gem_core.cli.plan_facts import blocks_of, few_rows, flops_of, looked_up, model_facts, saved_bytes, variation
from gem_core.config.load import load_config
from gem_core.model.gem import GemModel
from gem_core.ops.products import linear_flops
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


def test_a_storage_in_the_place_of_a_freed_one_counts_too() -> None:
    class Dropping(Chain):
        def forward(self, batch: Any, embedded: dict[str, Tensor]) -> Tensor:
            for _ in range(8):
                (embedded["x"] + 1).square()  # the sum is kept for backward, and freed at once with the graph
            return embedded["x"]

    rows = 5
    for leaf in (torch.zeros(rows, 4, requires_grad=True), torch.zeros(rows, 4, requires_grad=True, device="meta")):
        assert saved_bytes(Dropping(), {}, None, {"x": leaf}, 4) == {"rest": 8 * rows * 4 * 4}  # type: ignore[arg-type]


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


def test_flops_by_block_are_what_the_blocks_count() -> None:
    """A product belongs to the block that it lies in; what the model counts on top of its layers is of no block."""

    class More(Chain):
        def flops(self, batch: Any) -> int:
            return linear_flops(self.layers[0], 3) + linear_flops(self.layers[1][0], 5) + linear_flops(self.head, 7) + 1000  # type: ignore

    model = More()
    counted = flops_of(model, blocks_of(model), batch_of([]))
    assert +counted == {"layers.0": 2 * 3 * 4 * 6, "layers.1": 2 * 5 * 6 * 6, "rest": 2 * 7 * 6 + 1000}


def test_blocks_with_names_that_begin_alike_are_told_apart() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(11))

        def flops(self, batch: Any) -> int:
            return linear_flops(self.layers[10], 3)  # type: ignore[arg-type]

    model = Many()
    assert +flops_of(model, blocks_of(model), batch_of([])) == {"layers.10": 6}


def test_numbers_of_the_compute_dtype_are_narrower() -> None:
    wide, narrow = (_facts_of(["model.options.dropout=0.0", f"precision.recipe={recipe}"]) for recipe in ("fp32", "bf16"))
    assert (wide.dtype, narrow.dtype) == ("fp32", "bf16")
    for one, other in zip(wide.blocks, narrow.blocks, strict=True):
        assert one.saved / 2 <= other.saved < one.saved  # offsets and ids stay as wide


def _facts_of(sets: list[str], device: str = "cpu") -> Any:
    loaded = load_config("toy", sets)
    config = loaded.config
    source = host().build("data_sources", config.data.source, config.data.options)
    model: Any = host().load("models", config.model.name)
    return model_facts(loaded, source, model.tables(source.schema(), host().options("models", config.model.name, config.model.options)), device)


def test_a_recipe_is_prepared_for_the_planned_device_before_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the shapes of the model: what is measured is the model as it is without the recipe."""
    seen: list[Any] = []
    monkeypatch.setattr(Fp32, "prepare", lambda self, model, device: seen.append((device, {p.device.type for p in model.parameters()})))
    monkeypatch.setattr(Fp32, "compute_dtype", lambda self: "bf16" if seen else "fp32")
    assert _facts_of([], "cuda").dtype == "bf16"
    assert seen == [("cuda", {"meta"})]


def test_a_batch_larger_than_the_data_is_measured_on_few_rows() -> None:
    assert _facts_of(["data.batch_size=1000000"]) == _facts_of([])


GEM = 'model.options={dim = 8, tokens = 6, x_sum = 3, layers = 2, dropout = 0.1, experts = [{kind = "wukong", rank = 4}, {kind = "deep"}]'
HSTU = ["model.name=hstu"]
CONFIGURATIONS = {
    "toy": [],
    "experts": [EXPERTS, "model.options.layers=2", "model.options.dropout=0.1"],
    "quickstart": [GEM + ", sequence = {dim = 8, heads = 2, queries = 2, seeds = 2, keys_per_token = 1}, head = {numbers = true}}"],
    "block": [GEM + ', sequence = {dim = 8, heads = 2, pffn = "fused", attention = "block", block = 4, pooled_tokens = 3}}'],
    "sdpa": ['kernels.prefer=["sdpa", "reference"]'],
    "padded": ['kernels.prefer=["padded", "reference"]'],
    "bucketed": ['kernels.prefer=["bucketed", "reference"]'],
    "hstu": HSTU,
    "hstu causal": [*HSTU, "model.options={context = 'causal', bias = 'none', layers = 2}"],
    "hstu window": [*HSTU, "model.options={window = 3}"],
    "dlrm": ["model.name=dlrm"],
}


@pytest.mark.parametrize("sets", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_shapes_leave_what_numbers_leave(sets: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All facts are those of a forward pass of real tensors, to the byte."""
    shapes = _facts_of(sets)
    monkeypatch.setattr(plan_facts, "ShapesOnly", lambda asked: nullcontext())
    assert shapes == _facts_of(sets)
    assert any(block.saved for block in shapes.blocks)


def test_masks_may_be_shapes_but_lengths_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of long rows, whose masks of scores are large."""
    monkeypatch.setattr(plan_facts, "MEASURED_ROWS", 32)
    want = _facts_of(HSTU)
    monkeypatch.setattr(plan_shapes, "MOST_REAL", 1000)
    assert _facts_of(HSTU) == want
    monkeypatch.setattr(plan_shapes, "MOST_REAL", 50)
    with pytest.raises(RequestError, match="cannot be followed by shapes alone"):
        _facts_of(HSTU)


def test_no_memory_is_taken_for_weights_and_activations() -> None:
    """Of two thousand million parameters, on a machine that need not hold them."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    facts = _facts_of(["model.options={layers = 1, dim = 1024, experts = [{kind = 'deep', hidden = [65536]}]}"])
    assert sum(block.parameters for block in facts.blocks) > 2e9
    assert sum(block.saved for block in facts.blocks) * plan_facts.MEASURED_ROWS > 1e7
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000  # KiB


def test_a_model_that_looks_at_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(self: Any, batch: Batch, embedded: dict[str, Tensor]) -> Any:
        return next(iter(embedded.values())).sum().item()

    monkeypatch.setattr(GemModel, "forward", look)
    with pytest.raises(RequestError, match=r"a step of this model: .* by shapes alone: aten._local_scalar_dense"):
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
