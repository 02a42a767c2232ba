"""Running a call forward and backward: whether it is right, how long it takes, how much memory."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gem_core.ops.padded import plain_precision
from gem_core.spec import load_object
from gem_kernels.bench.workloads import Workload

FACTOR = 2.0
SLACK = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""As in the conformance suite: an error may be twice that of plain torch in the same dtype, plus a few units in the last place."""
FORMAT = {"gluon_fp8": 0.09}
"""Backends that compute in fewer bits than their inputs have, and how far a result may be from the truth, as a part of its norm. Four bits are at
most 2^-4 off; queries, keys, values and weights are rounded to them."""
FLUSH_BYTES = 2**28
REPEATS = 20
WAIT_CYCLES = 4_000_000
"""Two milliseconds and more, longer than the host takes to launch an op and its backward pass."""


def flat(result: Any) -> list[Tensor]:
    """The floating tensors of an op's result."""
    found = [result] if isinstance(result, Tensor) else [t for t in result if isinstance(t, Tensor)]
    return [t for t in found if t.is_floating_point()]


def reference_of(op: str) -> Callable[..., Any]:
    """The op's meaning in torch."""
    if op.startswith("jagged_") and op != "jagged_attention":
        name = op.removeprefix("jagged_").replace("dense_bmm_add", "bmm")
        return load_object(f"gem_core.ops.jagged:{name}_reference")  # type: ignore[no-any-return]
    return load_object(f"gem_core.ops.{op}:reference")  # type: ignore[no-any-return]


def _results(function: Callable[..., Any], workload: Workload) -> list[Tensor]:
    outputs = flat(workload.call(function))
    upstream = [torch.linspace(-1, 1, o.numel(), dtype=torch.float64, device=o.device).view(o.shape).to(o.dtype) for o in outputs]
    return [*(o.detach() for o in outputs), *torch.autograd.grad(outputs, workload.leaves(), upstream)]


def wrong(function: Callable[..., Any], workload: Workload, part: float | None = None) -> str | None:
    """What is wrong with ``function`` on a small call, in outputs or gradients; None if nothing is. ``part``: see ``FORMAT``."""
    reference = reference_of(workload.op)
    truth = _results(reference, workload.cast(torch.float64))
    with plain_precision():
        plain = _results(reference, workload)
    for i, (a, p, t) in enumerate(zip(_results(function, workload), plain, truth, strict=True)):
        if part is not None:
            error, norm = float((a.double() - t).norm()), float(t.norm())
            if not error <= part * norm:
                return f"result {i} is {error:.3g} off by its norm, at most {part:g} of {norm:.3g} is right"
            continue
        error, base = (float((x.double() - t).abs().max()) for x in (a, p))
        bound = FACTOR * base + SLACK[a.dtype] * max(float(t.abs().max()), 1.0)
        if not error <= bound:
            return f"result {i} is {error:.3g} off, at most {bound:.3g} is right"
    return None


def measure(function: Callable[..., Any], workload: Workload, mode: str) -> dict[str, float]:
    """Median milliseconds, TFLOP/s, GB/s of what has to move (``Workload.moved``), and the most memory in MiB beyond the inputs: of the forward pass,
    or of both (``bwd``)."""
    call, outputs = _pass(function, workload, mode)
    moved = workload.moved(outputs, mode)
    flops = workload.flops * (workload.backward if mode == "bwd" else 1.0)
    ms = _median_ms(call)
    del call, outputs
    peak = _peak_mib(lambda: _pass(function, workload, mode)[0]() if mode == "bwd" else workload.call(function))
    return {"ms": round(ms, 4), "tflops": round(flops / ms / 1e9, 1), "gbps": round(moved / ms / 1e6, 1), "peak_mib": round(peak, 1)}


def passes(function: Callable[..., Any], workload: Workload, mode: str) -> Callable[[int], float]:
    """Median milliseconds of so many passes, as a function of how many."""
    call, _ = _pass(function, workload, mode)
    return lambda repeats: _median_ms(call, repeats)


def _pass(function: Callable[..., Any], workload: Workload, mode: str) -> tuple[Callable[[], None], list[Tensor]]:
    """A call of the forward pass (``fwd``) or of the backward pass alone, and the outputs."""
    outputs = flat(workload.call(function))
    leaves = workload.leaves()
    upstream = [torch.randn_like(o) for o in outputs]

    def call() -> None:
        if mode == "fwd":
            workload.call(function)
        else:
            torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)

    return call, outputs


def _peak_mib(call: Callable[[], Any]) -> float:
    if not torch.cuda.is_available():
        call()
        return 0.0
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / 2**20


def _cuda_median_ms(call: Callable[[], None], repeats: int) -> float:
    """By CUDA events, the L2 cache cleared before each call and the device kept waiting meanwhile, so that the host's launches are not timed."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    call()
    events = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        flush.zero_()
        torch.cuda._sleep(WAIT_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in events))


def _median_ms(call: Callable[[], None], repeats: int = REPEATS) -> float:
    if torch.cuda.is_available():
        return _cuda_median_ms(call, repeats)
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3
