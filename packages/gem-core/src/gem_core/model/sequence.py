"""Event tokens of a sequence group, its personalised feed-forward and its self-attention. All tensors are packed ``[events, dim]``."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gem_core.batch import Batch
from gem_core.model.crossing import KeyValues
from gem_core.model.jagged import from_end, row_of
from gem_core.model.layers import NormLinear, PreNormLinear, compute_dtype, together
from gem_core.model.options import SequenceOptions
from gem_core.ops.block_attention import flops as block_attention_flops
from gem_core.ops.gdpa import flops as gdpa_flops
from gem_core.ops.jagged_attention import flops as jagged_attention_flops
from gem_core.ops.packed import unbind_packed
from gem_core.ops.pffn import flops as pffn_flops
from gem_core.ops.products import linear_flops, slot_flops
from gem_core.ops.slot import KernelSlot
from gem_core.spec.data import SequenceFeature
from gem_core.spec.errors import RequestError

POSITION_BUCKETS = 32
ROPE_BASE = 10000.0
Lengths = npt.NDArray[np.int64]


class Events(NamedTuple):
    """Packed events of one group: a residual stream, to which each layer adds what it computes.

    A layer hands on the stream and its own summand apart. The next one begins with a norm, which adds them as it reads (``PreNormLinear``) and gives
    the sum on.

    Args:
        values: ``[events, dim]``.
        offsets: ``[rows + 1]`` int64.
        max_length: the longest row.
        age: seconds from event to impression, ``[events]`` int64, None without times.
        angles: rotary angles ``[events, head_dim / 2]``, None without rotation.
        pending: ``[events, dim]`` that has yet to be added to the values, None for nothing.
    """

    values: Tensor
    offsets: Tensor
    max_length: int
    age: Tensor | None
    angles: Tensor | None
    pending: Tensor | None = None

    def holding(self, values: Tensor, pending: Tensor | None = None) -> "Events":
        """The same events with other values; ``_replace`` loses fields in blocks that torch 2.11 compiles."""
        return Events(values, self.offsets, self.max_length, self.age, self.angles, pending)

    def summed(self) -> Tensor:
        """The values with what is pending, for those who do not begin with a norm."""
        return self.values if self.pending is None else self.values + self.pending


def log_buckets(buckets: int, octaves: float, device: torch.device) -> Tensor:
    """Inner boundaries of ``buckets`` log-spaced buckets of whole numbers up to ``2 ** octaves``: ``[buckets - 1]`` int64, rising."""
    edges = torch.logspace(0.0, octaves, buckets, base=2.0, dtype=torch.float64).ceil().to(torch.int64)[:-1]
    floor = torch.arange(1, buckets, dtype=torch.int64)
    return torch.maximum(edges, floor).to(device)


class LogEmbedding(nn.Module):
    """A learned vector for each log-spaced bucket of a whole number >= 0. The number stays int64 until it is a bucket: ``[n] -> [n, dim]``."""

    boundaries: Tensor

    def __init__(self, buckets: int, octaves: float, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(buckets, dim))
        self.octaves = octaves
        self.register_buffer("boundaries", torch.empty(buckets - 1, dtype=torch.int64), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.1)
        self.boundaries = log_buckets(self.weight.shape[0], self.octaves, self.boundaries.device)

    def bucket(self, number: Tensor) -> Tensor:
        return torch.bucketize(number, self.boundaries, right=True)

    def forward(self, number: Tensor) -> Tensor:
        return nn.functional.embedding(self.bucket(number), self.weight)


class LookUpSum(torch.autograd.Function):
    """``places[place] + ages[age]`` in ``dtype``: ``[places, dim], [ages, dim], [events], [events] -> [events, dim]``.

    One look-up in the few sums that there are. Gradients of both tables are one product with events that are ones at their place and age, in the
    place of a sort of all events by what they looked up.
    """

    @staticmethod
    def forward(ctx: Any, places: Tensor, ages: Tensor, place: Tensor, age: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(place, age)
        ctx.counts, ctx.dtype = (places.shape[0], ages.shape[0]), places.dtype
        sums = (places[:, None] + ages).flatten(0, 1).to(dtype)
        return nn.functional.embedding(place * ages.shape[0] + age, sums)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        place, age = ctx.saved_tensors
        count = ctx.counts[0]
        ones = grad.new_zeros((grad.shape[0], sum(ctx.counts))).scatter_(1, torch.stack([place, count + age], dim=1), 1.0)
        tables = torch.matmul(ones.t(), grad).to(ctx.dtype)
        return tables[:count], tables[count:], None, None, None


def event_age(batch: Batch, group: str, row: Tensor) -> Tensor:
    """Seconds from each event to its row's impression, at least 0: ``[events]`` int64."""
    if batch.time is None:
        raise RequestError(
            f"ages of the events of {group!r}", "the batch has no impression times", "Give Batch.time, or declare the group without times."
        )
    return (batch.time[row] - batch.event_time[group]).clamp(min=0)


class RotaryAngles(nn.Module):
    """Angles of rotary embeddings by recency: ``[events, head_dim / 2]`` float32.

    An event's place is the number of later events in its row; with times also ``log(1 + age / time_scale)`` (ROTE, Kunlun arXiv 2602.10016). Both
    fall from old to new, so they add up instead of cancelling.
    """

    def __init__(self, head_dim: int, time_scale: float | None) -> None:
        super().__init__()
        self.pairs, self.time_scale = head_dim // 2, time_scale

    def forward(self, place: Tensor, age: Tensor | None) -> Tensor:
        where = place.to(torch.float32)
        if self.time_scale is not None and age is not None:
            where = where + torch.log1p(age.to(torch.float32) / self.time_scale)
        exponent = -torch.arange(self.pairs, device=where.device, dtype=torch.float32) / self.pairs
        return where[:, None] * torch.pow(ROPE_BASE, exponent)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn interleaved pairs of ``x`` ``[events, ..., head_dim]`` by ``angles`` ``[events, head_dim / 2]``; computed in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    turn = torch.polar(torch.ones_like(angles), angles).view(angles.shape[0], *[1] * (x.dim() - 2), angles.shape[1])
    pairs = torch.view_as_complex(wide.reshape(*x.shape[:-1], angles.shape[1], 2))
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


class EventTokens(nn.Module):
    """``N(W c + place + age)`` of an event's columns ``c``, its side embeddings and numbers: ``[events, dim]``.

    ``place`` and ``age`` are learned vectors of log-spaced buckets of the number of later events and of the seconds to the impression.
    """

    def __init__(self, group: SequenceFeature, embedding_dim: int, options: SequenceOptions) -> None:
        super().__init__()
        self.group, self.width, self.dim = group, embedding_dim, options.dim
        self.inputs = embedding_dim * len(group.ids) + sum(feature.width for feature in group.dense)
        if options.rope == "time" and not group.time:
            raise RequestError(
                f"rope = 'time' for {group.name!r}", "the group carries no event times", f"Set sequences.{group.name}.rope to 'position'."
            )
        self.project = NormLinear(self.inputs, options.dim, where="after", residual=True, norm=options.norm) if self.inputs else None
        self.place = LogEmbedding(POSITION_BUCKETS, 16.0, options.dim)
        self.age = LogEmbedding(options.time_buckets, 32.0, options.dim) if group.time else None
        rotary = options.rope != "off" and options.attention != "off"
        self.rotary = RotaryAngles(options.dim // options.heads, options.time_scale if options.rope == "time" else None) if rotary else None

    def forward(self, batch: Batch, embedded: dict[str, Tensor]) -> Events:
        name, jagged = self.group.name, batch.event_offsets[self.group.name]
        count = self.events(batch, embedded)
        row = row_of(jagged.offsets, count)
        place = from_end(jagged.offsets, row)
        age = event_age(batch, name, row) if self.age is not None else None
        when = self._when(place, age)
        parts = [embedded[f"{name}.{feature.name}"][:, : self.width] for feature in self.group.ids]
        parts += [batch.event_dense[f"{name}.{feature.name}"] for feature in self.group.dense]
        values = when if self.project is None else self.project(parts, when)
        angles = None if self.rotary is None else self.rotary(place, age)
        return Events(values, jagged.offsets, jagged.max_length, age, angles)

    def _when(self, place: Tensor, age: Tensor | None) -> Tensor:
        """``place + age [events, dim]``: one look-up in the few sums that there are, in the dtype that the next kernel reads."""
        bucket, dtype = self.place.bucket(place), compute_dtype(self.place.weight)
        if self.age is None or age is None:
            return nn.functional.embedding(bucket, self.place.weight.to(dtype))
        out: Tensor = LookUpSum.apply(self.place.weight, self.age.weight, bucket, self.age.bucket(age), dtype)  # type: ignore[no-untyped-call]
        return out

    def events(self, batch: Batch, embedded: dict[str, Tensor]) -> int:
        """Number of events, from shapes; RequestError when the group's columns disagree."""
        name = self.group.name
        sizes = {f"{name}.{f.name}": embedded[f"{name}.{f.name}"].shape[0] for f in self.group.ids}
        sizes |= {f"{name}.{f.name}": batch.event_dense[f"{name}.{f.name}"].shape[0] for f in self.group.dense}
        if self.group.time:
            sizes[f"{name}.time"] = batch.event_time[name].shape[0]
        first, *others = sizes.values()
        if any(size != first for size in others):  # a set would need each number itself, and a compiled block a compilation for each
            raise RequestError(
                f"sequence group {name!r}", f"its columns hold different numbers of events: {sizes}", "Every event has a value in each column."
            )
        return first

    def flops(self, events: int) -> int:
        return 0 if self.project is None else self.project.flops(events, input_gradient=bool(self.group.ids))


class PersonalFfn(nn.Module):
    """GDPA-PFFN: a feed-forward network whose weights are generated for each row, seen as attention without softmax over its hidden units.

    ``gdpa``: ``S + W_o f(W_q N(S) K^T / tau) V`` (Kunlun), its summands apart: the second is pending. ``fused``: the ``pffn`` op,
    ``RMSNorm(f(LN(S) K^T / tau) V + LN(S)) + S``, with nothing pending.
    """

    def __init__(self, sources: int, dim: int, options: SequenceOptions) -> None:
        super().__init__()
        self.heads, self.head_dim, self.activation = options.heads, options.dim // options.heads, options.activation
        self.scale = 1.0 / (options.tau or self.head_dim**0.5)
        self.make = KeyValues(sources, options.keys_per_token, dim, self.heads, self.head_dim)
        self.project = options.pffn == "gdpa"
        act = f"act_{options.activation}"
        if self.project:
            self.query = PreNormLinear(options.dim, options.dim, norm=options.norm, bias=options.bias)
            self.out = nn.Linear(options.dim, options.dim, bias=options.bias)
            self.slot = KernelSlot("gdpa", head_dim=self.head_dim, features=("dense_kv", act))
        else:
            self.slot = KernelSlot("pffn", head_dim=self.head_dim, features=(act,))
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, events: Events, sources: Tensor) -> tuple[Tensor, Tensor | None]:
        key, value = self.make(sources)
        if self.project:
            query, stream = self.query(events.values, events.pending)
        else:
            query = stream = events.summed()
        q, k, v = together(query.unflatten(-1, (self.heads, self.head_dim)), key, value)
        how = {"max_q": events.max_length, "activation": self.activation, "scale": self.scale}
        if not self.project:
            return self.slot(q, k, v, events.offsets, **how).flatten(1), None
        out = self.slot(q, k, v, events.offsets, None, max_k=self.make.keys, **how)
        return stream, self.dropout(self.out(out.flatten(1)))

    def flops(self, lengths: Lengths) -> int:
        shape = {"q_lengths": lengths, "heads": self.heads, "dim": self.head_dim}
        made, events = self.make.flops(len(lengths)), int(lengths.sum())
        if not self.project:
            return made + slot_flops(self.slot, pffn_flops, keys=self.make.keys, **shape)
        return made + self.query.flops(events) + slot_flops(self.slot, gdpa_flops, k_lengths=self.make.keys, **shape) + linear_flops(self.out, events)


class SelfAttention(nn.Module):
    """``S + W_o Attention(N(S))`` within a window of events, or within blocks of neighbours, rotary on queries and keys.

    Its summands apart: the second is pending.
    """

    def __init__(self, options: SequenceOptions, longest: int) -> None:
        super().__init__()
        self.heads, self.head_dim, self.block = options.heads, options.dim // options.heads, options.block
        self.blocks = options.attention == "block"
        self.window = None if options.window is None or options.window >= longest - 1 else options.window
        self.qkv = PreNormLinear(options.dim, 3 * options.dim, norm=options.norm, bias=options.bias)
        self.out = nn.Linear(options.dim, options.dim, bias=options.bias)
        self.dropout = nn.Dropout(options.dropout)
        if self.blocks:
            self.slot = KernelSlot("block_attention", head_dim=self.head_dim, features=("rope",) if options.rope != "off" else ())
        else:
            self.slot = KernelSlot("jagged_attention", head_dim=self.head_dim, features=() if self.window is None else ("window",))

    def forward(self, events: Events) -> tuple[Tensor, Tensor]:
        made, stream = self.qkv(events.values, events.pending)
        qkv = made.unflatten(-1, (3, self.heads, self.head_dim))
        longest, offsets = events.max_length, events.offsets
        if self.blocks or events.angles is None:
            q, k, v = unbind_packed(qkv)
        else:
            turned, rest = qkv.split((2, 1), dim=1)
            q, k, v = *unbind_packed(rotate(turned, events.angles)), rest.squeeze(1)
        if self.blocks:
            angles = None if events.angles is None else events.angles.to(torch.promote_types(q.dtype, torch.float32))
            out = self.slot(q, k, v, offsets, max_length=longest, block=self.block, rope=angles)
        else:
            out = self.slot(q, k, v, offsets, offsets, max_q=longest, max_k=longest, window=self.window)
        return stream, self.dropout(self.out(out.flatten(1)))

    def flops(self, lengths: Lengths) -> int:
        events, shape = int(lengths.sum()), {"heads": self.heads, "dim": self.head_dim}
        if self.blocks:
            pairs = slot_flops(self.slot, block_attention_flops, lengths=lengths, block=self.block, **shape)
        else:
            pairs = slot_flops(self.slot, jagged_attention_flops, q_lengths=lengths, k_lengths=lengths, window=self.window, **shape)
        return self.qkv.flops(events) + pairs + linear_flops(self.out, events)
