"""FLOPs of a step: model FLOPs against torch's counter and double loops over masks, hardware FLOPs against what padded kernels really do."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from gem_core.batch import Batch, Jagged
from gem_core.bench import flops
from gem_core.bench.flops import StepFlops, layer_flops, owner_names, peak_seconds, run_flops, step_flops
from gem_core.builtin.toy import SCHEMA, ToySource
from gem_core.model.crossing import KeyValues
from gem_core.model.dlrm import DlrmModel, DlrmOptions
from gem_core.model.gem import GemModel, GemOptions
from gem_core.model.hstu import HstuModel, HstuOptions
from gem_core.model.sequence import EventTokens
from gem_core.ops import baselines
from gem_core.ops.products import own_flops
from gem_core.ops.slot import KernelSlot, kernel_slots
from gem_core.spec import DataSchema, PrecisionDecision, RequestError
from gem_core.train.efficiency import Peak

SMALL = {"dim": 8, "heads": 2, "seeds": 2, "queries": 1}
GEM = {"dim": 8, "tokens": 6, "x_sum": 3, "sequence": SMALL, "features": {"embedding_dim": 4}, "head": {"hidden": [16]}}
VIEWS, BUYS = SCHEMA.sequences
NUMBERS_ONLY = replace(SCHEMA, ids=SCHEMA.ids[:1], sequences=(replace(VIEWS, ids=()), BUYS))
"""A group of events without ids: nothing learned stands before its projection."""


def gem(**changed: Any) -> GemOptions:
    return GemOptions.model_validate(GEM | changed)


MODELS: dict[str, tuple[Any, Any, DataSchema]] = {
    "gem": (GemModel, gem(sequence=SMALL | {"window": 3}), SCHEMA),
    "gem_fused_blocks": (GemModel, gem(sequence=SMALL | {"pffn": "fused", "attention": "block", "block": 4, "pooled_tokens": 3}, links=True), SCHEMA),
    "gem_experts": (
        GemModel,
        gem(
            experts=[{"kind": "wukong", "hidden": [8]}, {"kind": "cross"}, {"kind": "deep"}, {"kind": "linear"}],
            features={"embedding_dim": 8, "numbers": "group", "group_tokens": 2},
            head={"numbers": True, "shared": [8]},
            comp_skip="pool_first",
        ),
        SCHEMA,
    ),
    "gem_numbers": (GemModel, gem(features={"embedding_dim": 8, "frequencies": 0, "numbers": "group"}, targets=False), NUMBERS_ONLY),
    "hstu": (HstuModel, HstuOptions(dim=8, window=4, features={"embedding_dim": 8}), SCHEMA),
    "hstu_plain": (HstuModel, HstuOptions(dim=8, bias="none", features={"embedding_dim": 8}), SCHEMA),
    "dlrm": (DlrmModel, DlrmOptions(dim=8, features={"embedding_dim": 4}), NUMBERS_ONLY),
    "dcn": (DlrmModel, DlrmOptions(dim=8, features={"embedding_dim": 8}, interaction="cross"), SCHEMA),
}
each_model = pytest.mark.parametrize("name", MODELS)


def made(name: str) -> Any:
    cls, options, schema = MODELS[name]
    torch.manual_seed(0)
    return cls(schema, options)


def toy_batch(rows: int, seed: int = 0) -> Batch:
    return next(ToySource(rows=32, seed=seed).batches("train", batch_size=rows))


def embedded(name: str, batch: Batch) -> dict[str, Tensor]:
    cls, options, schema = MODELS[name]
    out = {}
    for table in cls.tables(schema, options):
        for key in table.features:
            rows = batch.ids.ids(key).numel() if table.pooling == "none" else batch.rows
            out[key] = torch.randn(rows, table.dim, requires_grad=True)
    return out


def left_out(model: nn.Module, batch: Batch, part: nn.Module | None = None, *, backward: bool = False) -> int:
    """Products of one forward pass of a model, or of a part of it, that are no work of the model: columns by which generated keys and values get
    their shared part, and those of further tokens that a map of tokens leaves out. With ``backward`` also those of gradients: the columns have none
    that are inputs' gradients.
    """
    modules = set((model if part is None else part).modules())
    columns = sum(2 * batch.rows * m.shape[0] * m.weight.shape[0] * m.weight.shape[1] * m.added for m in modules if isinstance(m, KeyValues))
    steps = [(i, step) for layer in model.layers for i, step in enumerate(layer.steps)] if isinstance(model, GemModel) else []  # type: ignore[union-attr]
    asked: list[tuple[int, Any]] = [(i, step) for i, step in steps if step in modules and step.ask is not None]
    further = sum(2 * batch.rows * step.dim * step.ask.weight.shape[0] * len(model.targets[i]) for i, step in asked)  # type: ignore[arg-type, index]
    return (2 * columns + 3 * further) if backward else columns + further


def looked_up(model: nn.Module, batch: Batch) -> int:
    """Products that make the gradients of vectors of place and age, of ones where an event looked."""
    count = 0
    for m in model.modules():
        if isinstance(m, EventTokens) and m.age is not None:
            vectors = m.place.weight.shape[0] + m.age.weight.shape[0]
            count += 2 * int(batch.event_offsets[m.group.name].offsets[-1]) * vectors * m.dim
    return count


def trained(name: str, model: nn.Module, batch: Batch) -> int:
    """FLOPs that torch sees in one forward and backward pass, without what is no work of the model."""
    given_vectors = embedded(name, batch)
    with FlopCounterMode(display=False) as counter:
        logits = model(batch, given_vectors)
        sum(logit.sum() for logit in logits.values()).backward()
    return int(counter.get_total_flops()) - left_out(model, batch, backward=True) - looked_up(model, batch)


# ---- double loops -----------------------------------------------------------------------------------------------------------------------------


class _Silent(torch.autograd.Function):
    """The right shape and no product: what stands in for a kernel whose pairs are counted apart."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, *(torch.zeros_like(t) for t in ctx.saved_tensors)


def pairs_by_loop(op: str, lengths: list[int], keys: list[int], how: dict[str, Any]) -> int:
    """Pairs that see each other, each looked at one by one."""
    count = 0
    for row, (queries, known) in enumerate(zip(lengths, keys, strict=True)):
        for i in range(queries):
            for j in range(known):
                count += sees(op, i + (known - queries if op == "jagged_attention" else 0), j, known, row, how)
    return count


def sees(op: str, i: int, j: int, length: int, row: int, how: dict[str, Any]) -> bool:
    window = how.get("window")
    if op == "block_attention":
        return i // how["block"] == j // how["block"]
    if op == "jagged_attention":
        return window is None or abs(i - j) <= window
    if op != "hstu_attention":
        return True
    prefix, history_end = int(how["contextual"][row]), length - int(how["targets"][row])
    if i >= history_end:  # a target: the prefix, the history within its reach, itself
        return j == i or j < prefix or (j < history_end and (window is None or history_end - j <= window))
    if i < prefix:
        return j < history_end
    return j < prefix or (j <= i and (window is None or i - j <= window))


class CountingKernel:
    """Counts pairs of every call; bound in the place of attention."""

    def __init__(self, slot: KernelSlot) -> None:
        self.op, self.products = slot.op, 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *offsets: Tensor | None, **how: Any) -> Tensor:
        jagged = [o.diff().tolist() for o in offsets if o is not None]
        rows = len(jagged[0])
        if self.op == "pooled_attention":
            lengths, keys, shape = [q.shape[-3]] * rows, jagged[0], (rows, *q.shape[-3:])
        elif self.op in ("gdpa", "pffn"):
            lengths, keys, shape = jagged[0], [k.shape[1]] * rows, tuple(q.shape)
        else:
            lengths, keys, shape = jagged[0], jagged[0], tuple(q.shape)
        heads, dim = q.shape[-2:]
        self.products += 2 * heads * (dim + v.shape[-1]) * pairs_by_loop(self.op, lengths, keys, how)
        return _Silent.apply(torch.zeros(shape), q, k, v)  # type: ignore[no-any-return, no-untyped-call]


def by_loops(name: str, batch: Batch) -> int:
    """Model FLOPs of a step: torch's count of every product outside attention, and three times the pairs of attention."""
    model = made(name)
    kernels = []
    for slot in kernel_slots(model):
        if slot.op.endswith("attention") or slot.op in ("gdpa", "pffn"):
            kernels.append(CountingKernel(slot))
            slot.bind(kernels[-1])
    return trained(name, model, batch) + 3 * sum(kernel.products for kernel in kernels)


@each_model
def test_case_I10_model_flops_are_those_of_loops_over_every_pair(name: str) -> None:
    batch = toy_batch(7)
    assert step_flops(made(name), batch).model == by_loops(name, batch)


@settings(max_examples=5, deadline=None)
@given(rows=st.integers(1, 9), seed=st.integers(0, 3))
def test_case_I10_drawn_batches(rows: int, seed: int) -> None:
    batch = toy_batch(rows, seed)
    assert step_flops(made("gem_numbers"), batch).model == by_loops("gem_numbers", batch)


@each_model
def test_forward_is_what_the_model_counts(name: str) -> None:
    model, batch = made(name), toy_batch(5)
    layers = layer_flops(model, batch)
    assert sum(layer.forward for layer in layers) == model.flops(batch)
    assert {layer.name for layer in layers} <= set(owner_names(model).values())


def test_inputs_without_anything_learned_have_no_gradient() -> None:
    """Numbers, vectors and events without ids: two passes instead of three."""
    model, batch = made("gem_numbers"), toy_batch(5)
    two = {layer.name for layer in layer_flops(model, batch) if layer.model == 2 * layer.forward}
    assert two == {"features.group.0", "features.dense.0", "events.0.project.slot"}
    assert step_flops(model, batch).model < 3 * model.flops(batch)


def test_numbers_described_without_learning_have_no_gradient() -> None:
    model = GemModel(SCHEMA, gem(features={"embedding_dim": 8, "frequencies": 0}))
    each = next(layer for layer in layer_flops(model, toy_batch(5)) if layer.name == "features.each")
    assert each.model == 2 * each.forward > 0


def test_learned_frequencies_want_the_gradient_of_numbers() -> None:
    layers = {layer.name: layer for layer in layer_flops(made("gem"), toy_batch(5))}
    assert layers["features.each"].model == 3 * layers["features.each"].forward > 0


# ---- hardware -----------------------------------------------------------------------------------------------------------------------------------


def batch_with_one_longest_row() -> Batch:
    """A batch whose longest row is the longest of every group: HSTU joins groups and pads to the sum of their longest."""
    drawn = (toy_batch(6, seed) for seed in range(50))
    return next(batch for batch in drawn if len({int(j.offsets.diff().argmax()) for j in batch.event_offsets.values()}) == 1)


def bound_to_reference(model: nn.Module) -> None:
    for slot in kernel_slots(model):
        slot.bind(slot._public, "reference")


@each_model
def test_hardware_flops_of_padded_references_are_torchs_count(name: str) -> None:
    model, batch = made(name), batch_with_one_longest_row()
    bound_to_reference(model)
    found = step_flops(model, batch)
    assert found.hardware == trained(name, model, batch)
    assert (found.hardware > found.model) == (name not in ("dlrm", "dcn"))


@pytest.mark.parametrize("backend", ["padded", "bucketed"])
@pytest.mark.parametrize("scores", [baselines.SCORES, 200])
@pytest.mark.parametrize("name", ["gem", "gem_fused_blocks", "hstu_plain"])
def test_hardware_flops_of_baselines_are_torchs_count(name: str, backend: str, scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets from 5 tokens on; with few scores large calls are cut into parts that are computed again."""
    monkeypatch.setattr(baselines, "SHORTEST", 5)
    monkeypatch.setattr(baselines, "SCORES", scores)
    model, batch = made(name), batch_with_one_longest_row()
    for slot in kernel_slots(model):
        fits = slot.op.endswith("attention") or slot.op in ("gdpa", "pffn")
        slot.bind(getattr(baselines, f"{backend}_{slot.op}") if fits else slot._public, backend if fits else "reference")
    found = step_flops(model, batch).hardware
    assert found == trained(name, model, batch)
    bound_to_reference(model)
    plain = step_flops(model, batch).hardware
    assert (found == plain) == (backend == "padded" and scores > 200)


def test_a_recomputed_block_is_counted_as_torch_counts_it() -> None:
    model, batch = made("gem"), toy_batch(6)
    bound_to_reference(model)
    plain = step_flops(model, batch)
    block = model.layers[0]
    block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    found = step_flops(model, batch, recomputed=["layers.0"])
    assert found.hardware == trained("gem", model, batch) - left_out(model, batch, block) > plain.hardware
    assert found.model == plain.model
    assert found.by_format == plain.by_format


def test_a_block_whose_name_begins_alike_is_not_recomputed() -> None:
    model = made("gem")
    assert (
        step_flops(model, toy_batch(6), recomputed=["layers.1", "layer"]).hardware
        == step_flops(model, toy_batch(6), recomputed=["layers.1"]).hardware
    )


def test_fused_attention_recomputes_the_scores_once() -> None:
    model, batch = made("hstu"), toy_batch(6)
    for slot in kernel_slots(model):
        slot.bind(slot._public, "triton")
    layers = layer_flops(model, batch)
    attention = [layer for layer in layers if layer.name in ("layers.0.slot", "layers.1.slot")]
    for layer in attention:
        assert (layer.model, layer.hardware) == (3 * layer.forward, 3 * layer.forward + layer.forward // 2)
    assert len(attention) == 2
    assert all(layer.hardware == layer.model for layer in layers if layer not in attention)


def test_padding_that_recomputes_counts_the_padded_scores() -> None:
    """``sdpa`` pads, and its kernel recomputes."""
    model, batch = made("gem"), toy_batch(6)
    for slot in kernel_slots(model):
        slot.bind(slot._public, "sdpa" if slot.op == "jagged_attention" else "reference")
    layer = next(layer for layer in layer_flops(model, batch) if layer.name == "layers.0.steps.0.attention.slot")
    longest = int(batch.event_offsets["views"].offsets.diff().max())
    executed = 2 * 2 * (4 + 4) * 6 * longest**2
    assert layer.hardware == 3 * executed + executed // 2


def test_an_empty_batch_has_no_flops() -> None:
    batch = next(ToySource(rows=8).batches("train", batch_size=4))
    none = {name: Jagged(j.values[:0], torch.zeros(5, dtype=torch.int64), 0) for name, j in batch.event_offsets.items()}
    model = made("gem")
    bound_to_reference(model)
    whole = layer_flops(model, replace(batch, event_offsets=none))
    assert all(layer.hardware == 0 for layer in whole if ".attention." in layer.name or layer.name.startswith("events."))
    assert sum(layer.hardware for layer in whole) > 0


# ---- formats -------------------------------------------------------------------------------------------------------------------------------------


def decided(formats: dict[str, str]) -> list[PrecisionDecision]:
    return [PrecisionDecision(module=name, format=form, reason="test") for name, form in formats.items()]


class Foreign(nn.Module):
    """A model of somebody else's that counts only a whole."""

    def flops(self, batch: Any) -> int:
        return 1000


def test_a_model_that_does_not_count_by_layer_is_one_product() -> None:
    found = step_flops(Foreign(), toy_batch(2), dtype="bf16")
    assert found == StepFlops(model=3000, hardware=3000, by_format={"bf16": 3000})


def test_layers_that_count_more_than_their_model_are_refused() -> None:
    class Doubled(Foreign):
        def flops(self, batch: Any) -> int:
            return (own_flops(self, 600) + own_flops(nn.Linear(1, 1), 600)) // 2

    with pytest.raises(RequestError, match=r"Doubled: its layers count 1,200 and the whole 600"):
        step_flops(Doubled(), toy_batch(2))


def test_formats_follow_the_decisions() -> None:
    model, batch = made("gem"), toy_batch(6)
    forward = {layer.name: layer.forward for layer in layer_flops(model, batch)}
    out, slot = "layers.0.steps.0.attention.out", "layers.0.steps.0.attention.slot"
    formats = {out: "mxfp8_e4m3/mxfp8_e5m2, weight gradient high", slot: "fp8_e4m3_1x128", "features.dense.0": "fp32"}
    found = step_flops(model, batch, decisions=decided(formats), dtype="bf16")
    assert found.by_format["fp8"] == 2 * forward[out] + 3 * forward[slot]
    assert found.by_format["fp32"] == 2 * forward["features.dense.0"]
    assert sum(found.by_format.values()) == found.model
    assert set(found.by_format) == {"fp8", "fp32", "bf16"}


def test_products_between_decided_layers_follow_an_island() -> None:
    """An expert's dot products have no decision of their own; where all its layers are in fp32 they are too."""
    model, batch = made("gem"), toy_batch(6)
    expert = "layers.0.ensemble.experts.0"
    leaves = [name for name, module in model.named_modules() if name.startswith(expert + ".") and not list(module.children())]
    for of_linear, expected in (("fp32", "fp32"), ("bf16", "bf16")):
        decisions = decided({name: of_linear if "mlp" in name else "fp32" for name in leaves})
        found = layer_flops(model, batch, decisions=decisions, dtype="bf16")
        assert set(next(layer for layer in found if layer.name == expert).by_format) == {expected}


def test_a_fused_norm_computes_in_the_format_of_its_module() -> None:
    name = "layers.0.steps.0.attention.qkv"
    found = layer_flops(made("gem"), toy_batch(6), decisions=decided({name: "fp16"}))
    assert next(layer for layer in found if layer.name == f"{name}.slot").by_format.keys() == {"fp16"}


def test_a_format_without_a_unit_is_refused() -> None:
    with pytest.raises(RequestError, match="posit"):
        step_flops(made("dlrm"), toy_batch(2), decisions=decided({"heads.networks.0.0": "posit8"}))


def test_steps_add_up() -> None:
    one = StepFlops(model=3, hardware=5, by_format={"bf16": 1, "fp8": 2})
    assert one + StepFlops(model=1, hardware=1, by_format={"fp8": 1}) == StepFlops(model=4, hardware=6, by_format={"bf16": 1, "fp8": 3})
    assert sum([one, one], start=StepFlops()).model == 6


class FakeRun:
    """As much of a composed run as ``run_flops`` reads."""

    def __init__(self, policies: dict[str, str]) -> None:
        self.model, self.decisions = made("gem"), decided({"heads.norm": "fp32"})
        self.precision = SimpleNamespace(compute_dtype=lambda: "bf16")
        told = ({"policies": policies}, {"strategy": "single"})
        self.strategies = [("any", False, SimpleNamespace(describe=lambda values=values: values)) for values in told]


def test_a_run_tells_its_recomputed_blocks_and_its_dtype() -> None:
    batch = toy_batch(6)
    found = run_flops(FakeRun({"layers.0": "recompute", "layers.1": "offload"}), batch)
    assert found == step_flops(made("gem"), batch, dtype="bf16", recomputed=["layers.0"])
    assert found.hardware > step_flops(made("gem"), batch, dtype="bf16").hardware


# ---- peaks ---------------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def peaks_afresh() -> Iterator[None]:
    flops.unit_peak.cache_clear()
    yield
    flops.unit_peak.cache_clear()


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    return torch.device("cuda")


def test_formats_are_weighted_by_their_peaks(h200: torch.device) -> None:
    assert peak_seconds({"bf16": 989_400_000_000_000, "fp8": 1_978_900_000_000_000}, h200) == pytest.approx(2.0)
    assert peak_seconds({}, h200) == 0.0


def test_a_format_that_the_gpu_lacks_counts_as_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    assert peak_seconds({"fp8": 312_000_000_000_000}, torch.device("cuda")) == pytest.approx(1.0)


def test_a_cpu_is_held_against_its_measured_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def peak(_: torch.device, dtype: str) -> Peak:
        asked.append(dtype)
        return Peak(flops_per_second=10.0, dtype=dtype, source="test")

    monkeypatch.setattr(flops, "peak_of", peak)
    assert peak_seconds({"fp8": 10, "bf16": 20}, torch.device("cpu")) == pytest.approx(3.0)
    assert asked == ["fp32", "bf16"]
