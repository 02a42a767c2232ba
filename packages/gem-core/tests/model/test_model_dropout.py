"""Dropout draws one mask for forward and backward, whatever way outputs are put together."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from gem_core.model.gem import GemModel, GemOptions


def options(ensemble: str, dropout: float = 0.5) -> GemOptions:
    return GemOptions.model_validate(
        {
            "dim": 8,
            "layers": 1,
            "tokens": 6,
            "ensemble": ensemble,
            "experts": [{"kind": "deep", "hidden": [16], "dropout": dropout}, {"kind": "cross", "dropout": dropout}],
            "sequence": {"dim": 8, "heads": 2, "dropout": dropout},
            "features": {"embedding_dim": 8, "dropout": dropout},
            "head": {"hidden": [8], "dropout": dropout},
            "dropout": dropout,
        }
    )


def slopes(kit: ModuleType, ensemble: str, backward_seed: int = 3) -> tuple[float, float]:
    """The loss's slope along a random direction of all parameters, by backward and by differences of forwards with the same seed."""
    batch = kit.make_batch(kit.FULL, [[3, 2], [0, 1], [4, 4]])
    model, tables = kit.make_model(GemModel, kit.FULL, options(ensemble))
    model.double().train()
    numbers = {name: value.double() for name, value in batch.dense.items()}
    batch = replace(batch, dense=numbers, event_dense={name: value.double() for name, value in batch.event_dense.items()})
    embedded = {name: value.double().detach() for name, value in tables(batch.ids).items()}
    draw = torch.Generator().manual_seed(1)
    parameters = list(model.parameters())
    direction = [torch.randn(p.shape, generator=draw, dtype=torch.float64) for p in parameters]

    def loss(seed: int) -> Any:
        torch.manual_seed(seed)
        return torch.stack([logit.double().sin().sum() for logit in model(batch, embedded).values()]).sum()

    gradients = torch.autograd.grad(loss(backward_seed), parameters, allow_unused=True)
    by_backward = sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True) if g is not None)
    ends = []
    for sign in (1e-6, -2e-6):
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p += sign * d
            ends.append(float(loss(3)))
    return by_backward, (ends[0] - ends[1]) / 2e-6


@pytest.mark.parametrize("ensemble", ["sum", "concat"])
def test_case_G12_forward_and_backward_share_a_mask(kit: ModuleType, ensemble: str) -> None:
    by_backward, by_differences = slopes(kit, ensemble)
    assert by_backward == pytest.approx(by_differences, rel=1e-4)


@pytest.mark.parametrize("ensemble", ["sum", "concat"])
def test_case_G12_planted_fault_another_mask_is_seen(kit: ModuleType, ensemble: str) -> None:
    by_backward, by_differences = slopes(kit, ensemble, backward_seed=4)
    assert by_backward != pytest.approx(by_differences, rel=1e-2)
