"""``[embedding.options]`` of the engines."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Sharding = Literal["auto", "planner", "data_parallel", "table_wise", "row_wise", "column_wise", "table_row_wise", "grid"]
Layout = Literal["data_parallel", "table_wise", "row_wise", "column_wise", "table_row_wise", "grid"]
Memory = Literal["device", "uvm", "uvm_cached"]
Wire = Literal["fp32", "fp16", "bf16"]


class TableRule(BaseModel):
    """What holds for the tables whose name matches ``pattern`` (``*`` and ``?`` as in a shell); the first rule that matches a table counts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pattern: str = Field(min_length=1)
    sharding: Layout | None = None
    """How these tables are spread over ranks; None leaves it to the engine's ``sharding``."""
    memory: Memory | None = None
    """Where their rows lie; None leaves it to the engine's ``memory``."""


class TorchRecOptions(BaseModel):
    """Options of the ``torchrec`` engine. What spreads tables over ranks has no use in a single process."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sharding: Sharding = "auto"
    """``auto`` is table-wise except for tables larger than one rank's fair share, which are spread by rows; ``planner`` leaves it to
    torchrec's planner, whose choice a run takes from a plan file."""
    tables: tuple[TableRule, ...] = ()
    """Exceptions by table name."""
    plan: str | None = Field(default=None, min_length=1)
    """A plan file (``gem plan --write``) that places every table; used instead of ``sharding`` and ``tables``."""
    replicas: int = Field(default=1, ge=1, strict=True)
    """Copies of all tables, each spread over ``ranks / replicas`` ranks and averaged after every update. Neighbouring ranks hold the same rows."""
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Format of the stored rows; look-ups, sums and optimiser state are float32 in any case. fbgemm has no ``bf16`` up to 1.8."""
    memory: Memory = "device"
    """``uvm`` keeps rows in host memory that the GPU reads, ``uvm_cached`` with a cache on the GPU."""
    forward_comm: Wire = "fp32"
    """Format in which looked-up vectors travel between ranks."""
    backward_comm: Wire = "fp32"
    """Format in which their gradients travel between ranks."""


class Sharded2DOptions(BaseModel):
    """Options of the ``sharded_2d`` engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    replicas: int = Field(default=1, ge=1, strict=True)
    """Neighbouring ranks that share one shard of every table; the number of ranks is a multiple of it. 1 is one-dimensional model parallelism."""
    prefetch: bool = True
    """Gather the next step's shards as soon as the tables are updated; costs the memory of a whole shard between steps."""
