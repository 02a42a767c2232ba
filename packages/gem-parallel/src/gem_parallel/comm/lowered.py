"""Weights that their modules read in low precision travel between the ranks of ``fully_shard`` in that format, and are not rounded again."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gem_core.spec import LOW_WEIGHTS, LowWeight, PluginError
from gem_parallel.comm.payload import Payload


@dataclass(frozen=True, kw_only=True, slots=True)
class LowPart:
    """A weight that its module reads in low precision, and where it lies in what ``fully_shard`` gathers.

    Args:
        module: the module.
        name: the parameter's name in it.
        low: what the precision recipe gave for it.
        begin: its first value in a rank's flat part of the unit.
        rows: rows of a rank's part of it, the padding included.
        columns: values of a row.
    """

    module: nn.Module
    name: str
    low: LowWeight
    begin: int
    rows: int
    columns: int

    @property
    def end(self) -> int:
        return self.begin + self.rows * self.columns

    @property
    def parameter(self) -> Tensor:
        value: Tensor = getattr(self.module, self.name)
        return value


class Lowered:
    """Weights that their modules read in low precision go in that format, the others by another payload.

    Args:
        lows: the weights of this unit that do, by their place.
        size: values of a rank's flat part of the unit.
        others: the payload of the rest; None sends it as it is.
        every: the weights of all units that go so: what is kept for them is freed when they are in parts again.
        agree: the maximum of a float32 vector over the ranks.
    """

    def __init__(
        self, lows: Sequence[LowPart], size: int, others: Payload | None, every: Sequence[LowPart], agree: Callable[[Tensor], Tensor]
    ) -> None:
        self._lows, self._size, self._others, self._every, self._agree = lows, size, others, every, agree
        edges = [0, *(edge for low in lows for edge in (low.begin, low.end)), size]
        self._rest = [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]
        self._bytes: list[int] = []
        self._dtype = torch.float32
        self._checked = False

    def pack(self, own: Tensor) -> Tensor:
        for low in self._every:
            if isinstance(low.parameter, DTensor):
                low.low.freed()
        parts = [_local(low) for low in self._lows]
        if not self._checked:
            self._check(own, parts)
        largest = [low.low.largest(part) for low, part in zip(self._lows, parts, strict=True)]
        sizes = [len(each) for each in largest]
        agreed = torch.split(self._agree(torch.cat(largest)), sizes)
        packed = [low.low.pack(part, each) for low, part, each in zip(self._lows, parts, agreed, strict=True)]
        self._bytes = [each.numel() for each in packed]
        rest = torch.cat([own[:0], *(own[begin:end] for begin, end in self._rest)])
        sent = rest if self._others is None else self._others.pack(rest)
        self._dtype = sent.dtype
        return torch.cat([*packed, sent.view(torch.uint8)])

    def unpack(self, received: Tensor, output: Tensor, ranks: int) -> None:
        parts, whole = received.view(ranks, -1), output.view(ranks, -1)
        *packed, rest = torch.split(parts, [*self._bytes, parts.shape[1] - sum(self._bytes)], dim=1)
        for low, each in zip(self._lows, packed, strict=True):
            matrix = output.new_empty(ranks * low.rows, low.columns)
            low.low.unpack(each, matrix)
            whole[:, low.begin : low.end] = matrix.view(ranks, -1)
        values = rest.clone(memory_format=torch.contiguous_format).view(self._dtype)  # wherever the bytes lie
        if self._others is not None:
            sizes = sum(end - begin for begin, end in self._rest)
            unpacked = output.new_empty(ranks * sizes)
            self._others.unpack(values.view(-1), unpacked, ranks)
            values = unpacked.view(ranks, -1)
        done = 0
        for begin, end in self._rest:
            whole[:, begin:end] = values[:, done : done + end - begin]
            done += end - begin

    def _check(self, own: Tensor, parts: Sequence[Tensor]) -> None:
        """``fully_shard`` lays a unit's parameters one after the other, in the order of ``managed``."""
        so = None
        if own.numel() != self._size or own.dtype != torch.float32:
            so = f"a unit's part has {own.numel()} values of {own.dtype}, where {self._size} of torch.float32 are expected"
        elif not all(_same_bits(own[low.begin :][: part.numel()], part.flatten()) for low, part in zip(self._lows, parts, strict=True)):
            so = "a weight lies in another place of the unit's part than is expected"
        if so is not None:
            raise PluginError("low-precision weights under fully_shard", so, "Use a torch that docs/compatibility.md lists, or keep all layers high.")
        self._checked = True


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Also where there are NaNs."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def _local(low: LowPart) -> Tensor:
    parameter = low.parameter
    assert isinstance(parameter, DTensor), "it is gathered, so it is in parts"
    part: Tensor = parameter.to_local()
    return part


def low_parts(modules: Sequence[nn.Module], ranks: int, rank: int, absent: Collection[nn.Parameter]) -> tuple[list[LowPart], int]:
    """The weights of a unit, about to be sharded, that travel in low precision; and the number of values of a rank's flat part of the unit.

    Their recipe is told of the parts. In the order of ``fully_shard``: inner modules first. A weight that several modules share travels as the
    payload says, and so do all weights where a shard is the whole.
    """
    found: list[LowPart] = []
    seen: dict[nn.Parameter, int] = {}
    begin = 0
    for module in managed(modules):
        marked: Mapping[str, LowWeight] = getattr(module, LOW_WEIGHTS, {})
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in absent:
                continue
            seen[parameter] = seen.get(parameter, 0) + 1
            if seen[parameter] > 1:
                continue
            rows, columns = -(-parameter.shape[0] // ranks), parameter.shape[1:].numel()
            if name in marked and ranks > 1:
                found.append(LowPart(module=module, name=name, low=marked[name], begin=begin, rows=rows, columns=columns))
            begin += rows * columns
    alone = [low for low in found if seen[getattr(low.module, low.name)] == 1]
    for low in alone:
        low.low.split(low.rows, rank, ranks)
    return alone, begin


def managed(modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """The modules whose parameters ``fully_shard`` of ``modules`` takes, in its order: children first, without those that are sharded already."""
    visited: set[nn.Module] = set()

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        if isinstance(module, FSDPModule):
            return
        visited.add(module)
        for child in module.children():
            if child not in visited:
                yield from visit(child)
        yield module

    for module in modules:
        yield from visit(module)
