"""Tables spread over ranks by torchrec."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gem_core.batch import KeyedJagged
from gem_core.spec import SparseOptimizer, TableSpec
from gem_parallel.sparse.native import load_fbgemm, load_torchrec, quiet_logging
from gem_parallel.sparse.shards import slices_of, tbe_options


class ShardedGroup:
    """Tables in one torchrec collection: pooled ones with a home rank, or ones looked up id by id.

    Tables spread by rows are always looked up id by id and pooled here, on the asking rank: torchrec's row-wise bags fail on gloo as soon as the
    ranks have different numbers of rows.
    """

    def __init__(
        self, tables: Sequence[TableSpec], places: Mapping[str, int | None], optimizer: SparseOptimizer, device: torch.device, *, bags: bool
    ) -> None:
        self.keys = tuple(feature for table in tables for feature in table.features)
        self._bags = bags
        self._pool_here = {feature: table.pooling for table in tables for feature in table.features if not bags and table.pooling != "none"}
        names = {f"t{i}": table for i, table in enumerate(tables)}  # torchrec takes module names, which hold no dots
        with quiet_logging():
            self.module = _shard(names, {name: places[table.name] for name, table in names.items()}, optimizer, device, bags=bags)
        self.tbes, self.slices = [], []
        for kernel in _kernels(self.module):
            self.tbes.append(kernel.emb_module)
            held = [(names[config.name].name, config.local_metadata.shard_offsets[0]) for config in kernel.config.embedding_tables]
            self.slices += slices_of(kernel.emb_module, held, optimizer)

    def __call__(self, features: KeyedJagged) -> Any:
        """Start the look-up; ``finish`` waits for it. Several groups can be under way at once."""
        columns = features if features.keys == self.keys else features.select(self.keys)
        return columns, self.module(_keyed_jagged_tensor(columns))

    def finish(self, columns: KeyedJagged, awaitable: Any) -> dict[str, Tensor]:
        found = awaitable.wait()
        if self._bags:
            return {key: vectors[: columns.rows] for key, vectors in found.to_dict().items()}
        out = {key: found[key].values() for key in self.keys}
        for key, pooling in self._pool_here.items():
            out[key] = pool(out[key], columns[key].offsets, pooling)
        return out


def sharded_groups(
    tables: Sequence[TableSpec], places: Mapping[str, int | None], optimizer: SparseOptimizer, device: torch.device
) -> list[ShardedGroup]:
    """Pooled tables with a home rank in one group; the others by width, which torchrec's unpooled collection demands."""
    load_fbgemm(device.type)
    load_torchrec(device.type)
    groups: dict[int, list[TableSpec]] = {}
    for table in tables:
        bag = table.pooling != "none" and places[table.name] is not None
        groups.setdefault(0 if bag else table.dim, []).append(table)
    return [ShardedGroup(group, places, optimizer, device, bags=key == 0) for key, group in groups.items()]


def pool(vectors: Tensor, offsets: Tensor, pooling: str) -> Tensor:
    """Sum or mean of each bag: ``[ids, dim]`` and ``[rows + 1]`` to ``[rows, dim]``; zeros for an empty bag."""
    lengths = offsets.diff()
    bags = torch.repeat_interleave(torch.arange(lengths.numel(), device=vectors.device), lengths, output_size=vectors.shape[0])
    total = vectors.new_zeros(lengths.numel(), vectors.shape[1]).index_add(0, bags, vectors)
    return total / lengths.clamp(min=1)[:, None] if pooling == "mean" else total


def _shard(tables: Mapping[str, TableSpec], places: Mapping[str, int | None], optimizer: SparseOptimizer, device: torch.device, *, bags: bool) -> Any:
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingEnv
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

    meta = torch.device("meta")
    common = [
        {"name": name, "embedding_dim": table.dim, "num_embeddings": table.rows, "feature_names": list(table.features)}
        for name, table in tables.items()
    ]
    if bags:
        poolings = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}
        configs = [EmbeddingBagConfig(pooling=poolings[table.pooling], **words) for words, table in zip(common, tables.values())]
        module, sharder_type = EmbeddingBagCollection(tables=configs, device=meta), EmbeddingBagCollectionSharder
    else:
        module, sharder_type = EmbeddingCollection(tables=[EmbeddingConfig(**words) for words in common], device=meta), EmbeddingCollectionSharder
    sharder = sharder_type(fused_params=tbe_options(optimizer))
    world = dist.get_world_size()
    plan = construct_module_sharding_plan(
        module,
        # without a kernel name torchrec picks its dense one, which leaves the update to an optimiser and corrupts memory on the CPU
        {name: row_wise(compute_kernel="fused") if rank is None else table_wise(rank=rank, compute_kernel="fused") for name, rank in places.items()},
        sharder=sharder,
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", world)),
        world_size=world,
        device_type=device.type,
    )
    return sharder.shard(module, plan, ShardingEnv.from_process_group(dist.group.WORLD), device)


def _kernels(module: Any) -> list[Any]:
    from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbedding, BaseBatchedEmbeddingBag

    kinds = (BaseBatchedEmbedding, BaseBatchedEmbeddingBag)
    return [kernel for lookup in module._lookups for kernel in lookup.modules() if isinstance(kernel, kinds)]


def _keyed_jagged_tensor(columns: KeyedJagged) -> Any:
    """The same values and offsets as a torchrec tensor. A rank without rows sends one empty row, because torchrec cannot reshape a batch of none."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    if columns.rows == 0:
        lengths = columns.offsets.new_zeros(len(columns.keys))
        return KeyedJaggedTensor(keys=list(columns.keys), values=columns.values, lengths=lengths, stride=1)
    return KeyedJaggedTensor(
        keys=list(columns.keys), values=columns.values, lengths=columns.offsets.diff(), offsets=columns.offsets, stride=columns.rows
    )
