"""``[parallel.options.activations]``."""

from typing import Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

Policy = Literal["keep", "recompute", "offload", "fp8"]
POLICIES: tuple[Policy, ...] = get_args(Policy)


class BlockRule(BaseModel):
    """An entry of ``policies``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pattern: str = Field(min_length=1)
    """Blocks by name; ``*`` and ``?`` as in a shell. The first rule that matches counts."""
    policy: Policy


class ActivationOptions(BaseModel):
    """Options of ``activations``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    budget: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """GB that the blocks of a rank may hold for backward. The first training batch is measured, and the blocks share the budget at least cost."""
    blocks: tuple[str, ...] = ()
    """Modules that decide on their own, by name; of nested ones the outermost. None are the entries of the lists of modules under the model."""
    policies: tuple[BlockRule, ...] = ()
    """What blocks do, whatever it costs; with a budget the other blocks are planned, without one they keep."""
    allow: tuple[Policy, ...] = ("recompute", "offload")
    """What a plan may choose beside keeping. ``fp8`` changes gradients, so it is not among them by default."""

    compiled_budget: float | None = Field(default=None, ge=0, le=1)
    """What compiled graphs save, as a share of what they would: torch's activation-memory budget. They compute the rest again, cheapest first."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.budget is None and not self.policies and self.compiled_budget is None:
            raise ValueError("give a budget in GB, policies by block, or a budget of compiled graphs")
        return self
