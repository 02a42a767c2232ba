"""How configured strategies lay out the dense part, and the work, traffic and memory of its blocks in that layout."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from gem_core.spec import BlockFacts, ModelFacts, RequestError, Topology
from gem_parallel.mesh import Layout, layout_of, nearest_degrees

WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
"""Bytes of a number."""
REST = "rest"
"""Name of what stands in no block, in ``ModelFacts``."""
MASTER, GRADIENT, ADAM = 4, 4, 8
"""Bytes of a parameter: its float32 weight, its gradient, AdamW's two moments."""
TOUCHED = 28
"""Bytes that AdamW reads and writes of a parameter: weight, gradient and moments in, weight and moments out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dense:
    """The dense part's side of a layout.

    Args:
        layout: degrees of all axes.
        sharded: whether ``fsdp`` shards the weights; otherwise ``ddp`` copies them, those of experts apart.
        reshard: whether weights are dropped after forward and gathered again for backward.
        keep: patterns of names of blocks that keep theirs all the same.
        wire: bytes of a weight in an all-gather.
        reduced: bytes of a gradient in a reduce-scatter or all-reduce.
        acts: bytes of an activation between experts.
        last: whether gradients are summed over the replicas of shards in the last micro-batch of a step alone.
    """

    layout: Layout
    sharded: bool
    reshard: bool
    keep: tuple[str, ...]
    wire: int
    reduced: int
    acts: int
    last: bool

    def dropped(self, block: BlockFacts) -> bool:
        """Whether a block's weights are gathered again for backward; those outside blocks are needed at both ends of a step and stay."""
        return self.reshard and block.name != REST and not any(fnmatchcase(block.name, pattern) for pattern in self.keep)

    def ordinary_shards(self) -> int:
        """Over how many ranks weights are spread that belong to no expert."""
        return self.layout.shard * self.layout.expert if self.sharded else 1

    def kept(self, block: BlockFacts) -> float:
        """Parameters of a block that a rank keeps."""
        return sum(self._parts(block))

    def _parts(self, block: BlockFacts) -> tuple[float, float]:
        """Of these, the ones outside of experts that are shared out, and those in them."""
        if self.layout.expert == 1:
            return block.parameters / self.ordinary_shards(), 0.0
        experts = block.expert_parameters / self.layout.expert / (self.layout.shard if self.sharded else 1)
        return (block.parameters - block.expert_parameters) / self.ordinary_shards(), experts

    def averaged(self, block: BlockFacts, *, last: bool) -> tuple[float, float]:
        """Those whose gradients are summed over replicas in a micro-batch, the last of a step or another: outside of experts, and in them.

        ``ddp`` waits for the last. ``fsdp`` waits where it scatters; a group of one shard sums in each micro-batch, and so do ``ddp``'s experts.
        """
        ordinary, experts = self._parts(block)
        if last or (self.sharded and not self.last):
            return ordinary, experts
        if not self.sharded:
            return 0.0, experts
        return (0.0 if self.ordinary_shards() > 1 else ordinary), (0.0 if self.layout.shard > 1 else experts)

    def whole(self, block: BlockFacts) -> float:
        """Parameters of a block that a rank has while it computes."""
        return block.parameters - block.expert_parameters + block.expert_parameters / self.layout.expert


def configured(topology: Topology, strategies: Mapping[str, Mapping[str, Any]], model: ModelFacts, table_replicas: int) -> Dense:
    """The layout that the configured strategies ask for.

    Raises:
        RequestError: degrees that cannot be, with the nearest that can.
    """
    fsdp, degree = strategies.get("fsdp"), int(strategies.get("experts", {}).get("degree", 1))
    check_experts(model, degree)
    asked = "strategy 'ddp'" if fsdp is None else "strategy 'fsdp'"
    replicas = 1 if fsdp is None else int(fsdp.get("replicas", 1))
    layout = layout_of(topology.world, replicate=replicas, expert=degree, sparse_replicate=table_replicas, asked=asked, topology=topology)
    if fsdp is None:
        layout = replace(layout, replicate=layout.shard, shard=1)
    return dense_in(layout, model, fsdp)


def dense_in(layout: Layout, model: ModelFacts, fsdp: Mapping[str, Any] | None) -> Dense:
    """The dense part in a layout; ``fsdp`` holds that strategy's options, None stands for ``ddp``."""
    options = fsdp or {}
    return Dense(
        layout=layout,
        sharded=fsdp is not None,
        reshard=bool(options.get("reshard", True)),
        keep=tuple(options.get("keep", ())),
        wire=WIDTHS[options.get("payload", "fp32")],
        reduced=WIDTHS[options.get("reduce_dtype", "fp32")],
        acts=WIDTHS.get(model.dtype, 4),
        last=options.get("reduce", "last") == "last",
    )


def check_experts(model: ModelFacts, degree: int) -> None:
    """Raise RequestError unless every block with experts can deal them out to ``degree`` ranks, and there is such a block."""
    counts = sorted({block.experts for block in model.blocks if block.experts})
    if degree > 1 and not counts:
        raise RequestError(f"an expert degree of {degree}", "no block of the model has interaction experts", "Choose degree 1.")
    for count in counts:
        if count % degree:
            raise RequestError(f"an expert degree of {degree}", f"blocks have {count} experts", nearest_degrees(degree, count))


def memory_of(dense: Dense, model: ModelFacts, rows: float) -> dict[str, float]:
    """Bytes of a rank by what they are for, tables not included.

    Weights, gradients and AdamW's moments are exact. ``gathered`` is the weights that are whole at once: those that stay, the block at work and the
    one that is gathered behind it, with the gradients of a block before they are scattered. Activations are ``rows`` times what was measured.
    """
    kept = sum(dense.kept(block) for block in model.blocks)
    memory = {"weights": MASTER * kept, "gradients": GRADIENT * kept, "optimiser": ADAM * kept}
    if dense.sharded and dense.layout.shard * dense.layout.expert > 1:
        stay = sum(dense.whole(block) for block in model.blocks if not dense.dropped(block))
        wholes = sorted((dense.whole(block) for block in model.blocks if dense.dropped(block)), reverse=True)
        memory["gathered"] = MASTER * (stay + sum(wholes[:2])) + GRADIENT * max(dense.whole(block) for block in model.blocks)
    memory["activations"] = rows * sum(block.saved for block in model.blocks)
    if dense.layout.expert > 1:
        memory["joined batches"] = rows * dense.layout.expert * dense.acts * max(sum(block.expert_numbers) for block in model.blocks)
    return memory
