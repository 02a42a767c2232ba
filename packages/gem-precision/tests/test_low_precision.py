"""The recipes with low-precision linear layers: what they choose, why, and that models train under them."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from gem_core.ops.slot import KernelSlot, bind_kernels
from gem_core.spec import KernelUnavailable, RequestError, load_object
from gem_precision.islands import is_island
from gem_precision.linear import rule_of
from gem_precision.options import LowPrecisionOptions
from gem_precision.plugin import gem_precision_recipes
from gem_precision.presets import PRESETS
from gem_precision.recipes.low_precision import LowPrecision

LOW = [name for name in PRESETS if name != "fp8_naive"]


class Fused(nn.Module):
    """Hands the weights of its child to a kernel: the child's forward never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 128)
        self.slot = KernelSlot("norm_linear", features=("rms", "before"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.slot(x, self.linear.weight, self.linear.bias, norm="rms", where="before")  # type: ignore[no-any-return]


class Mixed(nn.Module):
    """Layers of several sizes, a head, and a layer whose weights a kernel reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.narrow = nn.Linear(128, 256), nn.LayerNorm(256), nn.Linear(256, 64)
        self.mix, self.fused = nn.Linear(256, 128), Fused()
        self.heads = nn.Linear(128, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.mix(self.norm(self.first(x).relu()))
        hidden = hidden + self.fused(hidden)
        return self.heads(hidden)[:, 0] + self.narrow(self.first(x)).sum(1)  # type: ignore[no-any-return]


@pytest.fixture
def mixed() -> Mixed:
    torch.manual_seed(4)
    return Mixed()


def formats(model: nn.Module, preset: str, device: str = "cuda", **options: Any) -> dict[str, str]:
    return {d.module: d.format for d in LowPrecision(preset, **options).prepare(model, device)}


@pytest.mark.parametrize("preset", LOW)
def test_large_layers_are_low_and_the_rest_says_why_not(mixed: Mixed, preset: str) -> None:
    decided = {d.module: d for d in LowPrecision(preset).prepare(mixed, "cuda")}
    low = {name for name, module in mixed.named_modules() if rule_of(module) is not None}
    assert low == {"first", "mix"}
    assert all(decided[name].format not in ("fp32", "bf16") for name in low)
    assert "too small to gain, under 128" in decided["narrow"].reason
    assert "last layers" in decided["heads"].reason
    assert decided["norm"].format == "fp32"


def test_the_weights_of_a_layer_that_a_kernel_reads_are_not_lowered(mixed: Mixed) -> None:
    """Its forward never runs, so the recipe would do nothing and claim otherwise."""
    decided = {d.module: d for d in LowPrecision("mxfp8", islands=["heads"], small=0).prepare(mixed, "cuda")}
    assert rule_of(mixed.fused.linear) is None
    assert "handed to a kernel" in decided["fused.linear"].reason


class NormLinear(nn.Module):
    """Owns the matrix that it hands to a kernel."""

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, dim))
        self.slot = KernelSlot("norm_linear", features=("rms", "before"))


class Attends(nn.Module):
    """Attention with wide heads and with narrow ones, behind a fused norm and in a head."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = (KernelSlot("jagged_attention", head_dim=dim) for dim in (128, 64))
        self.fused, self.move = NormLinear(128, 256), KernelSlot("jagged_concat")
        self.heads = nn.ModuleDict({"attend": Slotted()})


class Slotted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slot = KernelSlot("gdpa", head_dim=128)


def asked(model: nn.Module) -> dict[str, str | None]:
    return {f"{name}.{key}": v.asked for name, m in model.named_modules() for key, v in vars(m).items() if isinstance(v, KernelSlot)}


def test_attention_and_fused_matmuls_ask_for_the_kernels_of_the_recipe() -> None:
    model = Attends()
    decided = {d.module: d for d in LowPrecision("mxfp8").prepare(model, "cuda")}
    low = "mxfp8_emulated"
    assert asked(model) == {".wide": low, ".narrow": None, ".move": None, "fused.slot": low, "heads.attend.slot": None}
    assert (decided["model.wide"].format, decided["fused"].format) == ("mxfp8_e4m3", "mxfp8_e4m3")
    assert decided["model.narrow"].reason == "heads 64 wide: too small to gain, under 128"
    assert decided["model.narrow"].format == "bf16"
    assert "last layers" in decided["heads.attend.slot"].reason
    assert decided["heads.attend.slot"].format == "fp32"
    assert "model.move" not in decided
    bound = bind_kernels(model, device="cpu", dtype="bf16", arch=None, backward=True)
    assert [choice.backend for choice in bound] == [low, "reference", "reference", low, "reference"]


def test_attention_stays_high_where_that_is_asked_or_the_recipe_is_for_mlps() -> None:
    for preset, options in (("mxfp8", {"attention": False}), ("mxfp4_mlp", {})):
        model = Attends()
        decided = {d.module: d for d in LowPrecision(preset, **options).prepare(model, "cuda")}
        assert asked(model)[".wide"] is None
        assert "attention" in decided["model.wide"].reason
        assert asked(model)["fused.slot"] == f"{preset}_emulated"
    model = Attends()
    LowPrecision("mxfp8", high=["fused"]).prepare(model, "cuda")
    assert asked(model)["fused.slot"] is None


def test_the_naive_recipe_spares_nothing(mixed: Mixed) -> None:
    decided = formats(mixed, "fp8_naive")
    assert {decided[name] for name in ("first", "narrow", "mix", "heads")} == {"fp8_e4m3_tensor"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_rest_computes_as_bf16_islands_does(mixed: Mixed, device: str) -> None:
    recipe = LowPrecision("mxfp8")
    recipe.prepare(mixed, device)
    assert recipe.compute_dtype() == {"cpu": "fp32", "cuda": "bf16"}[device]
    assert is_island(mixed.norm) == (device == "cuda")
    with recipe.forward_context(device):
        assert torch.is_autocast_enabled(device) == (device == "cuda" and torch.cuda.is_available())


@pytest.mark.parametrize("preset", LOW)
def test_a_model_trains_like_float32(preset: str) -> None:
    """Thirty steps; what is learnt differs from float32 by a small part of what there was to learn."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(256, 128, generator=draw)
    y = (x[:, 0] * x[:, 1] + x[:, 2] > 0).float()
    losses = {}
    for name, recipe in {"fp32": None, preset: LowPrecision(preset)}.items():
        torch.manual_seed(4)
        model = Mixed()
        if recipe is not None:
            recipe.prepare(model, "cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        taken = []
        for _ in range(30):
            optimizer.zero_grad()
            loss = binary_cross_entropy_with_logits(model(x), y)
            loss.backward()
            optimizer.step()
            taken.append(float(loss.detach()))
        losses[name] = taken
    assert losses[preset] != losses["fp32"]
    learnt = losses["fp32"][0] - losses["fp32"][-1]
    assert abs(losses[preset][-1] - losses["fp32"][-1]) < (0.2 if preset == "mxfp4_mlp" else 0.05) * learnt


def test_options_reach_the_rule(mixed: Mixed) -> None:
    LowPrecision("mxfp8", weight_grad="high", stochastic=True, hadamard=True, high=["mix"]).prepare(mixed, "cpu")
    rule = rule_of(mixed.first)
    assert rule is not None
    assert (rule.weight_grad, rule.stochastic, rule.hadamard is None) == (False, True, False)
    assert rule.label == "mxfp8_e4m3, weight gradient high"
    assert rule_of(mixed.mix) is None


def test_a_pattern_stays_high_with_its_reason(mixed: Mixed) -> None:
    decided = {d.module: d for d in LowPrecision("mxfp8", high=["mi*"]).prepare(mixed, "cpu")}
    assert "'mi*'" in decided["mix"].reason
    with pytest.raises(RequestError, match="no module has such a name"):
        LowPrecision("mxfp8", high=["tower"]).prepare(Mixed(), "cpu")


def test_a_model_is_prepared_once(mixed: Mixed) -> None:
    LowPrecision("mxfp8").prepare(mixed, "cpu")
    with pytest.raises(RequestError, match="prepared this model before"):
        LowPrecision("fp8_block").prepare(mixed, "cpu")


def test_a_model_on_meta_is_prepared_without_its_values() -> None:
    with torch.device("meta"):
        model = Mixed()
    assert formats(model, "fp8_block")["first"] == "fp8_e4m3_1x128"
    model.to_empty(device="cpu")
    assert rule_of(model.first) is not None


@pytest.mark.parametrize("name", PRESETS)
def test_every_recipe_is_declared_and_builds_from_its_options(name: str, mixed: Mixed) -> None:
    (declared,) = [recipe for recipe in gem_precision_recipes() if recipe.name == name]
    assert declared.options is not None
    options = load_object(declared.options)
    assert options is LowPrecisionOptions
    built = load_object(declared.load)(**{field: getattr(options(), field) for field in options.model_fields})
    built.prepare(mixed, "cpu")
    assert any(rule_of(module) is not None for module in mixed.modules())
    with pytest.raises(ValidationError):
        options(smal=3)


def test_a_named_linear_backend_is_used_or_refused(mixed: Mixed) -> None:
    decided = {d.module: d for d in LowPrecision("fp8_block", linear="fp8_block_emulated").prepare(mixed, "cpu")}
    assert "by 'fp8_block_emulated'" in decided["mix"].reason
    with pytest.raises(KernelUnavailable, match="mxfp8_emulated"):
        LowPrecision("fp8_block", linear="mxfp8_emulated")
    with pytest.raises(KernelUnavailable, match=r"fp8_block_native.*this is cpu"):
        LowPrecision("fp8_block", linear="fp8_block_native").prepare(Mixed(), "cpu")
