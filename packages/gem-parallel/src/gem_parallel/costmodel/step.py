"""One training step, rank by rank, in the order in which the trainer and torch's ``fully_shard`` do things.

1. Look up: the rank that looks up and sends the most decides how long all wait. Ids go beside the step before, if the trainer is one batch ahead.
2. Forward, block by block: a block's weights are gathered while the block before it computes. Experts gather the rows of their group and give back
   what they made of them; both are waited for.
3. Backward, in reverse: weights again, if they were dropped; gradients are scattered behind the next block's backward, then summed over replicas.
4. Gradients of tables travel after backward; the optimiser updates; shards for the next look-up are gathered beside it.

A step of several micro-batches does 1 to 3 for each, and sums over replicas in the last where the strategy waits for it. It ends when the last rank
is done. On a CPU collectives take the cores that compute, and none hides behind computing: each is waited for where it is issued.
"""

import math
from dataclasses import dataclass

import numpy as np

from gem_core.spec import BatchFacts, BlockFacts, EmbeddingPlan, ModelFacts, RequestError, Topology
from gem_parallel.costmodel.assumed import Assumed
from gem_parallel.costmodel.clock import Clocks, Running, Times
from gem_parallel.costmodel.collectives import Group, Links, gathered_bytes, group_along
from gem_parallel.costmodel.dense import MASTER, TOUCHED, Dense
from gem_parallel.costmodel.sparse import Phase, moves
from gem_parallel.mesh import Part

FORWARD, BACKWARD = 1, 2
"""Model FLOPs of a direction, in forwards."""
ACTIVATION_PASSES = {FORWARD: 2, BACKWARD: 3}
"""How often the saved activations cross the memory bus: written and read by the next op; read, and their gradients written and read."""
ROW_PASSES = 6
"""How often a looked-up row crosses it: read, written out and read by the model; its gradient written, the row and its state read and written."""
SEED = 1
GATHER = "weights: gather"
BUCKET = 25 * 1024**2
"""Bytes of gradients that DistributedDataParallel averages together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A simulated step: seconds, where they went (means over ranks), seconds and bytes sent by collective, and the seconds of the dense compute."""

    seconds: float
    parts: dict[str, float]
    carried: dict[str, float]
    sent: dict[str, float]
    compute: float


def rank_costs(layout_world: int, rows: float, row_cv: float, balance: float) -> Times:
    """Costs of the ranks' batches over their mean, ``[ranks]``: sums of rows, so nearly normal with a deviation of ``row_cv / sqrt(rows)``.

    The largest of ``R`` is about ``1 + row_cv / sqrt(rows) * sqrt(2 ln R)``. The draw is the same each time.
    """
    deviation = balance * row_cv / math.sqrt(max(rows, 1.0))
    drawn = 1 + deviation * np.random.default_rng(SEED).standard_normal(layout_world)
    costs: Times = np.maximum(drawn, 0.0)
    costs /= costs.mean()
    return costs


class Step:
    """Simulates a step of one layout.

    Args:
        topology: the machine.
        dense: the dense part's side of the layout.
        model: the dense part.
        batch: what a rank looks up.
        tables: the engine's plan for the layout.
        assumed: fractions of data-sheet figures, and the rest.
        micro_batches: of a step; ``batch`` is one of them.

    Raises:
        RequestError: the machine's links, peak or memory bandwidth are unknown.
    """

    def __init__(
        self,
        topology: Topology,
        dense: Dense,
        model: ModelFacts,
        batch: BatchFacts,
        tables: EmbeddingPlan,
        assumed: Assumed,
        micro_batches: int = 1,
    ) -> None:
        self._topology, self._dense, self._model, self._batch, self._tables = topology, dense, model, batch, tables
        self._micro_batches = micro_batches
        self._links = Links(topology, assumed)
        self._flops = self._known(topology.peak_flops.get(model.dtype), f"its peak FLOP/s in {model.dtype}") * assumed.matmul
        self._bytes = self._known(topology.memory_bandwidth, "its memory bandwidth") * assumed.memory
        self._assumed = assumed
        self._moves = moves(tables, dense.layout)
        self._sent: dict[str, float] = {}
        self._bucket = 0.0
        layout = dense.layout
        row_cv = model.row_cv if assumed.row_cv < 0 else assumed.row_cv
        self._own = rank_costs(layout.world, batch.rows, row_cv, assumed.balance)
        joined = self._own.reshape(layout.sizes("dense")).mean(axis=2, keepdims=True)
        self._joined = np.broadcast_to(joined, layout.sizes("dense")).reshape(-1)
        self._whole = self._group("dense", (1, 2))
        self._shards, self._experts, self._replicas = self._group("dense", (1,)), self._group("dense", (2,)), self._group("dense", (0,))

    def _known(self, figure: float | None, what: str) -> float:
        if figure is None:
            so = f"{what} is unknown ({self._topology.source})"
            raise RequestError("a cost model of this machine", so, "Name a machine: --machine h200, or a file that describes yours.")
        return figure

    def _group(self, part: Part, axes: tuple[int, ...]) -> Group:
        return group_along(self._topology, self._dense.layout, part, axes)

    def outcome(self) -> Outcome:
        """Simulate."""
        clocks = Clocks(self._dense.layout, blocking=self._topology.device == "cpu")
        for number in range(self._micro_batches):
            if number:  # the first finds what the step before has gathered
                clocks.wait_all(self._exchange(clocks, "gather"))
            ids = self._look_up(clocks)
            self._forward(clocks)
            reducing = self._backward(clocks, last=number + 1 == self._micro_batches)
            clocks.wait_all([*reducing, *ids])
        self._update(clocks)
        seconds = clocks.meet()
        compute = clocks.parts["forward"] + clocks.parts["backward"]
        return Outcome(seconds=seconds, parts=dict(clocks.parts), carried=dict(clocks.carried), sent=dict(self._sent), compute=compute)

    # ---- tables -------------------------------------------------------------------------------------------------------------------------

    def _exchange(self, clocks: Clocks, phase: Phase) -> list[Running]:
        """Start the exchanges of a phase."""
        started = []
        for move in (move for move in self._moves if move.phase == phase):
            group = self._group("sparse", move.axes)
            self._count(move.name, move.sent)
            if move.kind == "all_to_all":
                seconds = self._links.all_to_all(group, move.sent)
            else:
                times = 2 if move.kind == "all_reduce" else 1
                seconds = times * self._links.all_gather(group, move.sent / times / max(1, group.size - 1))
            started.append(clocks.start(move.name, "sparse", move.axes, seconds, tier=group.outermost()))
        return started

    def _look_up(self, clocks: Clocks) -> list[Running]:
        """Exchange vectors and look up; returns the ids of the next batch on their way."""
        if not self._assumed.pipelined:
            clocks.wait_all(self._exchange(clocks, "ask"))
        clocks.compute("look-ups", ROW_PASSES * 4 * self._looked_up() / self._bytes * self._table_costs())
        clocks.wait_all(self._exchange(clocks, "answer"))
        return self._exchange(clocks, "ask") if self._assumed.pipelined else []

    def _table_costs(self) -> Times:
        """What the ranks look up for others over the mean: as much as the vectors that they send, where the placement makes these uneven."""
        sent = np.asarray(self._tables.sent.get("vectors", ()), dtype=np.float64)
        return sent / sent.mean() if sent.any() else np.ones(self._dense.layout.world)

    def _looked_up(self) -> float:
        """Numbers of the rows that a rank looks up: as wide as its distinct rows are on average."""
        distinct = sum(self._batch.distinct.values())
        numbers = sum(self._batch.distinct[table.table] * table.dim for table in self._tables.tables)
        return sum(self._batch.ids.values()) * numbers / distinct if distinct else 0.0

    # ---- the dense part -----------------------------------------------------------------------------------------------------------------

    def _compute(self, clocks: Clocks, block: BlockFacts, direction: int, *, experts: bool) -> None:
        """One direction of a block: its matmuls at the speed of matmuls, its saved activations at that of the memory."""
        share = block.expert_flops / block.flops if block.flops else 0.0
        share = share if experts else 1.0 - share
        flops = direction * block.flops * self._batch.rows * share
        moved = ACTIVATION_PASSES[direction] * block.saved * self._batch.rows * share
        costs = self._joined if experts else self._own
        clocks.compute("forward" if direction == FORWARD else "backward", (flops / self._flops + moved / self._bytes) * costs)

    def _block(self, clocks: Clocks, block: BlockFacts, direction: int) -> None:
        """A block between its collectives of weights: what is before the experts, the exchange, the experts."""
        self._compute(clocks, block, direction, experts=False)
        if not block.experts:
            return
        inside, outside = block.expert_numbers if direction == FORWARD else block.expert_numbers[::-1]
        self._join(clocks, "experts: gather rows", inside)
        self._compute(clocks, block, direction, experts=True)
        self._join(clocks, "experts: give back", outside)

    def _join(self, clocks: Clocks, name: str, numbers: int) -> None:
        """Gather or give back rows in an expert group."""
        if self._experts.size > 1:
            part = self._batch.rows * numbers * self._dense.acts
            self._count(name, gathered_bytes(self._experts, part))
            seconds = self._links.all_gather(self._experts, part)
            clocks.wait(clocks.start(name, "dense", (2,), seconds, tier=self._experts.outermost()))

    def _count(self, name: str, sent: float) -> None:
        self._sent[name] = self._sent.get(name, 0.0) + sent

    def _weights(self, clocks: Clocks, name: str, block: BlockFacts, width: int) -> Running | None:
        """Gather a block's weights, or scatter its gradients: over shards and experts, those of experts over shards alone."""
        if not self._dense.sharded or self._whole.size == 1:
            return None
        ordinary = (block.parameters - block.expert_parameters) / self._whole.size * width
        experts = block.expert_parameters / self._dense.layout.expert / self._shards.size * width
        if self._dense.layout.expert == 1:
            ordinary, experts = ordinary + experts, 0.0
        if self._assumed.host:
            clocks.compute("host", self._assumed.host)
        self._count(name, gathered_bytes(self._whole, ordinary) + gathered_bytes(self._shards, experts))
        time = self._links.all_gather if name == GATHER else self._links.reduce_scatter
        seconds = time(self._whole, ordinary) + (time(self._shards, experts) if experts else 0.0)
        return clocks.start(name, "dense", (1, 2), seconds, tier=self._whole.outermost())

    def _copy(self, clocks: Clocks, numbers: float) -> None:
        """``fully_shard`` copies shards into the buffer that is gathered, what was gathered out of it, and gradients into the one that is scattered.
        Each number is read once and written once."""
        if self._dense.sharded and self._whole.size > 1:
            clocks.compute("copies", 2 * MASTER * numbers / self._bytes)

    def _copy_gathered(self, clocks: Clocks, block: BlockFacts) -> None:
        self._copy(clocks, self._dense.kept(block) + self._dense.whole(block))

    def _forward(self, clocks: Clocks) -> None:
        blocks = self._model.blocks
        gathering = self._weights(clocks, GATHER, blocks[0], self._dense.wire)
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            if gathering is not None:
                clocks.wait(gathering)
            gathering = None if following is None else self._weights(clocks, GATHER, following, self._dense.wire)
            self._copy_gathered(clocks, block)
            self._block(clocks, block, FORWARD)

    def _backward(self, clocks: Clocks, *, last: bool) -> list[Running]:
        """Returns the reductions under way."""
        order = list(reversed(self._model.blocks))
        again = [self._dense.dropped(block) for block in order]
        reducing: list[Running] = []
        gathering = self._weights(clocks, GATHER, order[0], self._dense.wire) if again[0] else None
        for i, block in enumerate(order):
            if gathering is not None:
                clocks.wait(gathering)
            more = i + 1 < len(order) and again[i + 1]
            gathering = self._weights(clocks, GATHER, order[i + 1], self._dense.wire) if more else None
            if again[i]:
                self._copy_gathered(clocks, block)
            self._block(clocks, block, BACKWARD)
            self._copy(clocks, self._dense.whole(block))
            reducing += self._reduce(clocks, block, last=last, ends=i + 1 == len(order))
        return reducing

    def _reduce(self, clocks: Clocks, block: BlockFacts, *, last: bool, ends: bool) -> list[Running]:
        ordinary, experts = (count * self._dense.reduced for count in self._dense.averaged(block, last=last))
        if not self._dense.sharded:
            return self._fill_bucket(clocks, ordinary, experts, ends=ends)
        scattering = self._weights(clocks, "gradients: scatter", block, self._dense.reduced)
        out = [] if scattering is None else [scattering]
        if self._replicas.size > 1 and ordinary + experts:
            out.append(self._all_reduce(clocks, (0,), self._replicas, ordinary + experts, scattering))
        return out

    def _fill_bucket(self, clocks: Clocks, ordinary: float, experts: float, *, ends: bool) -> list[Running]:
        """``ddp`` copies gradients into a bucket and averages it when it is full, and when backward ends; experts average theirs apart."""
        out = []
        if experts and self._replicas.size > 1:
            out.append(self._all_reduce(clocks, (0,), self._replicas, experts))
        if self._dense.layout.world > 1:
            clocks.compute("copies", 2 * ordinary / self._bytes)
            self._bucket += ordinary
        if self._bucket and (ends or self._bucket >= BUCKET):
            out.append(self._all_reduce(clocks, (0, 1, 2), self._group("dense", (0, 1, 2)), self._bucket))
            self._bucket = 0.0
        return out

    def _all_reduce(self, clocks: Clocks, axes: tuple[int, ...], group: Group, size: float, after: Running | None = None) -> Running:
        self._count("gradients: replicas", 2 * (group.size - 1) / group.size * size)
        return clocks.start("gradients: replicas", "dense", axes, self._links.all_reduce(group, size), tier=group.outermost(), after=after)

    def _update(self, clocks: Clocks) -> None:
        for _ in range(self._micro_batches):  # at most: engines that update once merge rows that several micro-batches looked up
            clocks.wait_all(self._exchange(clocks, "update"))
        shards = self._exchange(clocks, "gather")
        clocks.compute("optimiser", TOUCHED * sum(self._dense.kept(block) for block in self._model.blocks) / self._bytes)
        clocks.wait_all(shards)
