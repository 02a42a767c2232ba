"""``activations`` on four gloo ranks: the bits of the same layout without it. The ranks' work is in ranks_memory.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_memory import LAYOUTS, RUNS

SCRIPT = Path(__file__).with_name("ranks_memory.py")
WORLD = 4


@pytest.fixture(scope="module")
def ranks(on_ranks: Callable[..., list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(SCRIPT, tmp_path_factory.mktemp("memory"), WORLD)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("policy", [name for name in RUNS if name != "keep"])
def test_losses_and_weights_are_those_of_the_layout_alone(ranks: list[dict[str, Any]], layout: Any, policy: str) -> None:
    """Weights are gathered again and rows are exchanged again where a block is computed again; some steps leave ranks without rows."""
    for rank in ranks:
        (losses, weights), (plain_losses, plain) = rank["runs"][layout, policy], rank["runs"][layout, "keep"]
        assert losses == plain_losses
        assert weights.keys() == plain.keys()
        for name, weight in plain.items():
            assert torch.equal(weights[name], weight), name


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_ranks_plan_the_same(ranks: list[dict[str, Any]], layout: Any) -> None:
    """To the last digit of what each rank measured, times and speeds of copies included: figures are the largest of any rank."""
    plans = [rank["plans"][layout, "planned"] for rank in ranks]
    assert all(plan == plans[0] for plan in plans)
    assert plans[0]["policies"] == {"layers.0": "offload", "layers.1": "keep"}
    assert [block["name"] for block in plans[0]["plan"]] == ["layers.0", "layers.1"]
    assert plans[0]["plan"][0]["extra"] > 0
    assert all(block["saved"] > 0 and block["seconds"] > 0 for block in plans[0]["plan"])


def test_the_wait_for_gradients_under_ddp_is_told_from_backward(ranks: list[dict[str, Any]]) -> None:
    """The slow rank finds the others waiting."""
    for number, rank in enumerate(ranks):
        for seconds in rank["waits"]:
            assert seconds > 0
            assert number == 0 or seconds > 0.1
    assert min(ranks[0]["waits"]) < 0.1
