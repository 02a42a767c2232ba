"""``[precision.options]`` of the recipes."""

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
