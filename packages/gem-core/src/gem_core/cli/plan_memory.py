"""``gem plan --memory``: what the blocks of the model hold for backward by the plan of the configured strategy, beside what a real step holds."""

from dataclasses import asdict

from torch import Tensor

from gem_core.cli.output import print_json, print_table
from gem_core.cli.sizes import size
from gem_core.config.load import LoadedConfig
from gem_core.spec import BlockMemory, MemoryReport, ReportsMemory, RequestError, Shard
from gem_core.train.compose import compose
from gem_core.train.composed import Run
from gem_core.train.labels import weight_sums
from gem_core.train.step import batch_loss, forward


def plan_memory(loaded: LoadedConfig, *, json: bool) -> None:
    """Compose the run on this machine, take a few steps' forward and backward on its first batch, and print the report. Nothing is written.

    Raises:
        RequestError: no configured strategy plans memory, or the budget cannot be met.
    """
    run = compose(loaded, training=False)
    try:
        report = report_of(run)
        if not run.world.leads:
            return
        if json:
            print_json({**asdict(report), "device": str(run.world.device)})
        else:
            print_report(report, str(run.world.device))
    finally:
        run.close()


def report_of(run: Run) -> MemoryReport:
    """The report of the strategy that can give one, on the first training batch."""
    strategy = next((strategy for _, _, strategy in run.strategies if isinstance(strategy, ReportsMemory)), None)
    if strategy is None:
        so = f"none of the strategies {list(run.config.parallel.strategies)} does"
        raise RequestError("planning memory", so, 'Add one, for example --set \'parallel.strategies=["single", "activations"]\'.')
    config, world = run.config, run.world
    batches = run.source.batches("train", batch_size=config.data.batch_size, shard=Shard(rank=world.rank, world=world.size), seed=config.run.seed)
    host = next(batches)
    tasks = run.schema.tasks
    weights, batch = weight_sums(host, tasks), host.to(world.device)

    def loss() -> Tensor:
        with run.precision.forward_context(world.device.type):
            return batch_loss(forward(run.dense, run.embeddings, batch, tasks), batch, tasks, weights)[0]

    return strategy.memory_report(run.dense, loss)


def print_report(report: MemoryReport, device: str) -> None:
    """One line a block, then the sums."""
    whole = BlockMemory(
        name="all blocks",
        saved=sum(b.saved for b in report.blocks),
        seconds=sum(b.seconds for b in report.blocks),
        policy="",
        held=sum(b.held for b in report.blocks),
        extra=sum(b.extra for b in report.blocks),
        measured=sum(b.measured or 0 for b in report.blocks),
    )
    rows = [
        (b.name, size(b.saved), _ms(b.seconds), b.policy, size(b.held), "-" if b.measured is None else size(b.measured), _ms(b.extra))
        for b in (*report.blocks, whole)
    ]
    budget = "no budget" if report.budget is None else f"a budget of {size(report.budget)}"
    print(f"activations of a rank on {device}, first training batch, {budget}\n")
    print_table(("BLOCK", "SAVED", "FORWARD", "POLICY", "HELD", "MEASURED", "EXTRA TIME"), rows)
    print(f"\noutside of all blocks {size(report.rest)} were alive after a forward pass")
    peak = "not on a CPU" if report.measured_peak is None else f"{size(report.measured_peak)} with all else that a step allocates"
    print(f"most at once: {size(report.peak)} in the blocks by the plan; measured {peak}")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
