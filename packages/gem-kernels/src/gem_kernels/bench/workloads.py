"""The calls that are timed: inputs of an op over rows of given lengths, its FLOPs, and the same call in another dtype."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gem_core.spec import load_object
from gem_kernels.bench.shapes import ACTIVATION_OF, BLOCK, DIM, HEADS, SEEDS, Shape


@dataclass(frozen=True, slots=True)
class Workload:
    """One call.

    Args:
        op: the op.
        arguments: by name; those of a floating dtype are leaves that want gradients.
        flops: model FLOPs of the forward pass.
        backward: FLOPs of the backward pass over those of the forward: recomputed scores count, since the rates compare kernels.
    """

    op: str
    arguments: dict[str, Any]
    flops: int
    backward: float

    def call(self, function: Callable[..., Any]) -> Any:
        """The result of ``function``, which takes the first argument by position."""
        first, *_ = self.arguments
        return function(self.arguments[first], **{name: value for name, value in self.arguments.items() if name != first})

    def leaves(self) -> list[Tensor]:
        return [t for t in _tensors(list(self.arguments.values())) if t.requires_grad]

    def moved(self, outputs: Sequence[Tensor], mode: str) -> int:
        """Bytes that a pass has to read or write, each once: inputs and outputs forward; inputs, upstream and input gradients backward.

        Movers read no input in backward, and no padding in either direction. The gradient of what is added is that of the sum: it is written once.
        """
        given, made = (sum(t.numel() * t.element_size() for t in tensors) for tensors in (self.leaves(), outputs))
        if self.op in ("jagged_concat", "jagged_split"):
            return given + made
        if self.op == "jagged_pad":
            return given + made if mode == "fwd" else 2 * given
        if self.op == "jagged_unpad":
            return 2 * made if mode == "fwd" else given + made
        if mode == "fwd":
            return given + made
        if self.op == "gated_residual":
            return 5 * made
        return 2 * given + made - (made if self.op == "add_norm" and "residual" in self.arguments else 0)

    def cast(self, dtype: torch.dtype) -> "Workload":
        """The same values in ``dtype``, as new leaves; angles stay at least float32."""

        def change(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_floating_point():
                wide = torch.promote_types(dtype, torch.float32) if not value.requires_grad else dtype
                return value.detach().to(wide).requires_grad_(value.requires_grad)
            return [change(v) for v in value] if isinstance(value, list | tuple) else value

        return replace(self, arguments={name: change(value) for name, value in self.arguments.items()})


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


class _Draw:
    """Random inputs over the rows of one shape."""

    def __init__(self, lengths: list[int], keys: int | None, dtype: torch.dtype, device: str) -> None:
        self.lengths, self.keys = lengths, lengths if keys is None else [keys] * len(lengths)
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator(device).manual_seed(0)
        self.offsets = self.offsets_of(lengths)
        self.rows, self.tokens, self.longest = len(lengths), sum(lengths), max(lengths)

    def offsets_of(self, lengths: list[int]) -> Tensor:
        return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(self.device)

    def tensor(self, *shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, device=self.device, dtype=torch.float32) * scale
        return drawn.to(self.dtype).requires_grad_()

    def heads(self, tokens: int) -> Tensor:
        return self.tensor(tokens, HEADS, DIM)


def build(op: str, variant: str, shape: Shape, lengths: list[int], dtype: torch.dtype, device: str) -> Workload:
    """The call of ``op`` over rows of ``lengths``."""
    draw = _Draw(lengths, shape.keys, dtype, device)
    arguments, counts, backward = _BUILDERS[op](draw, variant, shape)
    module, prefix = ("jagged", op.removeprefix("jagged_").replace("dense_bmm_add", "bmm") + "_") if op.startswith("jagged_") else (op, "")
    if op == "jagged_attention":
        module, prefix = op, ""
    flops: int = load_object(f"gem_core.ops.{module}:{prefix}flops")(**counts)
    return Workload(op, arguments, flops, backward)


Built = tuple[dict[str, Any], dict[str, Any], float]
ATTENTION_BACKWARD = 2.5


def _attention(draw: _Draw, variant: str, shape: Shape) -> Built:
    q, k, v = draw.heads(draw.tokens), draw.heads(sum(draw.keys)), draw.heads(sum(draw.keys))
    k_offsets = draw.offsets if shape.keys is None else draw.offsets_of(draw.keys)
    arguments = {"q": q, "k": k, "v": v, "q_offsets": draw.offsets, "k_offsets": k_offsets, "max_q": draw.longest, "max_k": max(draw.keys)}
    return arguments, {"q_lengths": draw.lengths, "k_lengths": draw.keys, "heads": HEADS, "dim": DIM}, ATTENTION_BACKWARD


def _gdpa(draw: _Draw, variant: str, shape: Shape) -> Built:
    arguments, counts, backward = _attention(draw, variant, shape)
    return {**arguments, "activation": ACTIVATION_OF["gdpa"], "scale": DIM**-0.5}, counts, backward


def _own_rows(draw: _Draw) -> dict[str, Any]:
    q, k, v = (draw.heads(draw.tokens) for _ in range(3))
    return {"q": q, "k": k, "v": v, "offsets": draw.offsets, "max_length": draw.longest}


def _hstu(draw: _Draw, variant: str, shape: Shape) -> Built:
    return _own_rows(draw), {"lengths": draw.lengths, "heads": HEADS, "dim": DIM}, ATTENTION_BACKWARD


def _block(draw: _Draw, variant: str, shape: Shape) -> Built:
    arguments = _own_rows(draw)
    if "qk_norm" in variant:
        arguments |= {"q_gain": draw.tensor(DIM), "k_gain": draw.tensor(DIM)}
    if "rope" in variant:
        positions = torch.arange(draw.tokens, device=draw.device)[:, None] % draw.longest
        arguments["rope"] = positions * 10_000.0 ** -torch.linspace(0, 1, DIM // 2, device=draw.device)
    return arguments, {"lengths": draw.lengths, "heads": HEADS, "dim": DIM, "block": BLOCK}, ATTENTION_BACKWARD


def _pooled(draw: _Draw, variant: str, shape: Shape) -> Built:
    arguments = {"seeds": draw.heads(SEEDS), "k": draw.heads(draw.tokens), "v": draw.heads(draw.tokens), "k_offsets": draw.offsets}
    return {**arguments, "max_k": draw.longest}, {"seeds": SEEDS, "k_lengths": draw.lengths, "heads": HEADS, "dim": DIM}, ATTENTION_BACKWARD


def _norm_linear(draw: _Draw, variant: str, shape: Shape) -> Built:
    width = shape.width
    arguments = {"x": draw.tensor(draw.tokens, width), "weight": draw.tensor(width, width, scale=width**-0.5), "where": variant}
    return arguments, {"tokens": draw.tokens, "in_features": width, "out_features": width}, 2.0


def _add_norm(draw: _Draw, variant: str, shape: Shape) -> Built:
    x, other = (draw.tensor(draw.tokens, shape.width) for _ in range(2))
    return {"x": x, variant: other, "gamma": draw.tensor(shape.width), "beta": draw.tensor(shape.width)}, {}, 1.0


def _gated_residual(draw: _Draw, variant: str, shape: Shape) -> Built:
    return {name: draw.tensor(draw.tokens, shape.width) for name in ("x", "gate", "residual")}, {}, 1.0


def _pffn(draw: _Draw, variant: str, shape: Shape) -> Built:
    keys = draw.keys[0]
    k, v = (draw.tensor(draw.rows, keys, HEADS, DIM, scale=0.1) for _ in range(2))
    arguments = {"q0": draw.heads(draw.tokens), "k": k, "v": v, "q_offsets": draw.offsets, "max_q": draw.longest}
    return arguments, {"q_lengths": draw.lengths, "keys": keys, "heads": HEADS, "dim": DIM}, ATTENTION_BACKWARD


def _concat(draw: _Draw, variant: str, shape: Shape) -> Built:
    return {"parts": [(draw.tensor(draw.tokens, shape.width), draw.offsets) for _ in range(2)]}, {}, 1.0


def _split(draw: _Draw, variant: str, shape: Shape) -> Built:
    values = draw.tensor(2 * draw.tokens, shape.width)
    return {"values": values, "offsets": 2 * draw.offsets, "part_offsets": [draw.offsets] * 2, "totals": [draw.tokens] * 2}, {}, 1.0


def _pad(draw: _Draw, variant: str, shape: Shape) -> Built:
    return {"values": draw.tensor(draw.tokens, shape.width), "offsets": draw.offsets, "max_length": draw.longest}, {}, 1.0


def _unpad(draw: _Draw, variant: str, shape: Shape) -> Built:
    return {"dense": draw.tensor(draw.rows, draw.longest, shape.width), "offsets": draw.offsets, "total": draw.tokens}, {}, 1.0


def _bmm(draw: _Draw, variant: str, shape: Shape) -> Built:
    arguments = {"values": draw.tensor(draw.tokens, DIM), "offsets": draw.offsets, "max_length": draw.longest}
    arguments |= {"dense": draw.tensor(draw.rows, DIM, DIM, scale=DIM**-0.5), "bias": draw.tensor(draw.rows, DIM)}
    return arguments, {"lengths": draw.lengths, "in_features": DIM, "out_features": DIM}, 2.0


_BUILDERS = {
    "jagged_attention": _attention,
    "gdpa": _gdpa,
    "hstu_attention": _hstu,
    "block_attention": _block,
    "pooled_attention": _pooled,
    "norm_linear": _norm_linear,
    "add_norm": _add_norm,
    "gated_residual": _gated_residual,
    "pffn": _pffn,
    "jagged_concat": _concat,
    "jagged_split": _split,
    "jagged_pad": _pad,
    "jagged_unpad": _unpad,
    "jagged_dense_bmm_add": _bmm,
}
