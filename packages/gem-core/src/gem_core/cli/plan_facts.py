"""What a cost model knows of a model: parameters, exact FLOPs and saved activations by block, from the shapes of one forward pass of a few rows."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gem_core.batch import Batch, Jagged
from gem_core.bench.flops import layer_flops
from gem_core.cli.plan_fused import bind_fused
from gem_core.cli.plan_shapes import ShapesOnly
from gem_core.config.load import LoadedConfig
from gem_core.model.experts import Ensemble
from gem_core.ops.slot import bind_kernels
from gem_core.plugins.manager import host
from gem_core.select.policy import policy_scope
from gem_core.spec import BlockFacts, ModelFacts, Source, TableSpec

MEASURED_ROWS = 256
REST = "rest"
WIDTHS = {"fp32": 4, "fp64": 8, "bf16": 2, "fp16": 2}


def model_facts(loaded: LoadedConfig, source: Source, tables: Sequence[TableSpec], device: str) -> ModelFacts:
    """Facts of the configured model on some of its training rows, for a run on ``device`` devices (``cpu`` or ``cuda``).

    Saved activations are what is left for backward, in the width of the compute dtype, added up from shapes: no weight is held and no product
    computed. On ``cuda`` ops leave what fused kernels do, unless a backend is named for them.

    Raises:
        RequestError: the model's forward pass needs more than shapes, or its layers count more FLOPs than the model.
    """
    config = loaded.config
    precision = host().build("precision_recipes", config.precision.recipe, config.precision.options)
    with torch.device("meta"):
        shapes = _built(loaded, source)
    precision.prepare(shapes, device)
    dtype = precision.compute_dtype()
    batch = few_rows(source, config.run.seed)
    with policy_scope(replace(loaded.kernel_policy(), on_reference="allow")), ShapesOnly("a step of this model"):
        model = _built(loaded, source)
        blocks = blocks_of(model)
        choices = bind_kernels(model, device="cpu", dtype="fp32", arch=None, backward=True)
        if device == "cuda":
            bind_fused(model, choices)
        saved = saved_bytes(model, blocks, batch, looked_up(tables, batch), WIDTHS.get(dtype, 4))
    flops = flops_of(model, blocks, batch)
    facts = [_facts(name, block, model, blocks, flops, saved, batch.rows) for name, block in {REST: model, **blocks}.items()]
    return ModelFacts(blocks=tuple(facts), dtype=dtype, row_cv=variation(model, batch))


def _built(loaded: LoadedConfig, source: Source) -> Any:
    return host().build("models", loaded.config.model.name, loaded.config.model.options, source.schema())


def few_rows(source: Source, seed: int) -> Batch:
    """Some rows of the training split: a small first batch."""
    found: Batch = next(iter(source.batches("train", batch_size=MEASURED_ROWS, seed=seed)))
    return found


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The entries of the lists of modules directly under the model that have parameters: what is sharded and gathered one at a time."""
    lists = [(name, child) for name, child in model.named_children() if isinstance(child, nn.ModuleList)]
    entries = {f"{name}.{index}": block for name, child in lists for index, block in enumerate(child)}
    return {name: block for name, block in entries.items() if any(True for _ in block.parameters())}


def flops_of(model: nn.Module, blocks: dict[str, nn.Module], batch: Batch) -> Counter[str]:
    """Forward model FLOPs by block, experts apart under ``NAME/experts``; what is not counted by layer within a block is in ``rest``."""
    counted: Counter[str] = Counter()
    for layer in layer_flops(model, batch):
        counted[next((name for name in blocks if f"{layer.name}.".startswith(f"{name}.")), REST)] += layer.forward
    for name, block in blocks.items():
        counted[f"{name}/experts"] = sum(expert.flops(batch.rows) for part in ensembles_of(block) for expert in part.experts)
    return counted


def looked_up(tables: Sequence[TableSpec], batch: Batch) -> dict[str, Tensor]:
    """Vectors as an engine would give them, zeros."""
    out = {}
    for table in tables:
        for key in table.features:
            rows = batch.ids.ids(key).numel() if table.pooling == "none" else batch.rows
            out[key] = torch.zeros(rows, table.dim, requires_grad=True)
    return out


def saved_bytes(model: nn.Module, blocks: dict[str, nn.Module], batch: Batch, embedded: dict[str, Tensor], width: int) -> Counter[str]:
    """Bytes that a forward pass leaves for backward, by block: every storage once, parameters not, floating-point numbers ``width`` bytes wide."""
    saved: Counter[str] = Counter()
    seen = {_identity(parameter) for parameter in model.parameters()}
    kept, inside = [], [REST]

    def pack(tensor: Tensor) -> Tensor:
        if _identity(tensor) not in seen:
            seen.add(_identity(tensor))
            kept.append(tensor)  # while it is kept no other storage can have its identity
            numbers = tensor.untyped_storage().nbytes() // tensor.element_size()
            saved[inside[-1]] += numbers * (width if tensor.is_floating_point() else tensor.element_size())
        return tensor

    handles = []
    for name, block in blocks.items():
        handles.append(block.register_forward_pre_hook(lambda module, args, name=name: inside.append(name)))
        handles.append(block.register_forward_hook(lambda module, args, output: inside.pop() and None))
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(batch, embedded)
    finally:
        for handle in handles:
            handle.remove()
    return saved


def _identity(tensor: Tensor) -> int:
    """Of its storage; ``data_ptr`` is 0 for all that hold no numbers."""
    return int(tensor.untyped_storage()._cdata)


def ensembles_of(block: nn.Module) -> list[Any]:
    """Interaction ensembles within a block."""
    return [module for module in block.modules() if isinstance(module, Ensemble)]


def _facts(
    name: str, block: nn.Module, model: nn.Module, blocks: dict[str, nn.Module], flops: Counter[str], saved: Counter[str], rows: int
) -> BlockFacts:
    parameters = sum(p.numel() for p in block.parameters())
    if name == REST:
        inside = sum(p.numel() for part in blocks.values() for p in part.parameters())
        return BlockFacts(name=name, parameters=parameters - inside, flops=flops[name] / rows, saved=saved[name] / rows)
    ensembles = ensembles_of(block)
    return BlockFacts(
        name=name,
        parameters=parameters,
        flops=flops[name] / rows,
        saved=saved[name] / rows,
        experts=math.gcd(*(len(part.experts) for part in ensembles)),
        expert_parameters=sum(p.numel() for part in ensembles for p in part.experts.parameters()),
        expert_flops=flops[f"{name}/experts"] / rows,
        expert_numbers=(sum(_enter(part) for part in ensembles), sum(_leave(part) for part in ensembles)),
    )


def _enter(ensemble: Any) -> int:
    tokens = [expert.tokens_in for expert in ensemble.experts]
    return int(ensemble.dim * (sum(tokens) if ensemble.partition else max(tokens)))


def _leave(ensemble: Any) -> int:
    tokens = [expert.tokens_out for expert in ensemble.experts]
    return int(ensemble.dim * (sum(tokens) if ensemble.join == "concat" else max(tokens)))


def variation(model: Any, batch: Batch) -> float:
    """Standard deviation over mean of the rows' forward FLOPs."""
    costs = torch.tensor([float(model.flops(_one_row(batch, row))) for row in range(batch.rows)], dtype=torch.float64)
    return float(costs.std(correction=0) / costs.mean()) if costs.numel() and float(costs.mean()) else 0.0


def _one_row(batch: Batch, row: int) -> Batch:
    """As much of one row as its FLOPs are counted from: how long its histories are."""
    offsets = {}
    for group, jagged in batch.event_offsets.items():
        length = int(jagged.offsets[row + 1] - jagged.offsets[row])
        offsets[group] = Jagged(jagged.values, torch.tensor([0, length]), length)
    return replace(batch, rows=1, event_offsets=offsets)
