"""Weight decay groups, schedules, clipping, averages."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gem_core.spec import RunFailed
from gem_core.train.optim import AveragedWeights, LateNorm, adamw, clip_gradients, lr_factor, skips_spoilt

SCHEDULES = ("constant", "linear", "cosine")


def factor(step: int, *, total: int = 10, schedule: str = "constant", warmup: int = 0, final: float = 0.0) -> float:
    return lr_factor(step, total=total, schedule=schedule, warmup=warmup, final=final)


def test_norms_and_biases_do_not_decay() -> None:
    """One step with zero gradients: only decay moves a parameter, by lr * weight_decay of itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = adamw(model, lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.5)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        kept = 0.95 if name in ("0.weight", "2.weight") else 1.0
        assert torch.allclose(p, kept * before[name]), name


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Linear(3, 4)
    model.weight.requires_grad_(False)
    optimizer = adamw(model, lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.5)
    assert [p for group in optimizer.param_groups for p in group["params"]] == [model.bias]


def test_one_kernel_updates_whole_parameters_on_cuda_alone() -> None:
    settings = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    assert not any(group["fused"] for group in adamw(nn.Linear(3, 4), **settings).param_groups)
    if torch.cuda.is_available():
        assert all(group["fused"] for group in adamw(nn.Linear(3, 4, device="cuda"), **settings).param_groups)


def test_warm_up_rises_to_one_and_constant_stays() -> None:
    assert [factor(step, warmup=4) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_linear_falls_to_its_end_at_the_last_step() -> None:
    assert [factor(step, schedule="linear", final=0.1) for step in (0, 3, 9, 12)] == pytest.approx([1.0, 0.7, 0.1, 0.1])


def test_cosine_is_half_way_in_the_middle() -> None:
    assert factor(5, total=11, schedule="cosine", final=0.2) == pytest.approx(0.6)
    assert factor(10, total=11, schedule="cosine") == pytest.approx(0.0, abs=1e-12)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.sampled_from(SCHEDULES), st.integers(1, 40), st.integers(0, 45), st.floats(0, 1))
def test_factors_stay_between_zero_and_one_and_never_rise_after_warm_up(schedule: str, total: int, warmup: int, final: float) -> None:
    values = [factor(step, total=total, schedule=schedule, warmup=warmup, final=final) for step in range(total + 5)]
    assert all(-1e-9 <= value <= 1 + 1e-9 for value in values)
    assert values[:warmup] == sorted(values[:warmup])
    assert values[warmup:] == sorted(values[warmup:], reverse=True)


def with_gradients(*gradients: float) -> nn.Module:
    model = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in gradients)
    for p, gradient in zip(model, gradients, strict=True):
        p.grad = torch.tensor([gradient])
    return model


@pytest.mark.parametrize(("largest", "expected"), [(1.0, [0.6, 0.8]), (0.0, [3.0, 4.0]), (10.0, [3.0, 4.0])])
def test_clipping_scales_to_the_largest_norm_and_reports_the_one_before(largest: float, expected: list[float]) -> None:
    model = with_gradients(3.0, 4.0)
    assert clip_gradients(model, largest) == pytest.approx(5.0)
    assert [float(p.grad) for p in model.parameters() if p.grad is not None] == pytest.approx(expected, rel=1e-4)


def test_a_module_without_gradients_has_norm_zero() -> None:
    assert clip_gradients(nn.Linear(2, 2), 1.0) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_named(bad: float) -> None:
    with pytest.raises(RunFailed, match="not finite in 1 parameters: 1"):
        clip_gradients(with_gradients(1.0, bad), 1.0)


def test_finite_gradients_too_large_to_add_up_are_told_apart() -> None:
    with pytest.raises(RunFailed, match="finite in every parameter, but too large"):
        clip_gradients(with_gradients(3e38, 3e38), 1.0)


def test_an_average_continues_from_its_state() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.load_state_dict(first.state_dict())
    averages = [AveragedWeights(first, 0.9), AveragedWeights(second, 0.9)]
    for model in (first, second):
        nn.init.ones_(model.weight)
    averages[0].update()
    for name, kept in averages[1].state_dict().items():
        kept.copy_(averages[0].state_dict()[name])  # as a checkpoint fills it
    for average in averages:
        average.update()
    assert all(torch.equal(a, averages[1].state_dict()[name]) for name, a in averages[0].state_dict().items())


def test_weights_come_back_when_evaluation_raises() -> None:
    model = nn.Linear(2, 2)
    average = AveragedWeights(model, 0.9)
    nn.init.ones_(model.weight)

    def fail() -> None:
        with average.in_place():
            assert not model.weight.eq(1).all()
            raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        fail()
    assert model.weight.eq(1).all()


def test_a_late_norm_clips_as_the_other_does() -> None:
    for largest in (0.0, 1.0, 100.0):
        first, second = with_gradients(3.0, 4.0), with_gradients(3.0, 4.0)
        optimizer = torch.optim.AdamW(second.parameters(), lr=0.1, fused=True)
        assert skips_spoilt(optimizer)
        assert not skips_spoilt(torch.optim.AdamW(first.parameters(), lr=0.1))
        late = LateNorm(second, largest, optimizer)
        assert late.value() == pytest.approx(clip_gradients(first, largest))
        before = [p.detach().clone() for p in second.parameters()]
        optimizer.step()  # clips: the first step alone would be as long for gradients of any size
        assert not all(torch.equal(p, kept) for p, kept in zip(second.parameters(), before, strict=True))
        for parameter, clipped in zip(second.parameters(), first.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, clipped.grad)
            torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], 0.1 * clipped.grad)  # type: ignore[operator]


def test_the_same_optimiser_clips_only_what_it_is_told_to() -> None:
    model = with_gradients(3.0, 4.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    LateNorm(model, 1.0, optimizer)
    LateNorm(model, 0.0, optimizer)
    optimizer.step()
    assert [parameter.grad.tolist() for parameter in model.parameters()] == [[3.0], [4.0]]  # type: ignore[union-attr]
