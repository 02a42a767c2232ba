"""From tokens to one logit for each task and row."""

import torch
from torch import Tensor, nn

from gem_core.batch import Batch
from gem_core.model.layers import Mlp, total
from gem_core.model.options import HeadOptions
from gem_core.spec.data import DataSchema
from gem_core.spec.errors import RequestError


class Heads(nn.Module):
    """A network for each task on a shared input, any number of tasks: ``[rows, width] -> {task: [rows]}``.

    With ``domain`` the last layer of each task has an output for every value of an id feature, and a row takes that of its own value.
    Logits are float32 at least, whatever the compute dtype.
    """

    def __init__(self, schema: DataSchema, width: int, options: HeadOptions) -> None:
        super().__init__()
        self.tasks = tuple(task.name for task in schema.tasks)
        self.domain = options.domain
        self.norm = nn.LayerNorm(width)
        self.shared: Mlp | None = None
        if options.shared:
            *hidden, last = options.shared
            self.shared, width = Mlp(width, hidden, last, options.dropout), last
            self.shared.extend([nn.GELU(), nn.Dropout(options.dropout)])
        self.networks = nn.ModuleList(Mlp(width, options.hidden, domains(schema, options), options.dropout) for _ in self.tasks)

    def forward(self, x: Tensor, batch: Batch, first_order: Tensor | None = None) -> dict[str, Tensor]:
        """Args:
        x: ``[rows, width]``.
        batch: the batch that ``x`` was made of.
        first_order: ``[rows, tasks]``, added to the logits.
        """
        x = self.norm(x)
        if self.shared is not None:
            x = self.shared(x)
        pick = None if self.domain is None else batch.ids[self.domain].values[:, None]
        logits = {}
        for i, (task, network) in enumerate(zip(self.tasks, self.networks)):
            out = network(x)
            logit = (out if pick is None else out.gather(1, pick))[:, 0]
            logit = logit.to(torch.promote_types(logit.dtype, torch.float32))
            logits[task] = logit if first_order is None else logit + first_order[:, i]
        return logits

    def flops(self, rows: int) -> int:
        networks = [m for m in (self.shared, *self.networks) if isinstance(m, Mlp)]
        return total(network.flops(rows) for network in networks)


def domains(schema: DataSchema, options: HeadOptions) -> int:
    """Number of outputs of each task: the cardinality of the domain feature, 1 without one."""
    if options.domain is None:
        return 1
    known = {feature.name: feature for feature in schema.ids if not feature.multi}
    if options.domain not in known:
        raise RequestError(f"head.domain = {options.domain!r}", f"the single id features are {sorted(known)}", "Name one of them.")
    return known[options.domain].cardinality
