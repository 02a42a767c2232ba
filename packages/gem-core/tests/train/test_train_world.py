"""What torchrun says, which device is taken, and exchanges of a single process."""

import pytest
import torch

from gem_core.spec import MachineError, RequestError
from gem_core.train.world import World, close_world, open_world, pick_device, torchrun_ranks

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_without_torchrun_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torchrun_ranks() == (0, 1, 0)
    monkeypatch.setenv("RANK", "3")  # somebody else's variable
    assert torchrun_ranks() == (0, 1, 0)


def test_torchruns_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(NAMES, ("5", "8", "1"), strict=True):
        monkeypatch.setenv(name, value)
    assert torchrun_ranks() == (5, 8, 1)


@pytest.mark.parametrize("values", [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "two", "RANK": "0", "LOCAL_RANK": "0"}])
def test_half_of_the_variables_is_refused(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RequestError, match="torchrun --nproc-per-node"):
        torchrun_ranks()


@pytest.mark.parametrize(
    ("asked", "gpus", "rank", "expected"),
    [("auto", 0, 0, "cpu"), ("cpu", 4, 0, "cpu"), ("auto", 2, 1, "cuda:1"), ("cuda", 2, 0, "cuda:0"), ("auto", 0, 5, "cpu")],
)
def test_devices(monkeypatch: pytest.MonkeyPatch, asked: str, gpus: int, rank: int, expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert str(pick_device(asked, rank)) == expected


@pytest.mark.parametrize(("asked", "gpus", "rank"), [("cuda", 0, 0), ("cuda", 2, 2), ("auto", 2, 2)])
def test_a_missing_gpu_is_this_machines_fault(monkeypatch: pytest.MonkeyPatch, asked: str, gpus: int, rank: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(MachineError, match=f"torch sees {gpus} CUDA devices") as caught:
        pick_device(asked, rank)
    assert caught.value.exit_code == 3


def test_case_A07_one_process_opens_no_group() -> None:
    world = open_world("cpu")
    assert (world.rank, world.size, world.leads) == (0, 1, True)
    assert not torch.distributed.is_initialized()
    close_world(world, keep=None)


def test_exchanges_of_one_process_return_their_input() -> None:
    world = World()
    assert world.all_gather(torch.tensor([1.0, 2.0])).tolist() == [[1.0, 2.0]]
    assert world.gather_rows(torch.ones(2, 3)).shape == (2, 3)
    assert world.gather_objects("x") == ["x"]
    assert world.from_lead({"a": 1}) == {"a": 1}
    world.barrier()
