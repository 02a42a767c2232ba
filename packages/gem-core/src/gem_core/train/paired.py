"""What comes of a paired step: its sums over all ranks go to the precision recipe, and the recipe's news to the log, the manifest and the person."""

from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from gem_core.spec import PairedSums
from gem_core.train import folder
from gem_core.train.composed import Run


def heed(run: Run, pairs: Tensor) -> str | None:
    """Add a pair up over the ranks and let the recipe judge it; return why the run has to end, or None. Collective.

    Args:
        pairs: ``StepResult.pairs`` of the step that was just taken.
    """
    changing, world, step = run.learner.changing, run.world, run.progress.step
    assert changing is not None
    own = torch.tensor(changing.sums(), dtype=torch.float64)
    whole = world.all_gather(torch.cat([pairs.flatten(), own])).sum(0)
    both, sums = whole[: pairs.numel()].view_as(pairs), whole[pairs.numel() :]
    by_task = {task.name: paired_sums(*both[:, i].tolist()) for i, task in enumerate(run.schema.tasks)}
    news = changing.observe(step, by_task, sums.tolist(), run.folder if world.leads else None)
    run.log.event("precision", step, **news.record)
    if news.say is not None:
        run.log.say(f"step {step}  {news.say}")
        run.decisions = changing.decisions()
        run.manifest["precision"] = [asdict(decision) for decision in run.decisions]
        run.manifest["precision_events"].append({"step": step, **news.record, "say": news.say})
        if world.leads:
            folder.write_json(run.folder / folder.MANIFEST, run.manifest)
    return news.stop


def paired_sums(high: Sequence[float], low: Sequence[float]) -> PairedSums:
    """The pair of two rows of ``stream_sums``."""
    return PairedSums(weight=low[0], positive=low[1], predicted=(high[2], low[2]), loss=(high[3], low[3]))
