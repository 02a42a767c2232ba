"""``[precision.options]`` of the recipes."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

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
    tf32: bool = False
    """On a GPU, multiply the islands' matrices in TF32: ten bits of each factor, float32 sums."""


class GuardOptions(BaseModel):
    """``guard = {every = 50, on_breach = "fallback"}``: what the formats cost, watched while a run trains."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: int = Field(ge=1)
    """Every so many steps the batch goes forward once more with all sites high, and the log losses are compared."""
    on_breach: Literal["warn", "fallback", "stop"] = "warn"
    """``fallback``: the site with the lowest signal-to-quantisation-noise ratio goes high, one at a time until it holds."""
    bound: float = Field(default=2e-4, gt=0.0, allow_inf_nan=False)
    """Largest relative rise of normalised entropy; it is breached when the whole 95 % interval lies above."""
    pairs: int = Field(default=32, ge=8)
    """The interval is that of the last so many pairs; with fewer than 8 nothing is judged."""


class RampOptions(BaseModel):
    """``ramp = {start = 100}``, or site by site ``ramp = {start = 100, end = 500, probe = "runs/probe"}``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    start: int = Field(ge=1)
    """The first step in which sites compute low; before, they are high."""
    end: int | None = None
    """The step in which the last site turns low: they turn one by one, the least sensitive first."""
    probe: Path | None = None
    """What ``gem precision sweep`` wrote: the order of the sites."""

    @model_validator(mode="after")
    def _together(self) -> Self:
        if (self.end is None) != (self.probe is None):
            raise ValueError("end and probe belong together: the probe gives the order in which sites turn low")
        if self.end is not None and self.end < self.start:
            raise ValueError(f"end = {self.end} comes before start = {self.start}")
        return self


class LowPrecisionOptions(BaseModel):
    """Options of ``fp8_rowwise``, ``fp8_block``, ``fp8_square``, ``mxfp8``, ``mxfp4_mlp`` and ``fp8_naive``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    high: tuple[Pattern, ...] = ()
    """Names of modules whose linear layers stay in bfloat16, ``*`` for any text; on top of the islands."""
    islands: tuple[Pattern, ...] | None = None
    """Names of modules that stay in float32, as in ``bf16_islands``. Replaces the default names."""
    small: int | None = Field(default=None, ge=0)
    """Linear layers with fewer inputs or outputs than this, and attention with narrower heads, stay in bfloat16; by default 128, and 0 for
    ``fp8_naive``."""
    attention: bool | None = None
    """Whether the products of attention are low too; by default yes, and no for ``fp8_square`` and ``mxfp4_mlp``."""
    weight_grad: Literal["low", "high"] | None = None
    """Whether weight gradients are computed from rounded operands; by default low, and high for ``mxfp4_mlp``."""
    stochastic: bool = False
    """Round output gradients stochastically, which keeps their mean."""
    hadamard: bool = False
    """Spread outliers by a random Hadamard transform of both operands of each product."""
    linear: str | None = None
    """Backend of linear layers, such as ``fp8_block_native``; by default the emulation. One that does not fit a layer is an error."""
    emulate: bool = True
    """False leaves every place high that no native backend on this device computes, and says why: what is low is fast then."""
    telemetry: bool = False
    """Write largest value, error, saturation and underflow of the operands of linear layers to ``precision.jsonl`` at logging steps."""
    guard: GuardOptions | None = None
    """Watch what the formats cost while the run trains; none by default."""
    ramp: RampOptions | None = None
    """Compute high first; by default sites are low from the first step on."""
    keep_last: int = Field(default=0, ge=0)
    """So many of the last ``layers`` of the model stay high."""
    cpu: Literal["fp32", "bf16"] = "fp32"
    """What the rest of a run on a CPU computes in."""
    tf32: bool = False
    """As in ``bf16_islands``."""


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
    formats: Annotated[tuple[Literal["fp8_rowwise", "fp8_block", "fp8_square", "mxfp8", "mxfp4_mlp"], ...], Field(min_length=1)] = (
        "fp8_block",
        "mxfp8",
    )
    """Recipes whose formats are tried."""
    order: Literal["given", "time"] = "given"
    """``given``: the first of ``formats`` within the bound; ``time``: the fastest way on this device by the probe, the layer as it is among them."""
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
