"""``emulate = false``: what nothing computes natively on the device stays high, and says why."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gem_core.ops.slot import KernelSlot
from gem_core.spec import RequestError
from gem_precision import backends
from gem_precision.linear import rule_of
from gem_precision.recipes.low_precision import fp8_block, fp8_rowwise, fp8_square, mxfp8
from gem_precision.sites import sites


def model() -> nn.Module:
    return nn.ModuleDict({"body": nn.Linear(4096, 1024, device="meta"), "odd": nn.Linear(130, 256), "narrow": nn.Linear(512, 512)})


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is an H200 to whoever asks."""
    monkeypatch.setattr(backends.Device, "here", classmethod(lambda cls, device_type: cls(type="cuda", name="NVIDIA H200", arch=90)))
    monkeypatch.setattr("gem_precision.native.find_spec", lambda name: object())


def test_on_a_cpu_nothing_is_low() -> None:
    net = model()
    decisions = {d.module: d for d in fp8_block(emulate=False, islands=()).prepare(net, "cpu")}
    assert all(rule_of(module) is None for module in net.modules())
    assert "its products need the FP8 tensor cores" in decisions["body"].reason
    assert decisions["body"].format == "fp32"


def test_a_plan_for_a_gpu_on_a_machine_without_one_has_its_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    decisions = {d.module: d for d in fp8_block(emulate=False, islands=()).prepare(model(), "cuda")}
    assert "this is a CUDA device that this machine lacks" in decisions["body"].reason
    assert decisions["body"].format == "bf16"


def test_a_layer_that_fits_is_native_and_the_other_stays(hopper: None) -> None:
    net = model()
    decisions = {d.module: d for d in fp8_block(emulate=False, islands=()).prepare(net, "cuda")}
    assert "by 'fp8_block_native'" in decisions["body"].reason
    assert rule_of(net["body"]) is not None
    assert "130 inputs are no multiple of 128" in decisions["odd"].reason
    assert rule_of(net["odd"]) is None


def test_a_layer_that_would_be_slower_than_in_bfloat16_stays_and_says_so(hopper: None) -> None:
    net = model()
    decisions = {d.module: d for d in fp8_block(emulate=False, islands=()).prepare(net, "cuda")}
    assert rule_of(net["narrow"]) is None
    assert "a matrix of 512 x 512 is no faster than in bfloat16" in decisions["narrow"].reason
    assert "inputs x outputs is 262,144, 600 x inputs + 560 x outputs 593,920" in decisions["narrow"].reason
    named = model()
    fp8_block(emulate=False, linear="fp8_block_native", high=("odd",), islands=()).prepare(named, "cuda")
    assert rule_of(named["narrow"]) is not None  # who names it gets it


def test_what_an_h200_has_measured_is_taken_unasked_and_what_no_gpu_has_is_not(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GEM_UNMEASURED", raising=False)
    reasons = {}
    for recipe in (fp8_block, fp8_square, mxfp8):
        net = model()
        reasons[recipe] = {d.module: d for d in recipe(emulate=False, islands=()).prepare(net, "cuda")}["body"].reason
        assert (rule_of(net["body"]) is not None) is (recipe is not mxfp8)
    assert "by 'fp8_block_native'" in reasons[fp8_block]
    assert "by 'fp8_square_native'" in reasons[fp8_square]
    assert "nobody has measured it yet" in reasons[mxfp8]


@pytest.mark.parametrize("taken", [False, True])
def test_what_nobody_has_measured_is_taken_only_when_asked_for(hopper: None, monkeypatch: pytest.MonkeyPatch, taken: bool) -> None:
    for known in ("BACKENDS", "NORM_BACKENDS"):
        monkeypatch.setattr(backends, known, tuple(replace(backend, measured=backend.emulated) for backend in getattr(backends, known)))
    monkeypatch.setenv("GEM_UNMEASURED", "1" if taken else "0")
    net = nn.ModuleDict({**model(), "qkv": Normed(1024, 3072)})
    decisions = {d.module: d for d in fp8_block(emulate=False, islands=()).prepare(net, "cuda")}
    assert (rule_of(net["body"]) is not None) is (net["qkv"].slot.asked is not None) is taken
    for name in ("body", "qkv"):
        assert ("nobody has measured it yet" in decisions[name].reason) is not taken


def test_a_recipe_without_a_native_backend_says_so() -> None:
    decisions = {d.module: d for d in fp8_rowwise(emulate=False, islands=()).prepare(model(), "cpu")}
    assert "there is no native one" in decisions["body"].reason


@pytest.mark.parametrize("options", [{"stochastic": True}, {"hadamard": True}, {"weight_grad": "high"}])
def test_what_no_native_backend_does_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="native backends round to nearest"):
        fp8_block(emulate=False, **options)


class Normed(nn.Module):
    """A norm and a matrix in one kernel, as pre-norm layers begin with."""

    def __init__(self, inputs: int, outputs: int, where: str = "before", matrices: int = 1) -> None:
        super().__init__()
        for number in range(matrices):
            self.register_parameter(f"weight{number}", nn.Parameter(torch.empty(outputs, inputs, device="meta")))
        self.bias = nn.Parameter(torch.empty(outputs, device="meta"))
        self.slot = KernelSlot("norm_linear", features=("rms", where, "residual", "return_sum"))


def normed_model() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "qkv": Normed(1024, 3072),
            "query": Normed(1024, 1024),
            "odd": Normed(1000, 4096),
            "wide": Normed(8192, 4096),
            "behind": Normed(1024, 3072, "after"),
            "two": Normed(1024, 3072, matrices=2),
        }
    )


@pytest.mark.parametrize(("recipe", "name"), [(fp8_block, "fp8_block_native"), (fp8_square, "fp8_square_native")])
def test_a_norm_and_its_matrix_are_native_where_they_gain(hopper: None, recipe, name: str) -> None:
    net = normed_model()
    decisions = {d.module: d for d in recipe(emulate=False, islands=()).prepare(net, "cuda")}
    assert {key: module.slot.asked for key, module in net.items()} == {key: name if key == "qkv" else None for key in net}
    assert decisions["qkv"].format.startswith("fp8_e4m3_")
    assert f"by the kernel backend {name!r}" in decisions["qkv"].reason
    reasons = {
        "query": "a matrix of 1024 x 1024 is no faster than in bfloat16",
        "odd": "1000 inputs are no multiple of 128",
        "wide": "8192 inputs are more than 4096",
        "behind": "nothing computes it natively",
        "two": "nothing computes it natively",
    }
    for key, reason in reasons.items():
        assert decisions[key].format == "bf16"
        assert reason in decisions[key].reason, key


def test_a_norm_and_its_matrix_stay_high_off_hopper_and_in_a_recipe_without_a_kernel() -> None:
    for recipe, reason in ((fp8_block, "its products need the FP8 tensor cores"), (mxfp8, "there is no native one")):
        net = normed_model()
        decisions = {d.module: d for d in recipe(emulate=False, islands=()).prepare(net, "cpu")}
        assert reason in decisions["qkv"].reason
        assert net["qkv"].slot.asked is None


def test_who_names_the_backend_of_linear_layers_names_none_of_a_norm_and_its_matrix(hopper: None) -> None:
    net = nn.ModuleDict({"plain": nn.Linear(512, 512), "query": Normed(1024, 1024)})
    decisions = {d.module: d for d in fp8_block(emulate=False, linear="fp8_block_native", islands=()).prepare(net, "cuda")}
    assert rule_of(net["plain"]) is not None
    assert "no faster than in bfloat16" in decisions["query"].reason


def test_matrices_of_sites() -> None:
    found = {site.name: (site.normed, site.matrix, site.width) for site in sites(normed_model())}
    assert found["qkv"] == (True, (3072, 1024), 1024)
    assert found["behind"] == (False, (3072, 1024), 1024)
    assert found["two"] == (True, None, 1024)
    assert {site.matrix for site in sites(nn.Sequential(nn.Linear(3, 5)))} == {(5, 3)}
