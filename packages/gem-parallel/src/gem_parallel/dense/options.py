"""``[parallel.options.NAME]`` of the dense strategies."""

from pydantic import BaseModel, ConfigDict, Field


class FsdpOptions(BaseModel):
    """Options of ``fsdp``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    replicas: int = Field(default=1, ge=1, strict=True)
    """Copies of the weights; the number of ranks is a multiple of it. 1 shards over all ranks."""
    reshard: bool = True
    """Drop a block's weights after its forward and gather them again for backward."""
