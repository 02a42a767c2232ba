"""``[parallel.options.NAME]`` of the dense strategies."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from gem_parallel.comm.backends import BackendName, PayloadName


class ExpertOptions(BaseModel):
    """Options of ``experts``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    degree: int = Field(ge=1, strict=True)
    """Neighbouring ranks that share out the experts of an ensemble; the number of ranks and that of the experts are multiples of it."""


class FsdpOptions(BaseModel):
    """Options of ``fsdp``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    replicas: int = Field(default=1, ge=1, strict=True)
    """Copies of the weights; the number of ranks is a multiple of it. 1 shards over all ranks."""
    reshard: bool = True
    """Drop a block's weights after its forward and gather them again for backward."""
    keep: tuple[str, ...] = ()
    """Blocks that keep their weights although ``reshard`` is on, by name; ``*`` and ``?`` as in a shell."""
    prefetch: int = Field(default=1, ge=0, strict=True)
    """Blocks gathered ahead of the one that computes in forward, in the model's order. Backward it is always one, in the reverse order."""
    payload: PayloadName = "fp32"
    """Format of weights between ranks: ``bf16``, or ``fp8`` with a scale for each 128 values. Blocks compute with the rounded weights, in float32."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format in which gradients are summed between ranks."""
    reduce: Literal["last", "each"] = "last"
    """With ``replicas`` and ``optim.accumulate``: sum over the replicas once, after the last micro-batch, or after each. Only ``each`` is possible
    where the model leaves parameters without gradients in some micro-batches."""
    comm: BackendName = "default"
    """What carries the weights: ``default`` (NCCL or gloo), ``low_cta`` (NCCL in few blocks), ``copy_engine`` (no SMs)."""
    reserved_sms: int | None = Field(default=None, ge=0, strict=True)
    """SMs that persistent kernels leave free for collectives (``GEM_RESERVED_SMS``); None leaves the environment as it is."""
    multicast: bool = False
    """Let NCCL use NVLink multicast. Where it goes wrong it can take the GPUs of a host out of service."""
