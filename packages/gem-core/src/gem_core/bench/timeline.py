"""Reading a trace of torch's profiler: which instant of a step belongs to what.

On a GPU the work is what its streams run; a kernel belongs to the operator that launched it, to the ranges around that operator, and in backward to
the ranges around the operator whose gradient is computed. On a CPU the work is the operators of the thread that trains, without the Python and the
autograd engine between them, and collectives on any thread. Where several things happen at once the first of ``CATEGORIES`` counts.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gem_core.train.ledger.clock import AGREE, COPY, DATA, IDS, OPTIMISER, TABLES

ATTENTION, MATMUL, MEMORY = "attention", "matmul", "memory-bound"
EMBEDDING, UPDATE, COMMUNICATION, READING = "embedding", "optimiser", "communication", "data"
CATEGORIES = (ATTENTION, MATMUL, MEMORY, EMBEDDING, UPDATE, COMMUNICATION, READING)
"""In order: what comes earlier counts where several overlap. So communication and data are what nothing hides."""
GAPS = "launch gaps"
"""None of them: the device has nothing to do while the host works."""

LOOKED_UP = "embedding"
"""The range around a look-up."""
OP = "op: "
"""Begins the range around a kernel of that op."""
_ATTENTION_OPS = ("jagged_attention", "gdpa", "block_attention", "hstu_attention", "pooled_attention", "pffn")
_MATMUL_OPS = ("norm_linear", "jagged_dense_bmm_add")
_WHOLE = {DATA: READING, IDS: READING, COPY: READING, AGREE: COMMUNICATION}
"""Phases of the trainer that count with all the host does in them."""
_PHASES = {**_WHOLE, TABLES: EMBEDDING, OPTIMISER: UPDATE, LOOKED_UP: EMBEDDING}

_NAMES = (
    (COMMUNICATION, _TALKS := re.compile(r"nccl|c10d::|gloo:", re.IGNORECASE)),
    (READING, re.compile(r"Memcpy HtoD")),
    (ATTENTION, re.compile(r"attention|flash|fmha|gdpa|hstu|pffn", re.IGNORECASE)),
    (EMBEDDING, re.compile(r"embedding_bag|split_embedding", re.IGNORECASE)),
    (MATMUL, re.compile(r"^aten::_?(addmm|mm|bmm|baddbmm|matmul|linear|mv|addmv|scaled_mm|grouped_mm)$")),
    (MATMUL, re.compile(r"gemm|cutlass|cublas|nvjet|wgmma", re.IGNORECASE)),
)
"""What a name says of a kernel or an operator, the first match."""
_BACKWARD = "autograd::engine::evaluate_function"
_ENGINE = ("autograd::", "torch::autograd::")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")

Event = Mapping[str, Any]
Forward = dict[int, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of time that belongs to a category: microseconds, and the operator or kernel."""

    begin: float
    end: float
    category: str
    name: str


@dataclass(frozen=True, slots=True)
class _Frame:
    """Something that a thread is in: its end, the ranges around it, the innermost operator, and what its own instants count as."""

    end: float
    ranges: tuple[str, ...]
    op: str
    category: str | None
    name: str


def category_of(ranges: Sequence[str], op: str, kernel: str = "") -> str:
    """The category of an operator, or of the kernel that it launched.

    Args:
        ranges: names of the ranges around it, outermost first.
        op: the operator; empty for a kernel that was launched without one.
        kernel: the kernel's name; empty on a CPU.
    """
    named = next((category for category, pattern in _NAMES for name in (kernel, op) if pattern.search(name)), None)
    if named == COMMUNICATION:
        return named
    innermost = next((name for name in reversed(ranges) if name in _PHASES or name.startswith(OP)), "")
    if innermost in _PHASES:
        return _PHASES[innermost]
    if innermost.removeprefix(OP) in _ATTENTION_OPS:
        return ATTENTION
    if innermost.removeprefix(OP) in _MATMUL_OPS and not op.startswith("aten::"):
        return MATMUL
    return named or MEMORY


def segments(events: Iterable[Event], window: str) -> tuple[list[Segment], float, float]:
    """All work of a trace, and the window's begin and end in microseconds.

    Args:
        events: ``traceEvents`` of a Chrome trace.
        window: name of the range that is looked at.

    Raises:
        ValueError: the trace has no such range.
    """
    complete = [e for e in events if e.get("ph") == "X"]
    frame = next((e for e in complete if e.get("cat") == "user_annotation" and e["name"] == window), None)
    if frame is None:
        raise ValueError(f"the trace has no range {window!r}")
    threads: dict[Any, list[Event]] = {}
    for event in complete:
        if event.get("cat") in _ON_HOST:
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    forward: Forward = {}
    for thread in threads.values():
        _remember_forward(thread, forward)
    launches = {event["args"]["correlation"]: frame for thread in threads.values() for event, frame in _launches(thread, forward)}
    on_device = [e for e in complete if e.get("cat") in _ON_DEVICE]
    own = threads.pop((frame["pid"], frame["tid"]))
    found = [*_device(on_device, launches), *_host(own, forward, everything=not on_device), *_talk(threads.values())]
    return found, frame["ts"], frame["ts"] + frame["dur"]


def attribute(found: Iterable[Segment], begin: float, end: float) -> tuple[dict[str, float], dict[tuple[str, str], float]]:
    """Microseconds of ``[begin, end]`` by category, ``GAPS`` included, and by category and name. They add up to ``end - begin``."""
    marks = []
    for at, segment in enumerate(found):
        first, last = max(segment.begin, begin), min(segment.end, end)
        if first < last:
            marks += [(first, at, segment), (last, at, segment)]
    marks.sort(key=lambda mark: mark[0])
    times = dict.fromkeys((*CATEGORIES, GAPS), 0.0)
    names: dict[tuple[str, str], float] = {}
    open_now: dict[str, dict[int, Segment]] = {category: {} for category in CATEGORIES}
    now = begin
    for moment, at, segment in marks:
        category = next((c for c in CATEGORIES if open_now[c]), GAPS)
        times[category] += moment - now
        if category != GAPS:
            key = category, next(reversed(open_now[category].values())).name
            names[key] = names.get(key, 0.0) + moment - now
        now = moment
        if open_now[segment.category].pop(at, None) is None:
            open_now[segment.category][at] = segment
    times[GAPS] += end - now
    return times, names


def _frames(thread: Sequence[Event], forward: Forward) -> Iterator[tuple[Event, list[_Frame], list[_Frame]]]:
    """Each event of a thread in order, with the frames that ended before it (innermost first) and those it is in, its own last."""
    stack: list[_Frame] = []
    for event in sorted(thread, key=lambda e: (e["ts"], -e["dur"])):
        ended = []
        while stack and stack[-1].end <= event["ts"]:
            ended.append(stack.pop())
        stack.append(_frame(event, stack[-1] if stack else _Frame(float("inf"), (), "", None, ""), forward))
        yield event, ended, stack
    if stack:
        yield {"ts": float("inf"), "dur": 0.0}, stack[::-1], []


def _frame(event: Event, outer: _Frame, forward: Forward) -> _Frame:
    kind, name, end = event["cat"], event["name"], min(event["ts"] + event["dur"], outer.end)
    ranges, op, category = outer.ranges, outer.op, outer.category
    if kind == "user_annotation":
        ranges = (*ranges, name)
        category = _WHOLE.get(name, category)
    elif kind == "cpu_op" and name.startswith(_BACKWARD):
        ranges = (*ranges, *forward.get(event.get("args", {}).get("Sequence number", -1), ()))
    elif kind == "cpu_op" and "::" in name and not name.startswith(_ENGINE):
        op, category = name, category_of(ranges, name)
    return _Frame(end, ranges, op, category, op or name)


def _remember_forward(thread: Sequence[Event], forward: Forward) -> None:
    """Keep the ranges around the operator of each sequence number, which its gradient's node has too. The last operator with it made the node."""
    for event, _, stack in _frames(thread, {}):
        told = event.get("args", {})
        if "Sequence number" in told and not told.get("Fwd thread id"):
            forward[told["Sequence number"]] = stack[-1].ranges


def _launches(thread: Sequence[Event], forward: Forward) -> Iterator[tuple[Event, _Frame]]:
    for event, _, stack in _frames(thread, forward):
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {}):
            yield event, stack[-1]


def _device(events: Sequence[Event], launches: Mapping[int, _Frame]) -> Iterator[Segment]:
    nowhere = _Frame(0.0, (), "", None, "")
    for event in events:
        by = launches.get(event.get("args", {}).get("correlation", -1), nowhere)
        yield Segment(event["ts"], event["ts"] + event["dur"], category_of(by.ranges, by.op, event["name"]), event["name"])


def _talk(others: Iterable[Sequence[Event]]) -> Iterator[Segment]:
    """Collectives on threads of their own: the step waits for them where it does nothing else."""
    for thread in others:
        for event in thread:
            if _TALKS.search(event["name"]):
                yield Segment(event["ts"], event["ts"] + event["dur"], COMMUNICATION, event["name"])


def _host(thread: Sequence[Event], forward: Forward, *, everything: bool) -> Iterator[Segment]:
    """What one thread does, each instant once, by the innermost frame; only whole phases unless ``everything`` is wanted."""
    now, before = float("-inf"), _Frame(0.0, (), "", None, "")

    def until(moment: float, frame: _Frame) -> Iterator[Segment]:
        wanted = frame.category is not None and (everything or any(name in _WHOLE for name in frame.ranges))
        if wanted and now < moment:
            yield Segment(now, moment, str(frame.category), frame.name)

    for event, ended, stack in _frames(thread, forward):
        for frame in ended:
            yield from until(frame.end, frame)
            now = max(now, frame.end)
        outer = stack[-2] if len(stack) > 1 else before
        yield from until(event["ts"], outer)
        now = max(now, event["ts"])
