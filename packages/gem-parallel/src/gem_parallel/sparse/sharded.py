"""Tables spread over ranks by torchrec."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gem_core.batch import KeyedJagged
from gem_core.spec import SparseOptimizer, TableSpec
from gem_parallel.sparse.copies import Copies
from gem_parallel.sparse.lookups import shorten_bags
from gem_parallel.sparse.native import load_fbgemm, load_torchrec, quiet_logging
from gem_parallel.sparse.placement import Place
from gem_parallel.sparse.shards import slices_of, tbe_options

KERNELS = {"device": "fused", "uvm": "fused_uvm", "uvm_cached": "fused_uvm_caching"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """Formats: of the stored rows, and of vectors and gradients between ranks; ``fp32``, ``fp16`` or ``bf16``."""

    dtype: str = "fp32"
    forward_comm: str = "fp32"
    backward_comm: str = "fp32"


class ShardedGroup:
    """Tables in one torchrec collection: pooled ones, or ones looked up id by id.

    Tables spread over all ranks by rows are always looked up id by id and pooled here, on the asking rank: torchrec's row-wise bags fail on gloo as
    soon as the ranks have different numbers of rows.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        places: Mapping[str, Place],
        optimizer: SparseOptimizer,
        device: torch.device,
        *,
        bags: bool,
        storage: Storage,
        copies: Copies,
    ) -> None:
        self.keys = tuple(feature for table in tables for feature in table.features)
        self._bags = bags
        self._pool_here = {feature: table.pooling for table in tables for feature in table.features if not bags and table.pooling != "none"}
        names = {f"t{i}": table for i, table in enumerate(tables)}  # torchrec takes module names, which hold no dots
        sharder, module = collection(names, optimizer, bags=bags, storage=storage)
        with quiet_logging():
            plan = _plan(module, sharder, {name: places[table.name] for name, table in names.items()}, device, copies)
            self.module = sharder.shard(module, plan, _environment(copies), device)
        self.tbes, self.slices = [], []
        for kernel in _kernels(self.module):
            self.tbes.append(kernel.emb_module)
            if device.type == "cuda" and not bags:
                kernel.emb_module.register_forward_pre_hook(shorten_bags, with_kwargs=True)
            held = [(names[config.name].name, *config.local_metadata.shard_offsets) for config in kernel.config.embedding_tables]
            self.slices += slices_of(kernel.emb_module, held, optimizer, saves=copies.saves)

    def start(self, features: KeyedJagged) -> tuple[KeyedJagged, Any, Any]:
        """Exchange how many ids go where, and send the ids on their way."""
        columns = features if features.keys == self.keys else features.select(self.keys)
        context = self.module.create_context()
        return columns, context, self.module.input_dist(context, _keyed_jagged_tensor(columns)).wait()

    def look_up(self, started: tuple[KeyedJagged, Any, Any]) -> tuple[KeyedJagged, Any]:
        """Wait for the ids, look them up and send the vectors on their way. Several groups can be under way at once."""
        columns, context, ids = started
        return columns, self.module.compute_and_output_dist(context, ids.wait())

    def finish(self, under_way: tuple[KeyedJagged, Any]) -> dict[str, Tensor]:
        columns, awaitable = under_way
        found = awaitable.wait()
        if self._bags:
            pooled: dict[str, Tensor] = found.to_dict()
            return pooled if columns.rows else {key: vectors[:0] for key, vectors in pooled.items()}
        out = {key: found[key].values() for key in self.keys}
        for key, pooling in self._pool_here.items():
            out[key] = pool(out[key], columns[key].offsets, pooling)
        return out


def sharded_groups(
    tables: Sequence[TableSpec], places: Mapping[str, Place], optimizer: SparseOptimizer, device: torch.device, storage: Storage, copies: Copies
) -> list[ShardedGroup]:
    """Pooled tables that are not spread by rows in one group; the others by width, which torchrec's unpooled collection demands."""
    if not tables:
        return []
    load_fbgemm(device.type)
    load_torchrec(device.type)
    groups: dict[int, list[TableSpec]] = {}
    for table in tables:
        bag = table.pooling != "none" and places[table.name].sharding != "row_wise"
        groups.setdefault(0 if bag else table.dim, []).append(table)
    return [ShardedGroup(group, places, optimizer, device, bags=key == 0, storage=storage, copies=copies) for key, group in groups.items()]


def pool(vectors: Tensor, offsets: Tensor, pooling: str) -> Tensor:
    """Sum or mean of each bag: ``[ids, dim]`` and ``[rows + 1]`` to ``[rows, dim]``; zeros for an empty bag."""
    lengths = offsets.diff()
    bags = torch.repeat_interleave(torch.arange(lengths.numel(), device=vectors.device), lengths, output_size=vectors.shape[0])
    total = vectors.new_zeros(lengths.numel(), vectors.shape[1]).index_add(0, bags, vectors)
    return total / lengths.clamp(min=1)[:, None] if pooling == "mean" else total


def collection(tables: Mapping[str, TableSpec], optimizer: SparseOptimizer, *, bags: bool, storage: Storage) -> tuple[Any, Any]:
    """torchrec's sharder and the collection of the tables, by module name, on the meta device."""
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

    meta, poolings = torch.device("meta"), {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}
    common = [
        {
            "name": name,
            "embedding_dim": table.dim,
            "num_embeddings": table.rows,
            "feature_names": list(table.features),
            "data_type": DataType[storage.dtype.upper()],
        }
        for name, table in tables.items()
    ]
    words = {"fused_params": tbe_options(optimizer, storage.dtype), "qcomm_codecs_registry": _codecs(storage)}
    if bags:
        configs = [EmbeddingBagConfig(pooling=poolings[table.pooling], **words) for words, table in zip(common, tables.values(), strict=True)]
        return EmbeddingBagCollectionSharder(**words), EmbeddingBagCollection(tables=configs, device=meta)
    return EmbeddingCollectionSharder(**words), EmbeddingCollection(tables=[EmbeddingConfig(**words) for words in common], device=meta)


def _codecs(storage: Storage) -> Any:
    """torchrec's codecs of what travels between ranks, None where nothing is narrowed."""
    if storage.forward_comm == storage.backward_comm == "fp32":
        return None
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry

    # without a device: told of the CPU, torchrec would put fp16 in the place of bf16, which gloo carries all the same
    return get_qcomm_codecs_registry(
        QCommsConfig(forward_precision=CommType(storage.forward_comm), backward_precision=CommType(storage.backward_comm))
    )


def _plan(module: Any, sharder: Any, places: Mapping[str, Place], device: torch.device, copies: Copies) -> Any:
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan

    cluster = copies.cluster
    makers = {name: _maker(place, cluster.local) for name, place in places.items()}
    words: dict[str, Any] = {"local_size": cluster.local, "world_size": cluster.world, "device_type": device.type}
    plan = construct_module_sharding_plan(module, makers, sharder=sharder, **words)
    for name, parameter in plan.items():
        # torchrec's default is its dense kernel, which leaves the update to an optimiser and corrupts memory on the CPU
        parameter.compute_kernel = KERNELS[places[name].memory]
        parameter.ranks = [copies.world_rank(rank) for rank in parameter.ranks]
        for shard in parameter.sharding_spec.shards:
            shard.placement._rank = copies.world_rank(shard.placement.rank())
    return plan


def _maker(place: Place, local: int) -> Any:
    from torchrec.distributed.sharding_plan import column_wise, grid_shard, row_wise, table_row_wise, table_wise

    if place.sharding == "table_wise":
        return table_wise(rank=place.ranks[0])
    if place.sharding == "row_wise":
        return row_wise()
    if place.sharding == "column_wise":
        return column_wise(ranks=list(place.ranks))
    hosts = sorted({rank // local for rank in place.ranks})
    return table_row_wise(host_index=hosts[0]) if place.sharding == "table_row_wise" else grid_shard(host_indexes=hosts)


def _environment(copies: Copies) -> Any:
    from torchrec.distributed.types import ShardingEnv, ShardingEnv2D

    if copies.mesh is None:
        return ShardingEnv.from_process_group(dist.group.WORLD)
    return ShardingEnv2D(
        sharding_pg=copies.mesh.get_group("shard"),
        replica_pg=copies.mesh.get_group("replicate"),
        global_pg=dist.group.WORLD,
        device_mesh=copies.mesh,
        node_group_size=copies.cluster.local,
    )


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
