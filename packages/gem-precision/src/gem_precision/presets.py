"""What the names of the low-precision recipes stand for."""

from collections.abc import Mapping
from dataclasses import dataclass

from gem_precision.formats import find_format
from gem_precision.linear import LinearRule


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """Formats by name, whether attention is low too, and the smallest layer that is worth it."""

    inputs: str
    weights: str
    grads: str
    weight_grad: bool = True
    attention: bool = True
    small: int = 128

    def rule(self) -> LinearRule:
        inputs, weights, grads = (find_format(name) for name in (self.inputs, self.weights, self.grads))
        return LinearRule(inputs=inputs, weights=weights, grads=grads, weight_grad=self.weight_grad)


PRESETS: Mapping[str, Preset] = {
    "fp8_rowwise": Preset(inputs="fp8_e4m3_row", weights="fp8_e4m3_row", grads="fp8_e5m2_row"),
    "fp8_block": Preset(inputs="fp8_e4m3_1x128", weights="fp8_e4m3_128x128", grads="fp8_e4m3_1x128"),
    "fp8_square": Preset(inputs="fp8_e4m3_128x128", weights="fp8_e4m3_128x128", grads="fp8_e4m3_1x128", attention=False),
    "mxfp8": Preset(inputs="mxfp8_e4m3", weights="mxfp8_e4m3", grads="mxfp8_e4m3"),
    "mxfp4_mlp": Preset(inputs="mxfp4_e2m1", weights="mxfp4_e2m1", grads="mxfp8_e4m3", weight_grad=False, attention=False),
    "fp8_naive": Preset(inputs="fp8_e4m3_tensor", weights="fp8_e4m3_tensor", grads="fp8_e4m3_tensor", small=0),
}
"""``fp8_naive`` is what not to do, for comparison: one scale a tensor, no layer spared for its size, no module kept high by name."""
