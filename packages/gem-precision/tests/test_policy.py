"""Which modules become islands, and why."""

from typing import Any

import pytest
import torch
from torch import nn

from gem_core.ops.slot import KernelSlot
from gem_core.spec import RequestError
from gem_precision.policy import DEFAULT_ISLANDS, Policy, decisions


def formats(policy: Policy, model: nn.Module) -> dict[str, str]:
    return {d.module: d.format for d in decisions(model, policy.find(model))}


def reasons(policy: Policy, model: nn.Module) -> dict[str, str]:
    return {d.module: d.reason for d in decisions(model, policy.find(model))}


def test_defaults_keep_first_and_last_layers_norms_softmaxes_and_small_matmuls(model: nn.Module) -> None:
    got = formats(Policy(), model)
    inner = {"norm": "fp32", "mix": "bf16", "fused.linear": "bf16", "gate": "fp32", "softmax": "fp32", "drop": "input"}
    blocks = {f"layers.{i}.{name}": value for i in (0, 1) for name, value in inner.items()}
    assert got == {"features": "fp32", **blocks, "heads.hidden": "fp32", "heads.out": "fp32"}


def test_every_leaf_has_one_decision_with_a_reason(model: nn.Module) -> None:
    got = decisions(model, Policy().find(model))
    assert [d.module for d in got] == [name for name, part in model.named_modules() if not list(part.children())]
    assert all(d.reason for d in got)


def test_reasons_name_the_rule(model: nn.Module) -> None:
    got = reasons(Policy(), model)
    assert "32 x 4" in got["layers.0.gate"]
    assert "under 16" in got["layers.0.gate"]
    assert got["heads.out"].startswith("inside 'heads': last layers")
    assert "softmax" in got["layers.0.softmax"]
    assert "named by the pattern 'layers.1'" in reasons(Policy(["layers.1"]), model)["layers.1.mix"]


def test_a_users_patterns_replace_the_default_names_but_not_the_types(model: nn.Module) -> None:
    got = formats(Policy(["layers.1.mix"], small=0), model)
    assert {name for name, value in got.items() if value == "fp32"} == {
        "layers.1.mix",
        *(f"layers.{i}.{name}" for i in (0, 1) for name in ("norm", "softmax")),
    }


def test_no_names_and_no_size_leave_only_the_types(model: nn.Module) -> None:
    assert {name.rsplit(".", 1)[-1] for name, value in formats(Policy([], small=0), model).items() if value == "fp32"} == {"norm", "softmax"}


@pytest.mark.parametrize("pattern", ["head", "layers.2", "Heads", "layers.[5-9].*"])
def test_a_users_pattern_without_a_module_is_an_error(model: nn.Module, pattern: str) -> None:
    with pytest.raises(RequestError, match="no module has such a name") as caught:
        Policy(["heads", pattern]).check(model)
    assert pattern in str(caught.value)
    assert "features" in caught.value.do


def test_default_patterns_may_match_nothing() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    Policy().check(model)
    assert formats(Policy(), model) == {"0": "bf16"}
    assert all(DEFAULT_ISLANDS.values())


@pytest.mark.parametrize(
    "module",
    [nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4), nn.BatchNorm1d(4), nn.InstanceNorm1d(4), nn.LogSoftmax(-1), nn.BCEWithLogitsLoss()],
)
def test_norms_softmaxes_and_losses_are_known_by_type(module: nn.Module) -> None:
    assert formats(Policy([], small=0), nn.Sequential(module)) == {"0": "fp32"}


@pytest.mark.parametrize(("sizes", "expected"), [((32, 15), "fp32"), ((15, 32), "fp32"), ((16, 16), "bf16")])
def test_small_counts_inputs_and_outputs(sizes: tuple[int, int], expected: str) -> None:
    assert formats(Policy(small=16), nn.Linear(*sizes)) == {"model": expected}


def test_norms_are_known_by_name_too(kit: Any) -> None:
    model = nn.ModuleDict({"final_norm": kit.spy(4), "norm2": kit.spy(4), "normal": kit.spy(4)})
    assert formats(Policy(), model) == {"final_norm": "fp32", "norm2": "fp32", "normal": "bf16"}


class KernelNorm(nn.LayerNorm):
    """A norm that hands its work to the op ``add_norm``."""

    def __init__(self) -> None:
        super().__init__(4)
        self.slot = KernelSlot("add_norm", features=("layer", "affine"))


def test_a_norm_of_a_kernel_keeps_its_statistics_itself_and_is_no_island_unless_a_user_names_it() -> None:
    model = nn.ModuleDict({"norm": KernelNorm(), "other": KernelNorm(), "features": nn.Sequential(KernelNorm()), "plain_norm": nn.LayerNorm(4)})
    assert formats(Policy(), model) == {"norm": "bf16", "other": "bf16", "features.0": "fp32", "plain_norm": "fp32"}
    assert "float32" in reasons(Policy(), model)["norm"]
    assert formats(Policy(["other"]), model) == {"norm": "bf16", "other": "fp32", "features.0": "bf16", "plain_norm": "fp32"}


def test_a_look_up_is_not_called_bf16() -> None:
    assert formats(Policy(), nn.Sequential(nn.Embedding(3, 4))) == {"0": "fp32"}


def test_weights_that_a_kernel_reads_are_judged_with_their_reader(kit: Any) -> None:
    model = nn.Sequential(kit.fused(32, 4), kit.fused(32, 32))
    assert set(Policy().find(model)) == {"0"}
    assert set(Policy(["1.linear"], small=0).find(model)) == {"1"}
    attention = nn.Sequential(nn.MultiheadAttention(32, 2))
    assert set(Policy(["*.out_proj"]).find(attention)) == {"0"}


def test_a_module_shared_with_an_island_is_decided_as_one() -> None:
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict({"body": nn.Sequential(shared), "tail": nn.Sequential(shared)})
    assert formats(Policy(["tail"]), model) == {"body.0": "fp32"}


def test_a_nested_match_belongs_to_the_outer_island(model: nn.Module) -> None:
    policy = Policy(["heads", "heads.out"])
    policy.check(model)
    assert "heads" in policy.find(model)
    assert "heads.out" not in policy.find(model)


def test_the_policy_reads_no_tensor(kit: Any) -> None:
    with torch.device("meta"):
        model = kit.small()
    assert formats(Policy(), model) == formats(Policy(), kit.small())
