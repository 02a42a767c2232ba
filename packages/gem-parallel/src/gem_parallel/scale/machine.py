"""A machine that was measured, as the cost model and ``gem plan`` take it. Imports no torch."""

from dataclasses import dataclass

from gem_core.spec import Tier, Topology

DTYPES = ("fp32", "bf16", "fp16", "fp64")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Figures of one device, and of the links between the ranks. The product's speed stands for every dtype: how far a model stays below it is
    calibrated apart.

    Args:
        world: ranks.
        flops: FLOP/s of a float32 matrix product.
        memory: bytes a second that a copy into new memory reads and writes.
        host: seconds of ``fully_shard``'s work on the host for a collective, beside the collective itself.
        latency: seconds of a hop of a small all-gather.
        bandwidth: bytes a second that a rank sends in a large one.
        scatter: time of a reduce-scatter over that of an all-gather of the same parts.
        reduce: time of an all-reduce over that of an all-gather of its parts.
    """

    world: int
    flops: float
    memory: float
    host: float
    latency: float
    bandwidth: float
    scatter: float
    reduce: float

    def topology(self) -> Topology:
        """For the cost model."""
        link = Tier(name="machine", size=self.world, bandwidth=self.bandwidth, latency=self.latency)
        peak = dict.fromkeys(DTYPES, self.flops)
        return Topology(world=self.world, device="cpu", tiers=(link,), source="measured", memory_bandwidth=self.memory, peak_flops=peak)

    def toml(self) -> str:
        """For ``gem plan --machine FILE``."""
        peak = ", ".join(f"{dtype} = {self.flops!r}" for dtype in DTYPES)
        tier = f'name = "machine"\nsize = {self.world}\nbandwidth = {self.bandwidth!r}\nlatency = {self.latency!r}'
        return f'device = "cpu"\nmemory_bandwidth = {self.memory!r}\npeak_flops = {{ {peak} }}\n\n[[tiers]]\n{tier}\n'

    def assumed(self) -> dict[str, float]:
        """The cost model's figures that were measured with it: nothing is lost of what was reached."""
        return {"memory": 1.0, "links": 1.0, "scatter": self.scatter, "reduce": self.reduce, "launch": 0.0, "host": self.host}
