"""The weight of a low-precision layer, rounded once for each of its values instead of in every product that reads it."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from gem_precision.formats import Format, Quantized, quantize
from gem_precision.hadamard import turned

T = TypeVar("T")


class HeldWeight:
    """What is computed from one layer's weight alone, held until the weight has another value.

    A value is known by its place in memory, which no other tensor is given in the meantime, and by its version, which every in-place change raises.
    What changes weights behind torch's back (writes through ``.data``) has to call ``drop``. A copy of a layer, and a layer that was sent to another
    process, starts with nothing held.
    """

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}
        self._of: tuple[Any, ...] = ()
        self._alias: Tensor | None = None

    def get(self, weight: Tensor, name: Any, make: Callable[[Tensor], T]) -> T:
        """``make(weight)``, called once for each value of the weight; ``name`` says which of several things that are made of it."""
        if weight.is_inference():  # such tensors have no version
            return make(weight)
        now = (weight.data_ptr(), weight._version, weight.shape, weight.stride())
        if now != self._of:
            self._made, self._of, self._alias = {}, now, weight.detach()
        if name not in self._made:
            self._made[name] = make(weight)
        return self._made[name]  # type: ignore[no-any-return]

    def drop(self) -> None:
        """Hold nothing."""
        self._made, self._of, self._alias = {}, (), None

    def __reduce__(self) -> tuple[type["HeldWeight"], tuple[()]]:
        return HeldWeight, ()


def rounded(held: HeldWeight, weight: Tensor, form: Format, hadamard: int | None, *, transposed: bool) -> Quantized:
    """A weight ``[out, in]`` in a format along its inputs, as the forward product reads it, or transposed ``[in, out]`` along its outputs, as the
    input gradient does. A format with square blocks is computed once for both, if no transform turns them along different axes.
    """
    if transposed and hadamard is None and form.symmetric:
        return rounded(held, weight, form, None, transposed=False).transposed()
    side = "transposed" if transposed else "forward"
    return held.get(weight, (side, form.name, hadamard), lambda w: quantize(turned(w.T if transposed else w, hadamard), form))
