"""Comparing two checkpoints tensor by tensor, and writing one as a single file."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gem_core.spec import RequestError
from gem_core.train.checkpoint.pieces import Piece, Pieces
from gem_core.train.checkpoint.saved import Saved
from gem_core.train.checkpoint.store import write_safetensors

BLOCK_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How a tensor differs.

    Args:
        name: the tensor.
        so: where it stands or which shapes it has, if values cannot be compared; else empty.
        values: how many values differ.
        of: number of values.
        largest: largest absolute difference.
    """

    name: str
    so: str = ""
    values: int = 0
    of: int = 0
    largest: float = math.nan


def differences(a: Saved, b: Saved) -> list[Difference]:
    """The tensors that are not equal, in alphabetical order; values of different formats are compared as numbers."""
    out = []
    for name in sorted({*a.index, *b.index}):
        if name not in a.index or name not in b.index:
            out.append(Difference(name=name, so=f"only in {'the second' if name in b.index else 'the first'}"))
        elif a.shape(name) != b.shape(name):
            out.append(Difference(name=name, so=f"shapes {list(a.shape(name))} and {list(b.shape(name))}"))
        else:
            out += _compared(name, a, b)
    return out


def _compared(name: str, a: Saved, b: Saved) -> list[Difference]:
    values, largest = 0, 0.0
    for first, second in zip(_blocks(a, name), _blocks(b, name), strict=True):
        gap = (first.double() - second.double()).abs()
        values += int(gap.count_nonzero())
        largest = max(largest, float(gap.max()))
    return [Difference(name=name, values=values, of=math.prod(a.shape(name)), largest=largest)] if values else []


def _blocks(saved: Saved, name: str) -> Iterator[Tensor]:
    """The tensor in runs of rows, so that a table need not fit in memory; nothing of an empty one."""
    shape, dtype = saved.shape(name), saved.dtype(name)
    if not math.prod(shape):
        return
    if not shape:
        yield saved.tensor(name)
        return
    rows = max(1, BLOCK_BYTES // (8 * math.prod(shape[1:])))
    for first in range(0, shape[0], rows):
        block = torch.empty(min(rows, shape[0] - first), *shape[1:], dtype=dtype)
        saved.fill({name: Pieces(shape, dtype, [Piece((first, *(0 for _ in shape[1:])), block)])})
        yield block


def convert(saved: Saved, file: Path) -> None:
    """Write every tensor whole, by its logical name, into one safetensors file; one of them at a time is in memory.

    Raises:
        RequestError: the file exists.
    """
    if file.exists():
        raise RequestError(f"conversion to {file}", "it exists", "Choose another one with --out FILE.")
    names = sorted(saved.index, key=lambda name: (-saved.dtype(name).itemsize, name))
    draft = file.with_name(f"{file.name}.writing")
    write_safetensors(draft, {name: (saved.dtype(name), saved.shape(name)) for name in names}, saved.tensor)
    draft.rename(file)
