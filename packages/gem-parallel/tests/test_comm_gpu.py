"""Communication on CUDA: every backend on two GPUs, and the count of SMs on one. The ranks' work is in ranks_comm_cuda.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gem_parallel.comm.backends import NAMES
from gem_parallel.comm.occupancy import SmCount

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SCRIPT = Path(__file__).with_name("ranks_comm_cuda.py")


@pytest.fixture(scope="module")
def ranks(on_ranks: Callable[..., list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return on_ranks(SCRIPT, tmp_path_factory.mktemp("comm"), 2)


@pytest.mark.parametrize("backend", NAMES)
def test_every_backend_gathers(ranks: list[dict[str, Any]], backend: str) -> None:
    assert all(all(rank["gathered"][backend]) for rank in ranks)


@pytest.mark.parametrize("backend", NAMES)
def test_training_does_not_depend_on_the_backend(ranks: list[dict[str, Any]], backend: str) -> None:
    for rank in ranks:
        for name, tensor in rank["trained"]["default"].items():
            assert torch.equal(rank["trained"][backend][name], tensor), name


@pytest.mark.parametrize("backend", NAMES)
def test_gathers_run_on_a_stream_of_their_own_and_waits_are_timed(ranks: list[dict[str, Any]], backend: str) -> None:
    entries = ranks[0]["recorded"][backend]
    gathers = [entry for entry in entries if entry["kind"] == "all_gather"]
    assert len(gathers) == 5
    assert all(entry["seconds"] > 0 and entry["exposed"] == 0 for entry in gathers)
    waits = [entry for entry in entries if entry["kind"] == "wait"]
    assert {"dense: wait for weights of layers.0", "dense: wait for gradients"} <= {entry["name"] for entry in waits}
    assert all(entry["exposed"] == entry["seconds"] >= 0 for entry in waits)


class Nobody:
    """Nothing runs beside the work."""

    def around(self, work: Callable[[], Any]) -> tuple[float, bool]:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last), True


def test_nothing_takes_no_sms() -> None:
    """So a block of the probe does fill an SM, and one block more than there are SMs needs another wave."""
    count = SmCount(torch.device("cuda", 0))
    nobody = Nobody()
    nobody.around(count.probe(1))
    assert count.taken(nobody) == 0
    one, more = (min(nobody.around(count.probe(blocks))[0] for _ in range(5)) for blocks in (count.sms, count.sms + 1))
    assert more > 1.7 * one
