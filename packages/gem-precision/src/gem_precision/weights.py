"""The weight of a low-precision layer, rounded once for each of its values instead of in every product that reads it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from gem_precision.formats import Format, Quantized, quantize
from gem_precision.hadamard import turned
from gem_precision.parts import Parts

T = TypeVar("T")


class HeldWeight:
    """What is computed from one layer's weight ``[..., out, in]`` alone, held until the weight has another value.

    A recipe says when the weight has another value (``changed``), and what is held lasts until then. Where nobody says so it lasts from a forward
    pass to the backward pass of it: torch's own sharding fills a gathered weight again without a trace. Beside that a value is known by its place in
    memory, which no other tensor is given in the meantime, and by its version, which in-place changes raise. A copy of a layer, and a layer that was
    sent to another process, starts with nothing held.

    It is also the ``gem_core.spec.LowWeight`` of its layer: where ranks keep the weight in parts, these are rounded before they travel.

    Args:
        form: the format of the weight.
        hadamard: seed of the transform of both operands of each product, None for none.
        shape: of the weight, which parts need; only a matrix can be in parts.
    """

    def __init__(self, form: Format, hadamard: int | None = None, shape: tuple[int, ...] | None = None) -> None:
        self._form, self._hadamard, self._shape = form, hadamard, shape
        self._made: dict[Any, Any] = {}
        self._of: tuple[Any, ...] = ()
        self._alias: Tensor | None = None
        self._sides: list[Parts] = []
        self._packed: Tensor | None = None
        self._told = False
        self._across: Tensor | None = None
        self._read = False

    def get(self, weight: Tensor, name: Any, make: Callable[[Tensor], T]) -> T:
        """``make(weight)``, called once for each value of the weight; ``name`` says which of several things that are made of it."""
        if torch.compiler.is_compiling() or weight.is_inference():  # neither has a version
            return make(weight)
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():  # a replay has to make it of the weight as it is then
            return make(weight)
        now = (weight.data_ptr(), weight._version, weight.shape, weight.stride())
        if now != self._of:
            self._made, self._of, self._alias = {}, now, weight.detach()
        if name not in self._made:
            self._made[name] = make(weight)
        return self._made[name]  # type: ignore[no-any-return]

    def begin(self) -> None:
        """A forward pass begins."""
        if not self._told:
            self.drop()

    def drop(self) -> None:
        """Hold nothing."""
        self._made, self._of, self._alias = {}, (), None

    def changed(self) -> None:
        """The weight has another value. Who says so once says so each time, and is relied upon."""
        self.drop()
        self._packed, self._told = None, True

    def rounded(self, weight: Tensor, *, transposed: bool) -> Quantized:
        """The weight in its format along its inputs, as the forward product reads it, or transposed ``[in, out]`` along its outputs, as the input
        gradient does. A format with square blocks is computed once for both, if no transform turns them along different axes.
        """
        if transposed and self.one_for_both:
            return self.rounded(weight, transposed=False).transposed()
        return self.get(weight, transposed, lambda w: quantize(turned(w.mT if transposed else w, self._hadamard), self._form))

    def operand(self, weight: Tensor, *, transposed: bool) -> Tensor:
        """As ``rounded``, in float32. A weight that has travelled in its format is taken as it came."""
        if not self._sides:
            return self.rounded(weight, transposed=transposed).dequantize().contiguous()
        self._read = True
        if not transposed:
            return weight
        if self.one_for_both:
            return weight.T.contiguous()
        assert self._across is not None
        if self._across.is_cuda:  # it came on the stream of the gather
            self._across.record_stream(torch.cuda.current_stream())
        return self._sides[1].unpack(self._across)[: weight.shape[0]].T.contiguous()

    @property
    def travelled(self) -> bool:
        """Whether the weights that the layer sees are rounded ones that came from other ranks."""
        return bool(self._sides)

    @property
    def one_for_both(self) -> bool:
        """Whether the forward product and the input gradient read the same rounded numbers."""
        return self._hadamard is None and self._form.symmetric

    # ---- gem_core.spec.LowWeight

    def split(self, rows: int, rank: int, ranks: int) -> None:
        assert self._shape is not None
        out, columns = self._shape
        kept = Parts(form=self._form, across=False, hadamard=self._hadamard, out=out, columns=columns, rows=rows, rank=rank, ranks=ranks)
        self._sides = [kept] if self.one_for_both else [kept, replace(kept, across=True)]
        for side in self._sides:
            side.check()

    def largest(self, part: Tensor) -> Tensor:
        return torch.cat([side.largest(part) for side in self._sides])

    def pack(self, part: Tensor, largest: Tensor) -> Tensor:
        """Once for each value, if anybody says when it changes: an optimiser that updates parts as lists raises no version."""
        if self._packed is not None:
            return self._packed
        agreed = torch.split(largest, [side.largest_size for side in self._sides])
        packed = torch.cat([side.pack(part, each) for side, each in zip(self._sides, agreed, strict=True)])
        self._packed = packed if self._told else None
        return packed

    def unpack(self, received: Tensor, whole: Tensor) -> None:
        self.drop()  # torch fills a gathered weight again without raising its version
        first = self._sides[0].bytes
        whole.copy_(self._sides[0].unpack(received[:, :first]))
        self._across, self._read = None if self.one_for_both else received[:, first:].clone(), False

    def freed(self) -> None:
        if self._read:
            self._across = None
            self.drop()

    def __reduce__(self) -> tuple[type["HeldWeight"], tuple[Any, ...]]:
        return HeldWeight, (self._form, self._hadamard, self._shape)
