"""What collectives reach, and what they cost the computing beside them, on the ranks that torchrun started.

Every figure is the median of repeated calls and of the slowest rank. Bandwidth is that of a rank's link: ``(n - 1) / n * size / time``.
"""

import datetime
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gem_core.spec import RequestError
from gem_parallel.comm.backends import LOW_CTAS, Here, set_environment, why_not
from gem_parallel.comm.collectives import scatter_into
from gem_parallel.comm.occupancy import SmCount
from gem_parallel.comm.transport import carrier_of, few_blocks

CUDA_SIZES = tuple(2**n for n in (20, 22, 24, 26, 28, 30))
CPU_SIZES = tuple(2**n for n in (16, 20, 22))
GEMM = {"cuda": 8192, "cpu": 512}
"""Rows, columns and depth of the matrix product that runs beside a collective."""
BESIDE = {"cuda": 2**28, "cpu": 2**22}
"""Bytes of the collective that runs beside it."""
PRODUCTS = 8
"""Matrix products in one timed window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """The ranks of one host, or all ranks of several."""

    name: str
    group: dist.ProcessGroup
    here: Here


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One collective by one backend over one tier: ``call(whole, part)``."""

    what: str
    backend: str
    tier: Tier
    call: Callable[[Tensor, Tensor], Any]


def measure_all(*, backends: Sequence[str], sizes: Sequence[int] | None, repeats: int) -> Iterator[dict[str, Any]]:
    """The rows of the table on the first rank, nothing on the others. Collective.

    Raises:
        RequestError: this is not one of several processes that torchrun started.
    """
    device, opened = open_group()
    try:
        about = _about(device)
        for row in _rows(device, backends, sizes or (CUDA_SIZES if device.type == "cuda" else CPU_SIZES), repeats):
            if dist.get_rank() == 0:
                yield {**about, **row}
    finally:
        if opened:
            dist.barrier()
            dist.destroy_process_group()


def open_group() -> tuple[torch.device, bool]:
    """This rank's device, and whether the process group was opened here."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise RequestError("gem bench comm", "there is one process", "Start it with `torchrun --nproc-per-node 2 -m gem_core bench comm`.")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    set_environment(str(device))
    if dist.is_initialized():
        return device, False
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return device, True


def _about(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return {"date": datetime.date.today().isoformat(), "device": name, "torch": torch.__version__, "ranks": dist.get_world_size()}


def _rows(device: torch.device, backends: Sequence[str], sizes: Sequence[int], repeats: int) -> Iterator[dict[str, Any]]:
    for tier in tiers(device):
        for backend in backends:
            about = {"backend": backend, "tier": tier.name}
            if reasons := why_not(backend, tier.here):
                yield {**about, "what": "-", "note": "; ".join(reasons)}
                continue
            try:
                for way in ways(backend, tier):
                    yield from ({**about, "what": way.what, **row} for row in _of_way(way, sizes, device, repeats))
            except RuntimeError as error:  # one backend's failure, the same on every rank, does not lose the table
                yield {**about, "what": "-", "note": f"failed: {_first_line(error)}"}


def _of_way(way: Way, sizes: Sequence[int], device: torch.device, repeats: int) -> Iterator[dict[str, Any]]:
    for size in sizes:
        seconds = slowest(statistics.median(timed(way, size, device, repeats)))
        yield {"bytes": size, "ms": 1e3 * seconds, "gbps": link_bytes(size, way.tier.here.ranks) / seconds / 1e9}
    yield beside(way, device, repeats)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def tiers(device: torch.device) -> list[Tier]:
    """The groups to measure. Collective."""
    world, rank = dist.get_world_size(), dist.get_rank()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    peers = device.type == "cuda" and all(
        torch.cuda.can_device_access_peer(device.index, other) for other in range(torch.cuda.device_count()) if other != device.index
    )
    found = []
    if local > 1:
        hosts = [dist.new_group(list(range(first, first + local)), group_desc="host") for first in range(0, world, local)]
        found.append(Tier(name="host", group=hosts[rank // local], here=Here(device=device.type, ranks=local, local=local, peer_access=peers)))
    if local < world:
        everyone = dist.new_group(group_desc="world")
        found.append(Tier(name="world", group=everyone, here=Here(device=device.type, ranks=world, local=local, peer_access=peers)))
    return found


def ways(backend: str, tier: Tier) -> list[Way]:
    """The collectives of a backend. Copy engines cannot add, so they only gather. A rank's part is in its place already, as in ``fully_shard``."""
    gather, rank = carrier_of(backend, tier.group, tier.here), dist.get_rank(tier.group)
    found = [Way(what="all_gather", backend=backend, tier=tier, call=lambda whole, part: gather(whole, whole.chunk(tier.here.ranks)[rank]))]
    if backend != "copy_engine":
        group = few_blocks(tier.group, LOW_CTAS) if backend == "low_cta" else tier.group
        found.append(Way(what="reduce_scatter", backend=backend, tier=tier, call=lambda whole, part: scatter_into(part, whole, group=group)))
    return found


def link_bytes(size: int, ranks: int) -> float:
    """Bytes that a rank sends in an all-gather or a reduce-scatter of ``size`` bytes in all."""
    return size * (ranks - 1) / ranks


def tensors(size: int, ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A whole tensor of about ``size`` bytes, bf16, and one rank's part."""
    part = math.ceil(size / ranks / 2)
    return torch.ones(part * ranks, dtype=torch.bfloat16, device=device), torch.ones(part, dtype=torch.bfloat16, device=device)


def timed(way: Way, size: int, device: torch.device, repeats: int) -> list[float]:
    """Seconds of each call, after three to warm up."""
    whole, part = tensors(size, way.tier.here.ranks, device)
    return [seconds_of(lambda: way.call(whole, part), device) for _ in range(repeats + 3)][3:]


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call on the current stream, or on the host's clock."""
    if device.type != "cuda":
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    first.record()
    work()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def slowest(seconds: float) -> float:
    """The largest over all ranks."""
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def beside(way: Way, device: torch.device, repeats: int) -> dict[str, Any]:
    """Matrix products alone, and while the collective runs all the time beside them; SMs that it takes, by where kernels need another wave."""
    n, size = GEMM[device.type], BESIDE[device.type]
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(n, n, dtype=kind, device=device) for _ in range(2))
    out = torch.empty(n, n, dtype=kind, device=device)

    def products() -> None:
        for _ in range(PRODUCTS):
            torch.mm(a, b, out=out)

    first = slowest(statistics.median([seconds_of(products, device) for _ in range(4)][1:]))
    whole, part = tensors(size, way.tier.here.ranks, device)
    each = slowest(statistics.median(timed(way, size, device, 3)))
    # the same number on every rank: enough to outlast twice the products
    calls = 2 + math.ceil(2.5 * first / each)
    crowd = Crowd(lambda: way.call(whole, part), calls, device)
    turns = [(alone_now(products, device), *crowd.around(products)) for _ in range(repeats)]  # in turn, as clocks and the load of a machine drift
    alone, seconds = (slowest(statistics.median([turn[side] for turn in turns])) for side in (0, 1))
    covered = min(covers for _, _, covers in turns)
    row: dict[str, Any] = {"bytes": size, "gemm_ms": 1e3 * alone / PRODUCTS, "overlapped_ms": 1e3 * seconds / PRODUCTS}
    row["slowdown_pct"] = 100 * (seconds / alone - 1)
    if slowest(1.0 - covered) > 0:
        row["note"] = "the collective ended before the products did: the slowdown is a lower bound"
    if device.type == "cuda":
        try:
            row["sms"] = int(slowest(float(SmCount(device).taken(crowd))))
        except RuntimeError as error:  # of the probe's compilation, which needs NVRTC
            row["note"] = f"{row.get('note', '')} SMs not counted: {_first_line(error)}".strip()
    return row


def alone_now(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call while no rank does anything else. Collective."""
    dist.barrier()
    return seconds_of(work, device)


class Crowd:
    """A collective that runs again and again beside other work.

    Args:
        call: the collective.
        calls: how often; the same on every rank, or they would wait for each other.
        device: CUDA runs it on a stream of its own, the CPU in a thread.
    """

    def __init__(self, call: Callable[[], Any], calls: int, device: torch.device) -> None:
        self._call, self._calls, self._device = call, calls, device
        self._side: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def around(self, work: Callable[[], Any]) -> tuple[float, bool]:
        """Seconds of ``work`` beside the collectives, and whether they outlasted it. Collective."""
        dist.barrier()
        return self._around_cpu(work) if self._side is None else self._around_cuda(work)

    def _around_cpu(self, work: Callable[[], Any]) -> tuple[float, bool]:
        from threading import Thread

        thread = Thread(target=lambda: [self._call() for _ in range(self._calls)])
        thread.start()
        seconds = seconds_of(work, self._device)
        covers = thread.is_alive()
        thread.join()
        return seconds, covers

    def _around_cuda(self, work: Callable[[], Any]) -> tuple[float, bool]:
        first, last, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))  # type: ignore[no-untyped-call]
        current: Any = torch.cuda.current_stream()
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            self._call()
            begun = self._side.record_event()
            for _ in range(self._calls):
                self._call()
            end.record(self._side)
        current.wait_event(begun)  # collectives are under way when the work begins
        first.record(current)
        work()
        last.record(current)
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) / 1e3, float(last.elapsed_time(end)) >= 0
