"""A strategy that exchanges rows between pairs of ranks, with a slow rank or a slow link on request. Gradients are not averaged."""

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import Tensor, nn

from gem_core.builtin.recorder import Recorder
from gem_core.spec import ParallelContext

NUMBERS = 1024


class ExchangeOptions(BaseModel):
    slow_rank: int = -1
    """Sleeps in its forward pass."""
    slow_link: int = -1
    """Sleeps inside its calls of ``rows``."""
    seconds: float = 0.15
    link_seconds: float = 0.15


class Exchange:
    """In every forward pass for training: ``rows`` between neighbours (0 and 1, 2 and 3), then ``columns`` between 0 and 2, 1 and 3."""

    def __init__(self, **options: Any) -> None:
        self.options = ExchangeOptions(**options)
        self.recorder = Recorder()

    def apply(self, module: Any, context: ParallelContext) -> Any:
        made = {name: [dist.new_group(ranks) for ranks in groups] for name, groups in (("rows", ((0, 1), (2, 3))), ("columns", ((0, 2), (1, 3))))}
        rank = context.rank
        groups = {"rows": made["rows"][rank // 2], "columns": made["columns"][rank % 2]}

        def before(module: nn.Module, inputs: Any) -> None:
            if not torch.is_grad_enabled():
                return
            if rank == self.options.slow_rank:
                time.sleep(self.options.seconds)
            for name, group in groups.items():
                self.exchange(name, group, torch.zeros(NUMBERS), slow=rank == self.options.slow_link and name == "rows")

        module.register_forward_pre_hook(before)
        return module

    def exchange(self, name: str, group: dist.ProcessGroup, values: Tensor, *, slow: bool) -> None:
        with self.recorder.recorded(name, "all_reduce", values.nbytes, name, 2, values.device):
            if slow:
                time.sleep(self.options.link_seconds)
            dist.all_reduce(values, group=group)

    def describe(self) -> Mapping[str, Any]:
        return {"strategy": "fake exchange"}
