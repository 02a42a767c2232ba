"""How many SMs something takes that runs on another stream: where one thread block more needs another wave.

A block of the probe fills an SM: 1024 threads of 64 registers are all that it has. So as many blocks run at once as there are
free SMs, and one more doubles the time.
"""

import statistics
from collections.abc import Callable
from typing import Any, Protocol

import torch

LIVE = 52
"""Values that a thread of the probe keeps; with what the loop needs, 64 registers, of which a block of 1024 threads can have no more."""
ROUNDS = 2000
"""About half a millisecond."""
SOURCE = """
extern "C" __global__ void __launch_bounds__(1024) fill(float* out, int rounds, int never) {
    float v[%(live)d];
    #pragma unroll
    for (int i = 0; i < %(live)d; ++i) v[i] = threadIdx.x * 0.5f + i;
    for (int r = 0; r < rounds; ++r) {
        #pragma unroll
        for (int i = 0; i < %(live)d; ++i) v[i] = v[i] * 0.9999f + v[(i + 1) %% %(live)d];
    }
    float total = 0.0f;
    #pragma unroll
    for (int i = 0; i < %(live)d; ++i) total += v[i];
    if (never) out[blockIdx.x * 1024 + threadIdx.x] = total;
}
"""


class Beside(Protocol):
    """Something that runs while other work is timed."""

    def around(self, work: Callable[[], Any]) -> tuple[float, bool]:
        """Seconds of ``work``, and whether the other outlasted it."""
        ...


class SmCount:
    """Counts SMs by waves of a probe that fills one with each block.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.sms: int = torch.cuda.get_device_properties(device).multi_processor_count
        compile_kernel: Any = torch.cuda._compile_kernel
        self._kernel = compile_kernel(SOURCE % {"live": LIVE}, "fill")
        self._out = torch.empty(1024, device=device)

    def probe(self, blocks: int) -> Callable[[], None]:
        """Run so many blocks."""
        return lambda: self._kernel(grid=(blocks, 1, 1), block=(1024, 1, 1), args=[self._out, ROUNDS, 0])

    def taken(self, beside: Beside, repeats: int = 9) -> int:
        """SMs that the other work takes. Collective where it is."""
        return self.sms - free_blocks(lambda blocks: statistics.median(beside.around(self.probe(blocks))[0] for _ in range(repeats)), self.sms)


def free_blocks(seconds: Callable[[int], float], most: int) -> int:
    """The largest number of blocks, at most ``most``, that run in one wave: in under 1.5 times the time of one.

    It is found by halving, always with the same number of steps, as the ranks of a collective must ask equally often.
    """
    one = seconds(1)
    low, high = 1, most + 1
    for _ in range(most.bit_length() + 1):
        middle = (low + high) // 2
        if middle != low and seconds(middle) < 1.5 * one:
            low = middle
        elif middle != low:
            high = middle
        else:
            seconds(low)
    return low
