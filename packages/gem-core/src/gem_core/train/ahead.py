"""One batch ahead: while a step computes, the next batch is copied to the device and its ids travel to the ranks that keep their rows."""

from dataclasses import dataclass
from typing import Any

import torch

from gem_core.batch import Batch
from gem_core.spec import Embeddings, PrefetchesIds


@dataclass(frozen=True, slots=True)
class Ready:
    """A batch of the host, the same on its device, and what the tables are called with: its ids, or what the engine's ``prefetch`` made of them."""

    host: Batch
    batch: Batch
    ids: Any


class Ahead:
    """Prepares the next batch beside the present one.

    On CUDA that happens on a stream of its own. Two rules keep the streams apart: the computing stream waits for a batch before it reads it, and the
    other one takes back memory of a batch only when the step that read it is over, because it waits for the end of that step before it prepares
    another. So nothing that ``prefetch`` allocates needs to be told of the second stream.

    Args:
        embeddings: the tables; engines without ``prefetch`` get their ids when they are called.
        device: where batches go.
    """

    def __init__(self, embeddings: Embeddings, device: torch.device) -> None:
        self._prefetch = embeddings.prefetch if isinstance(embeddings, PrefetchesIds) else None
        self._device = device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._over: torch.cuda.Event | None = None
        self._now: Ready | None = None
        self._next: Ready | None = None

    def prepare(self, host: Batch) -> None:
        """Start on a batch of the host, which ``take`` will ask for next. Collective where the engine's ``prefetch`` is.

        Raises:
            RequestError: the engine refuses its ids.
        """
        if self._side is None:
            self._next = self._ready(host, host.to(self._device))
            return
        if self._over is not None:
            self._side.wait_event(self._over)
        with torch.cuda.stream(self._side):
            self._next = self._ready(host, host.pin_memory().to(self._device, non_blocking=True))

    def take(self, host: Batch) -> Ready:
        """The batch on its device, to be computed on now; prepares it if that was not done ahead."""
        if self._next is None or self._next.host is not host:
            self.prepare(host)
        self._now, self._next = self._next, None
        assert self._now is not None
        if self._side is not None:
            here = torch.cuda.current_stream(self._device)
            self._over = here.record_event()  # what was read before this batch
            here.wait_stream(self._side)
        return self._now

    def _ready(self, host: Batch, batch: Batch) -> Ready:
        return Ready(host, batch, batch.ids if self._prefetch is None else self._prefetch(batch.ids))
