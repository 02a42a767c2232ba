"""``[embedding.options]`` of the ``torchrec`` engine."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TorchRecOptions(BaseModel):
    """Options of the ``torchrec`` engine.

    ``sharding`` says how tables are spread over several ranks: ``table_wise`` puts each on one rank, ``row_wise`` gives every rank a range of rows,
    ``auto`` is table-wise except for tables that are larger than one rank's fair share. A single process has no use for it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sharding: Literal["auto", "table_wise", "row_wise"] = "auto"


class Sharded2DOptions(BaseModel):
    """Options of the ``sharded_2d`` engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    replicas: int = Field(default=1, ge=1, strict=True)
    """Neighbouring ranks that share one shard of every table; the number of ranks is a multiple of it. 1 is one-dimensional model parallelism."""
    prefetch: bool = True
    """Gather the next step's shards as soon as the tables are updated; costs the memory of a whole shard between steps."""
