"""Moving jagged tensors about: joining, splitting, padding, unpadding, and a matmul with one matrix a row.

Values may have any trailing shape; the four movers also take integers and bool. Where a size can only be read from offsets, the host reads it, which
synchronises on CUDA: ``totals`` and ``total`` give it instead.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gem_core.ops import masks
from gem_core.ops.checks import check_rank, check_rows, check_shape, check_tensors, contents_checked, contents_readable, refuse
from gem_core.ops.dispatch import make_request, run
from gem_core.ops.padded import Padding, move, own_precision, widen
from gem_core.spec.kernels import KernelRequest

Parts = Sequence[tuple[Tensor, Tensor]]


def jagged_concat(parts: Parts, *, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """Join jagged tensors row by row: row ``r`` of the result is row ``r`` of each part, in order.

    Args:
        parts: one or more ``(values [total_i, ...], offsets [rows + 1] int64)`` of equal rows, dtype and trailing shape.
        backend: name of a backend; None chooses by policy.

    Returns:
        ``(values [sum of totals, ...], offsets [rows + 1])``.

    Raises:
        RequestError: the parts do not fit together.
    """
    out: tuple[Tensor, Tensor] = run(concat_check, backend, parts)
    return out


def concat_check(parts: Parts) -> KernelRequest:
    """Check a call of ``jagged_concat`` and describe it."""
    op = "jagged_concat"
    if not parts:
        refuse(op, "there are no parts", "Give at least one (values, offsets).")
    lead, lead_offsets = parts[0]
    for i, (values, offsets) in enumerate(parts):
        name = f"part {i}"
        check_tensors(op, lead, {name: values}, integers=True)
        if values.dim() < 1 or values.shape[1:] != lead.shape[1:]:
            refuse(op, f"{name} has shape {list(values.shape)}, part 0 has {list(lead.shape)}", "Give all parts one trailing shape.")
        if check_rows(op, name, offsets, values) != lead_offsets.numel() - 1:
            refuse(op, f"{name} has {offsets.numel() - 1} rows, part 0 has {lead_offsets.numel() - 1}", "Give all parts the same rows.")
    return make_request(op, lead, (), [values for values, _ in parts])


def _places(total: int, offsets: Tensor, out_offsets: Tensor, before: Tensor) -> Tensor:
    """Where each of ``total`` packed tokens lands when ``before [rows]`` tokens of other parts go ahead of it in its row of ``out_offsets``."""
    tokens = torch.arange(total, device=offsets.device)
    shift = out_offsets[:-1] + before - offsets[:-1]
    return tokens + torch.repeat_interleave(shift, offsets.diff(), output_size=total)


def concat_reference(parts: Parts) -> tuple[Tensor, Tensor]:
    """What ``jagged_concat`` means: one gather."""
    out_offsets = torch.stack([offsets for _, offsets in parts]).sum(0)
    before, places = torch.zeros_like(out_offsets[1:]), []
    for values, offsets in parts:
        places.append(_places(values.shape[0], offsets, out_offsets, before))
        before = before + offsets.diff()
    place = torch.cat(places)
    source = torch.empty_like(place).scatter_(0, place, torch.arange(place.numel(), device=place.device))
    return move(torch.cat([values for values, _ in parts]), source, place), out_offsets


def jagged_split(
    values: Tensor, offsets: Tensor, part_offsets: Sequence[Tensor], *, totals: Sequence[int] | None = None, backend: str | None = None
) -> tuple[Tensor, ...]:
    """Undo ``jagged_concat``.

    Args:
        values: ``[total, ...]``.
        offsets: ``[rows + 1]`` int64.
        part_offsets: offsets ``[rows + 1]`` int64 of each part; lengths add up to those of ``offsets`` row by row.
        totals: values of each part, as host integers; read from ``part_offsets`` by default.
        backend: name of a backend; None chooses by policy.

    Returns:
        The values of each part, ``[total_i, ...]``.

    Raises:
        RequestError: the parts do not add up.
    """
    out: tuple[Tensor, ...] = run(split_check, backend, values, offsets, part_offsets, totals=totals)
    return out


def split_check(values: Tensor, offsets: Tensor, part_offsets: Sequence[Tensor], *, totals: Sequence[int] | None = None) -> KernelRequest:
    """Check a call of ``jagged_split`` and describe it."""
    op = "jagged_split"
    check_tensors(op, values, {}, integers=True)
    check_rows(op, "values", offsets, values)
    if not part_offsets or any(p.dtype != torch.int64 or p.shape != offsets.shape or p.device != offsets.device for p in part_offsets):
        refuse(op, "part_offsets are not all int64 of the shape and device of offsets", f"Give one or more int64 [{offsets.numel()}].")
    if totals is not None and (len(totals) != len(part_offsets) or sum(totals) != values.shape[0]):
        refuse(op, f"totals are {list(totals)} for {len(part_offsets)} parts of {values.shape[0]} values", "Give the number of values of each part.")
    if contents_checked(offsets):
        wrong = (torch.stack(list(part_offsets)).sum(0) != offsets).nonzero()
        falls = any(int(p[0]) != 0 or bool((p.diff() < 0).any()) for p in part_offsets)
        if wrong.numel() or falls:
            where = f"at row {int(wrong[0]) - 1}" if wrong.numel() else "since one falls or does not start at 0"
            refuse(op, f"part_offsets do not add up to offsets {where}", "Give the offsets that were joined.")
        if totals is not None and list(totals) != [int(p[-1]) for p in part_offsets]:
            refuse(
                op, f"totals are {list(totals)}, part_offsets end at {[int(p[-1]) for p in part_offsets]}", "Give the number of values of each part."
            )
    return make_request(op, values, (), (values,))


def split_reference(values: Tensor, offsets: Tensor, part_offsets: Sequence[Tensor], *, totals: Sequence[int] | None = None) -> tuple[Tensor, ...]:
    """What ``jagged_split`` means: one gather, then views."""
    sizes = list(totals) if totals is not None else [int(p[-1]) for p in part_offsets]
    before, places = torch.zeros_like(offsets[1:]), []
    for size, part in zip(sizes, part_offsets):
        places.append(_places(size, part, offsets, before))
        before = before + part.diff()
    place = torch.cat(places)
    source = torch.empty_like(place).scatter_(0, place, torch.arange(place.numel(), device=place.device))
    return torch.split(move(values, place, source), sizes)


def jagged_pad(
    values: Tensor, offsets: Tensor, *, max_length: int, fill: float = 0.0, truncate: str | None = None, backend: str | None = None
) -> Tensor:
    """Packed rows to padded rows.

    Args:
        values: ``[total, ...]``.
        offsets: ``[rows + 1]`` int64.
        max_length: slots of a row.
        fill: value of empty slots.
        truncate: what becomes of longer rows: ``left`` drops their starts, ``right`` their ends, None refuses them.
        backend: name of a backend; None chooses by policy.

    Returns:
        ``[rows, max_length, ...]`` of values' dtype. Dropped values get zero gradients.

    Raises:
        RequestError: shapes do not fit, or without ``truncate`` a row is longer than ``max_length`` (seen on the CPU only; CUDA drops its end).
    """
    out: Tensor = run(pad_check, backend, values, offsets, max_length=max_length, fill=fill, truncate=truncate)
    return out


def pad_check(values: Tensor, offsets: Tensor, *, max_length: int, fill: float = 0.0, truncate: str | None = None) -> KernelRequest:
    """Check a call of ``jagged_pad`` and describe it."""
    op = "jagged_pad"
    check_tensors(op, values, {}, integers=True)
    if truncate not in (None, "left", "right"):
        refuse(op, f"truncate {truncate!r} is unknown", "Give 'left', 'right' or None.")
    check_rows(op, "values", offsets, values, max_length, cut=truncate is not None)
    return make_request(op, values, (), (values,))


def pad_reference(values: Tensor, offsets: Tensor, *, max_length: int, fill: float = 0.0, truncate: str | None = None) -> Tensor:
    """What ``jagged_pad`` means: one gather."""
    skip = (offsets.diff() - max_length).clamp(min=0) if truncate == "left" else 0
    rows = Padding(offsets, values.shape[0], max_length, skip=skip)
    dense = rows.pad(values)
    return dense if fill == 0 else torch.where(rows.filled().view(*dense.shape[:2], *[1] * (dense.dim() - 2)), dense, fill)


def jagged_unpad(dense: Tensor, offsets: Tensor, *, total: int | None = None, backend: str | None = None) -> Tensor:
    """Padded rows to packed rows.

    Args:
        dense: ``[rows, max_length, ...]``.
        offsets: ``[rows + 1]`` int64.
        total: number of packed values, the last offset, as a host integer; read from ``offsets`` by default.
        backend: name of a backend; None chooses by policy.

    Returns:
        ``[total, ...]`` of dense's dtype; empty slots get zero gradients.

    Raises:
        RequestError: shapes do not fit, or a row is longer than ``dense`` (seen on the CPU only; CUDA gives zeros for what is missing).
    """
    out: Tensor = run(unpad_check, backend, dense, offsets, total=total)
    return out


def unpad_check(dense: Tensor, offsets: Tensor, *, total: int | None = None) -> KernelRequest:
    """Check a call of ``jagged_unpad`` and describe it."""
    op = "jagged_unpad"
    check_tensors(op, dense, {}, integers=True)
    if dense.dim() < 2 or offsets.shape != (dense.shape[0] + 1,):
        refuse(op, f"dense has shape {list(dense.shape)}, offsets {list(offsets.shape)}", "Give [rows, max_length, ...] and [rows + 1].")
    size = total if total is not None else int(offsets[-1]) if contents_readable(offsets) else 0
    if size < 0:
        refuse(op, f"the last offset is {size}", "Offsets never fall.")
    check_rows(op, "dense", offsets, dense.new_empty(1).expand(size), dense.shape[1])
    return make_request(op, dense, (), (dense,))


def unpad_reference(dense: Tensor, offsets: Tensor, *, total: int | None = None) -> Tensor:
    """What ``jagged_unpad`` means: one gather."""
    return Padding(offsets, int(offsets[-1]) if total is None else total, dense.shape[1]).unpad(dense)


def jagged_dense_bmm_add(values: Tensor, offsets: Tensor, dense: Tensor, bias: Tensor, *, max_length: int, backend: str | None = None) -> Tensor:
    """``values_r dense[r] + bias[r]`` for each row ``r``.

    Args:
        values: ``[total, in]``.
        offsets: ``[rows + 1]`` int64.
        dense: ``[rows, in, out]``.
        bias: ``[rows, out]``.
        max_length: longest row.
        backend: name of a backend; None chooses by policy.

    Returns:
        ``[total, out]`` of values' dtype.

    Raises:
        RequestError: shapes, dtypes or offsets do not fit together, or a row is longer than ``max_length``
            (seen on the CPU only; on CUDA the rest is cut: it gives zeros and gets zero gradients).
    """
    out: Tensor = run(bmm_check, backend, values, offsets, dense, bias, max_length=max_length)
    return out


def bmm_check(values: Tensor, offsets: Tensor, dense: Tensor, bias: Tensor, *, max_length: int) -> KernelRequest:
    """Check a call of ``jagged_dense_bmm_add`` and describe it."""
    op = "jagged_dense_bmm_add"
    check_tensors(op, values, {"dense": dense, "bias": bias})
    check_rank(op, "values", values, "total in")
    check_rank(op, "dense", dense, "rows in out")
    rows = check_rows(op, "values", offsets, values, max_length)
    check_shape(op, "dense", dense, ((rows,), (values.shape[1],), (dense.shape[2],)))
    check_shape(op, "bias", bias, ((rows,), (dense.shape[2],)))
    return make_request(op, values, (), (values, dense, bias))


@own_precision
def bmm_reference(values: Tensor, offsets: Tensor, dense: Tensor, bias: Tensor, *, max_length: int) -> Tensor:
    """What ``jagged_dense_bmm_add`` means, on padded rows."""
    rows = Padding(offsets, values.shape[0], max_length)
    return rows.unpad(torch.baddbmm(widen(bias)[:, None], rows.pad(widen(values)), widen(dense))).to(values.dtype)


def concat_flops() -> int:
    """Moving values counts as no FLOPs; so for the other three movers."""
    return 0


split_flops = pad_flops = unpad_flops = concat_flops


def bmm_flops(*, lengths: masks.Lengths, in_features: int, out_features: int) -> int:
    """Forward model FLOPs: one matmul."""
    return 2 * masks.pairs(lengths, 1) * in_features * out_features
