"""``[precision.options]`` of the recipes."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Pattern = Annotated[str, Field(min_length=1)]


class Bf16IslandsOptions(BaseModel):
    """Options of ``bf16_islands``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    islands: tuple[Pattern, ...] | None = None
    """Names of modules that stay in float32, with everything inside them; ``*`` stands for any text, dots included. Replaces the default names."""
    small: int = Field(default=16, ge=0)
    """Linear layers with fewer inputs or outputs than this stay in float32; 0 for none."""
    cpu: Literal["fp32", "bf16"] = "fp32"
    """What a run on a CPU computes in."""


class LowPrecisionOptions(BaseModel):
    """Options of ``fp8_rowwise``, ``fp8_block``, ``mxfp8``, ``mxfp4_mlp`` and ``fp8_naive``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    high: tuple[Pattern, ...] = ()
    """Names of modules whose linear layers stay in bfloat16, ``*`` for any text; on top of the islands."""
    islands: tuple[Pattern, ...] | None = None
    """Names of modules that stay in float32, as in ``bf16_islands``. Replaces the default names."""
    small: int | None = Field(default=None, ge=0)
    """Linear layers with fewer inputs or outputs than this, and attention with narrower heads, stay in bfloat16; by default 128, and 0 for
    ``fp8_naive``."""
    attention: bool | None = None
    """Whether the products of attention are low too; by default yes, and no for ``mxfp4_mlp``."""
    weight_grad: Literal["low", "high"] | None = None
    """Whether weight gradients are computed from rounded operands; by default low, and high for ``mxfp4_mlp``."""
    stochastic: bool = False
    """Round output gradients stochastically, which keeps their mean."""
    hadamard: bool = False
    """Spread outliers by a random Hadamard transform of both operands of each product."""
    telemetry: bool = False
    """Write largest value, error, saturation and underflow of the operands of linear layers to ``precision.jsonl`` at logging steps."""
    cpu: Literal["fp32", "bf16"] = "fp32"
    """What the rest of a run on a CPU computes in."""


class ProbeOptions(BaseModel):
    """Options of ``probe``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    islands: tuple[Pattern, ...] | None = None
    """Names of modules that are not probed, as in ``bf16_islands``."""
    cpu: Literal["fp32", "bf16"] = "fp32"
    """What a run on a CPU computes in."""


class AutoOptions(BaseModel):
    """Options of ``auto``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    probe: Path
    """What ``gem precision sweep`` wrote: its folder, or the file in it."""
    bound: float = 25.0
    """The lowest signal-to-quantisation-noise ratio, in dB, that each product of a site has to reach."""
    formats: Annotated[tuple[Literal["fp8_rowwise", "fp8_block", "mxfp8", "mxfp4_mlp"], ...], Field(min_length=1)] = ("fp8_block", "mxfp8")
    """Recipes whose formats are tried, the fastest first."""
    high: tuple[Pattern, ...] = ()
    """As in the low-precision recipes."""
    islands: tuple[Pattern, ...] | None = None
    """As in the low-precision recipes."""
    small: int = Field(default=128, ge=0)
    """As in the low-precision recipes."""
    attention: bool = True
    """As in the low-precision recipes."""
    telemetry: bool = False
    """As in the low-precision recipes."""
    cpu: Literal["fp32", "bf16"] = "fp32"
    """As in the low-precision recipes."""
