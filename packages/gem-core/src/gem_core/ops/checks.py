"""Checks that run before any work, shared by every op and free for backends to use.

Shapes and dtypes are always checked. The contents of offsets are checked where reading them costs no synchronisation: on the CPU, outside a compiled
region. With ``GEM_CHECK=full`` they are checked on a GPU too, which then waits for the host in every call.
"""

import os
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from gem_core.batch import check_offsets
from gem_core.spec.errors import RequestError

INT32_MAX = 2**31 - 1
GRID_LIMITS = (INT32_MAX, 65_535, 65_535)
"""Largest CUDA grid along x, y and z."""

FLOAT_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
DTYPE_NAMES = FLOAT_NAMES | {torch.int64: "int64", torch.int32: "int32", torch.bool: "bool"}
"""Short name of every dtype an op can carry; integers and bool only where values are moved and not computed with."""


def refuse(op: str, so: str, do: str) -> NoReturn:
    """Raise the RequestError of a call of ``op``."""
    raise RequestError(f"call of {op!r}", so, do)


def check_index_range(count: int, what: str, limit: int = INT32_MAX) -> None:
    """Raise RequestError if ``count`` does not fit the 32-bit index that a kernel uses for it.

    Counts (tokens, rows, tiles) may be 32-bit; addresses, which are counts times a width, are computed in 64 bits.
    """
    if count > limit:
        raise RequestError(f"index over {what}", f"{count} is above the limit of {limit}", "Use smaller batches, or a kernel with 64-bit indices.")


def check_grid(grid: tuple[int, ...], what: str) -> None:
    """Raise RequestError if a CUDA launch grid is too large along one axis (x: 2^31 - 1, y and z: 65,535)."""
    for axis, size, limit in zip("xyz", grid, GRID_LIMITS):
        if size > limit:
            raise RequestError(f"launch of {what}", f"{size} blocks along {axis}, at most {limit} fit", "Put the long axis on x.")


def contents_readable(tensor: Tensor) -> bool:
    """Whether reading values of ``tensor`` costs no synchronisation and no graph break."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def contents_checked(tensor: Tensor) -> bool:
    """Whether values of ``tensor`` are to be checked: where they are readable, and with ``GEM_CHECK=full`` on any device that has them.

    Raises:
        RequestError: ``GEM_CHECK`` is set to anything else.
    """
    if tensor.device.type == "cpu" or torch.compiler.is_compiling():
        return contents_readable(tensor)
    asked = os.environ.get("GEM_CHECK", "")
    if asked not in ("", "full"):
        raise RequestError(f"GEM_CHECK={asked!r}", "the only value is full", "Write GEM_CHECK=full, or leave it out.")
    return asked == "full" and tensor.device.type != "meta"


def check_tensors(op: str, lead: Tensor, others: dict[str, Tensor | None], *, integers: bool = False) -> None:
    """All tensors share the dtype and device of ``lead``, and the dtype is one an op can carry."""
    known = DTYPE_NAMES if integers else FLOAT_NAMES
    if lead.dtype not in known:
        refuse(op, f"dtype {lead.dtype} is not one of {', '.join(known.values())}", "Cast the input.")
    for name, tensor in others.items():
        if tensor is None:
            continue
        if tensor.dtype != lead.dtype:
            refuse(op, f"{name} is {tensor.dtype}, the first input is {lead.dtype}", "Give all inputs one dtype.")
        if tensor.device != lead.device:
            refuse(op, f"{name} is on {tensor.device}, the first input on {lead.device}", "Move all inputs to one device.")


def check_rank(op: str, name: str, tensor: Tensor, shape: str) -> None:
    """``tensor`` has as many dimensions as ``shape`` has words, for example ``"tokens heads dim"``."""
    if tensor.dim() != shape.count(" ") + 1:
        refuse(op, f"{name} has shape {list(tensor.shape)}", f"Give [{', '.join(shape.split())}].")


def check_shape(op: str, name: str, tensor: Tensor, allowed: tuple[tuple[int, ...], ...]) -> None:
    """Each dimension of ``tensor`` is one of the sizes listed for it."""
    fits = tensor.dim() == len(allowed) and all(size in sizes for size, sizes in zip(tensor.shape, allowed))
    if not fits:
        wanted = ", ".join(" or ".join(str(s) for s in dict.fromkeys(sizes)) for sizes in allowed)
        refuse(op, f"{name} has shape {list(tensor.shape)}", f"Give [{wanted}].")


def check_exact_shape(op: str, name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    """``tensor`` has this shape."""
    if tensor.shape != shape:
        check_shape(op, name, tensor, tuple((size,) for size in shape))


def check_rows(op: str, name: str, offsets: Tensor, values: Tensor, max_length: int | None = None, cut: bool = False) -> int:
    """Check ``offsets`` ``[rows + 1]`` int64 of the packed ``values`` ``[total, ...]`` and return the number of rows.

    Args:
        op: name of the op, for messages.
        name: name of the jagged tensor, for messages.
        offsets: its offsets.
        values: its values.
        max_length: host integer that no row may exceed (checked where the contents of offsets are); None leaves it unchecked.
        cut: rows longer than ``max_length`` are wanted.
    """
    if offsets.dtype != torch.int64 or offsets.dim() != 1 or offsets.numel() < 1:
        refuse(
            op, f"offsets of {name} are {offsets.dtype} of shape {list(offsets.shape)}", "Give one-dimensional int64 offsets with rows + 1 entries."
        )
    if offsets.device != values.device:
        refuse(op, f"offsets of {name} are on {offsets.device}, its values on {values.device}", "Move both to one device.")
    if max_length is not None and max_length < 0:
        refuse(op, f"the longest row of {name} is given as {max_length}", "Give a length of 0 or more.")
    rows = offsets.numel() - 1
    check_index_range(values.shape[0], f"values of {name} in {op}")
    check_index_range(rows * (max_length or 1), f"rows times longest row of {name} in {op}")
    if contents_checked(offsets):
        check_offsets(offsets, values.shape[0], name)
        if rows and max_length is not None and not cut:
            longest = int(offsets.diff().max())
            if longest > max_length:
                refuse(op, f"a row of {name} has {longest} values, longer than the given maximum {max_length}", "Give the true longest length.")
    return rows


def check_heads(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Head counts and widths of ``q [..., heads, dim]``, ``k [..., kv_heads, dim]`` and ``v [..., kv_heads, v_dim]`` agree."""
    heads, dim = q.shape[-2:]
    kv_heads = k.shape[-2]
    if k.shape[-1] != dim:
        refuse(op, f"q has dim {dim}, k has dim {k.shape[-1]}", "Give q and k heads of one width.")
    if v.shape[:-1] != k.shape[:-1]:
        refuse(op, f"k has shape {list(k.shape)}, v has shape {list(v.shape)}", "Give k and v the same keys and heads.")
    if heads < 1 or dim < 1 or v.shape[-1] < 1 or kv_heads < 1 or heads % kv_heads:
        refuse(op, f"{heads} query heads of width {dim} on {kv_heads} key heads", "Give at least one head, query heads a multiple of key heads.")


def check_window(op: str, window: int | None) -> None:
    """A window is None or at least 0."""
    if window is not None and window < 0:
        refuse(op, f"window {window} is negative", "Give the number of positions on each side, 0 or more, or None.")


def check_row_counts(op: str, name: str, counts: Tensor, rows: int, like: Tensor) -> None:
    """``counts`` is ``[rows]`` int64 on the device of ``like``."""
    if counts.dtype != torch.int64 or counts.shape != (rows,):
        refuse(op, f"{name} is {counts.dtype} of shape {list(counts.shape)}", f"Give [{rows}] int64.")
    if counts.device != like.device:
        refuse(op, f"{name} is on {counts.device}, the values on {like.device}", "Move both to one device.")
