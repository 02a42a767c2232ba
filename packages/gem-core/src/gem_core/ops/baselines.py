"""Ops without fused kernels, in the dtype of their inputs: the backends ``padded`` and ``bucketed``, to be measured beside fused ones.

Both compute what the references do, without widening to float32. ``padded`` pads every row to the longest that the call allows. ``bucketed`` sorts
the rows by length and pads each to the longest of its bucket: at most a third longer, rows below ``SHORTEST`` share one. The scores of all rows
would often not fit into memory: above ``SCORES`` numbers a call is cut into parts of that size, and each is computed again in backward.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from math import log
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from gem_core.batch import lengths_to_offsets, range_index
from gem_core.ops.checks import refuse
from gem_core.ops.padded import move, plain_precision

Ints = NDArray[np.int64]
SCORES = 2**29
"""Numbers of a score tensor, padded ones included: 1 GiB at 16 bits."""
SHORTEST = 64
RATIO = 4 / 3
"""Longest over shortest row of a bucket."""


@dataclass(frozen=True, kw_only=True)
class Roles:
    """What the arguments of an op are.

    Args:
        tokens: the arguments that are packed by an argument of offsets, if that one is given.
        rows: those with an entry a row, if they have it.
        longest: argument for the longest row of an argument of offsets.
        scores: scores of one row and head, from the arguments.
        out: the offsets that the result is packed by; where those are missing, or None, it has as many entries for every row.
    """

    tokens: Mapping[str, str]
    longest: Mapping[str, str]
    scores: Callable[[Mapping[str, Any]], int]
    rows: tuple[str, ...] = ()
    out: str | None = None


def _all_pairs(call: Mapping[str, Any]) -> int:
    return int(call["max_q"] * call["max_k"])


ROLES = {
    "jagged_attention": Roles(
        tokens={"q": "q_offsets", "k": "k_offsets", "v": "k_offsets"},
        longest={"q_offsets": "max_q", "k_offsets": "max_k"},
        scores=_all_pairs,
        out="q_offsets",
    ),
    "gdpa": Roles(
        tokens={"q": "q_offsets", "k": "k_offsets", "v": "k_offsets"},
        longest={"q_offsets": "max_q", "k_offsets": "max_k"},
        rows=("k", "v"),
        scores=_all_pairs,
        out="q_offsets",
    ),
    "pffn": Roles(
        tokens={"q0": "q_offsets"}, longest={"q_offsets": "max_q"}, rows=("k", "v"), scores=lambda c: c["max_q"] * c["k"].shape[1], out="q_offsets"
    ),
    "pooled_attention": Roles(
        tokens={"k": "k_offsets", "v": "k_offsets"},
        longest={"k_offsets": "max_k"},
        rows=("seeds",),
        scores=lambda c: c["seeds"].shape[-3] * c["max_k"],
    ),
    "block_attention": Roles(
        tokens=dict.fromkeys(("q", "k", "v", "rope"), "offsets"),
        longest={"offsets": "max_length"},
        scores=lambda c: c["max_length"] * c["block"],
        out="offsets",
    ),
    "hstu_attention": Roles(
        tokens=dict.fromkeys(("q", "k", "v"), "offsets"),
        longest={"offsets": "max_length"},
        rows=("contextual", "targets"),
        scores=lambda c: c["max_length"] ** 2,
        out="offsets",
    ),
}
"""The ops whose rows have lengths; any other computes token by token, and is its reference in the dtype of the inputs."""


@dataclass(frozen=True)
class Packing:
    """The rows of one argument of offsets in the order of a layout.

    Args:
        lengths: ``[rows]`` on the host.
        offsets: ``[rows + 1]`` int64 on the device.
        forth, back: ``[tokens]`` int64 on the device, the tokens in that order and the inverse; None if the order is the call's own.
    """

    lengths: Ints
    offsets: Tensor
    forth: Tensor | None
    back: Tensor | None

    def sort(self, x: Tensor) -> Tensor:
        return x if self.forth is None or self.back is None else move(x, self.forth, self.back)

    def unsort(self, x: Tensor) -> Tensor:
        return x if self.forth is None or self.back is None else move(x, self.back, self.forth)


@dataclass(frozen=True)
class Layout:
    """The order of a call's rows, and where each part of alike rows begins.

    Args:
        rows: the rows in that order, as one token a row.
        packings: by argument of offsets.
        edges: bounds of the buckets, from 0 to the number of rows.
    """

    rows: Packing
    packings: Mapping[str, Packing]
    edges: tuple[int, ...]


_KNOWN: Any = WeakTensorKeyDictionary()
"""What was made of offsets, for as long as they live: all layers of a model share a batch's, and a GPU waits for the host once."""


def _lengths(op: str, offsets: Tensor, tokens: int) -> Ints:
    lengths: Ints = _once(offsets, "lengths", lambda: np.diff(offsets.cpu().numpy()))
    if int(lengths.sum()) != tokens:
        refuse(op, f"offsets end at {int(lengths.sum())}, there are {tokens} tokens", "The last offset is the number of tokens.")
    return lengths


def _once(offsets: Tensor, key: Any, make: Callable[[], Any]) -> Any:
    known = _KNOWN.setdefault(offsets, {})
    if key not in known:
        known[key] = make()
    return known[key]


def _pack(lengths: Ints, order: Ints | None, device: torch.device) -> Packing:
    own = torch.from_numpy(lengths)
    begin = own.cumsum(0) - own
    if order is None:
        return Packing(lengths, lengths_to_offsets(own).to(device), None, None)
    forth, offsets = range_index(begin[order], own[order])
    back = torch.empty_like(forth).scatter_(0, forth, torch.arange(forth.numel()))
    return Packing(lengths[order], offsets.to(device), forth.to(device), back.to(device))


def buckets(total: Ints) -> NDArray[np.float64]:
    """The bucket of each row, by its lengths over all arguments of offsets together."""
    return np.floor(np.log(np.maximum(total, SHORTEST) / SHORTEST) / log(RATIO))


def _layout(op: str, roles: Roles, call: Mapping[str, Any], by_length: bool) -> Layout:
    sizes = {name: next(call[arg].shape[0] for arg, of in roles.tokens.items() if of == name) for name in roles.longest if call[name] is not None}
    lengths = {name: _lengths(op, call[name], tokens) for name, tokens in sizes.items()}
    first = call[next(iter(lengths))]
    if any(call[name] is not first for name in lengths):
        return _sorted(lengths, by_length, first.device)
    made: Layout = _once(first, (by_length, *lengths), lambda: _sorted(lengths, by_length, first.device))
    return made


def _sorted(lengths: Mapping[str, Ints], by_length: bool, device: torch.device) -> Layout:
    total: Ints = np.add.reduce(list(lengths.values()))
    order = np.argsort(total, kind="stable") if by_length else None
    bucket = buckets(total)[order] if by_length else np.zeros(total.size)
    edges = (0, *(np.flatnonzero(np.diff(bucket)) + 1).tolist(), total.size)
    packings = {name: _pack(of, order, device) for name, of in lengths.items()}
    return Layout(_pack(np.ones_like(total), order, device), packings, edges)


@dataclass(frozen=True)
class Part:
    """The rows ``first`` to ``end`` of a layout, the longest they are taken for by argument, and their scores."""

    first: int
    end: int
    longest: Mapping[str, int]
    scores: int


def _parts(layout: Layout, roles: Roles, call: Mapping[str, Any], by_length: bool) -> Iterator[Part]:
    heads = next(iter(call.values())).shape[-2]
    for first, end in zip(layout.edges, layout.edges[1:], strict=False):
        longest = {roles.longest[name]: call[roles.longest[name]] for name in layout.packings}
        if by_length:
            own = {roles.longest[name]: int(p.lengths[first:end].max(initial=1)) for name, p in layout.packings.items()}
            longest = {name: min(length, own[name]) for name, length in longest.items()}
        each = max(1, heads * roles.scores({**call, **longest}))
        step = max(1, SCORES // each)
        for start in range(first, end, step):
            count = min(step, end - start)
            yield Part(start, start + count, longest, count * each)


def _compute(op: str, by_length: bool, *args: Any, **options: Any) -> Tensor:
    """A call of ``op``, part by part."""
    reference = import_module(f"gem_core.ops.{op}").reference
    bound = inspect.signature(reference).bind(*args, **options)
    bound.apply_defaults()
    call, roles = bound.arguments, ROLES[op]
    if call.get("norm_length", 0) is None:
        call["norm_length"] = max(call["max_length"], 1)  # of the whole call, not of a part
    if all(call[name] is None or call[name].numel() < 2 for name in roles.longest):
        whole: Tensor = _plain(reference, call)
        return whole
    layout = _layout(op, roles, call, by_length)
    packed = {arg: of for arg, of in roles.tokens.items() if of in layout.packings and call[arg] is not None}
    rows = [arg for arg in roles.rows if arg not in packed and call[arg] is not None and (arg != "seeds" or call[arg].dim() == 4)]
    call |= {arg: layout.packings[of].sort(call[arg]) for arg, of in packed.items()} | {arg: layout.rows.sort(call[arg]) for arg in rows}
    parts = list(_parts(layout, roles, call, by_length))
    again = torch.is_grad_enabled() and sum(part.scores for part in parts) > SCORES
    out = []
    for part in parts:
        mine = {**call, **part.longest} | {arg: call[arg][part.first : part.end] for arg in rows}
        for arg, of in packed.items():
            start, stop = (int(layout.packings[of].lengths[:at].sum()) for at in (part.first, part.end))
            mine[arg] = call[arg][start:stop]
        same = {id(call[name]): p.offsets[part.first : part.end + 1] - p.offsets[part.first] for name, p in layout.packings.items()}
        mine |= {name: same[id(call[name])] for name in layout.packings}  # one tensor stays one: references look at that
        out.append(checkpoint(_plain, reference, mine, use_reentrant=False, preserve_rng_state=False) if again else _plain(reference, mine))
    joined = torch.cat(out)
    if roles.out is not None and roles.out in layout.packings:
        return layout.packings[roles.out].unsort(joined)
    return layout.rows.unsort(joined.view(layout.edges[-1], -1, *joined.shape[1:])).flatten(0, 1)


def _plain(reference: Callable[..., Any], call: Mapping[str, Any]) -> Any:
    (_, lead), *rest = call.items()  # references ask their first argument where they are
    with plain_precision():
        return reference(lead, **dict(rest))


def __getattr__(name: str) -> Callable[..., Any]:
    """``padded_OP`` and ``bucketed_OP``, by which the kernels' declarations name them."""
    kind, _, op = name.partition("_")
    if kind not in ("padded", "bucketed") or not op:
        raise AttributeError(name)
    if op in ROLES:
        eager: Callable[..., Any] = torch.compiler.disable(partial(_compute, op, kind == "bucketed"))  # type: ignore[no-untyped-call]
        return eager
    reference = import_module(f"gem_core.ops.{op}").reference

    def plain(*args: Any, **options: Any) -> Any:
        with plain_precision():
            return reference(*args, **options)

    return plain
