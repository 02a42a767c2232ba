"""Numbers on their way from the device to the host."""

import torch
from torch import Tensor


class Told:
    """A tensor that is being copied: asking for it waits for what computed it, not for what was queued after it."""

    def __init__(self, value: Tensor) -> None:
        self._value = value.detach().to("cpu", non_blocking=True)
        self._arrived = torch.cuda.current_stream(value.device).record_event() if value.is_cuda else None

    def value(self) -> Tensor:
        """On the CPU."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._value
