"""The step ledger on a CUDA device: phases are timed on the stream that computes, add up to it, and are read one step late."""

import time

import pytest
import torch

from gem_core.builtin.recorder import Recorder
from gem_core.train.ledger.clock import BACKWARD, FORWARD, OTHER, Clock

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SIZE, PRODUCTS = 4096, 20


def test_phases_hold_the_work_of_the_gpu_and_idle_time_is_other() -> None:
    """Backward is twice forward's work, queued at once; the host then sleeps while the GPU stands idle."""
    device, recorder = torch.device("cuda", torch.cuda.current_device()), Recorder()
    a = torch.randn(SIZE, SIZE, device=device)
    torch.mm(a, a)
    clock = Clock()
    clock.start(device, [recorder], 1)
    for _ in range(4):
        with clock.phase(FORWARD):
            for _ in range(PRODUCTS):
                torch.mm(a, a)
        with clock.phase(BACKWARD), recorder.recorded("products", "all_gather", 8, "world", 2, device):
            for _ in range(PRODUCTS):
                torch.mm(a, a)
        with clock.phase(BACKWARD):
            for _ in range(PRODUCTS):
                torch.mm(a, a)
        torch.cuda.synchronize()
        time.sleep(0.05)
        clock.end_step()
    steps = clock.take()
    assert [step.step for step in steps] == [1, 2, 3]  # the last one stays, so that nothing waits for it
    for step in steps:
        forward = step.parts[FORWARD]
        assert step.parts[BACKWARD] == pytest.approx(forward, rel=0.3)
        assert step.collectives["products"].exposed == pytest.approx(forward, rel=0.3)
        assert step.parts[OTHER] == pytest.approx(0.05, abs=0.02)
        assert step.seconds == pytest.approx(3 * forward + 0.05, rel=0.2)
    clock.end_step()
    assert [step.step for step in clock.take()] == [4]
    torch.cuda.synchronize()
    assert [step.step for step in clock.take(over=True)] == [5]
