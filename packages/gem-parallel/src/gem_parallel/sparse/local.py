"""All tables in one process, on fbgemm's fused tables."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gem_core.batch import KeyedJagged
from gem_core.spec import SparseOptimizer, TableSpec
from gem_parallel.sparse.lookups import PIECE, short_bags
from gem_parallel.sparse.native import load_fbgemm, quiet_logging
from gem_parallel.sparse.shards import slices_of, tbe_options


class LocalGroup:
    """Tables of one pooling in one fbgemm module, so that one kernel looks all of them up."""

    def __init__(
        self, tables: Sequence[TableSpec], optimizer: SparseOptimizer, device: torch.device, *, dtype: str, memory: Mapping[str, str], saves: bool
    ) -> None:
        module = load_fbgemm(device.type)
        from fbgemm_gpu.split_embedding_configs import SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode

        self.keys = tuple(feature for table in tables for feature in table.features)
        self._widths = [table.dim for table in tables for _ in table.features]
        self._pooled = tables[0].pooling != "none"
        # on the CPU no warps wait for the longest row, and finer bags only cost
        self._piece = PIECE if device.type == "cuda" and not self._pooled else None
        on_device = EmbeddingLocation.DEVICE if device.type == "cuda" else EmbeddingLocation.HOST
        location = {"device": on_device, "uvm": EmbeddingLocation.MANAGED, "uvm_cached": EmbeddingLocation.MANAGED_CACHING}
        compute = module.ComputeDevice.CUDA if device.type == "cuda" else module.ComputeDevice.CPU
        with quiet_logging():
            self.tbe = module.SplitTableBatchedEmbeddingBagsCodegen(
                [(table.rows, table.dim, location[memory[table.name]], compute) for table in tables],
                feature_table_map=[i for i, table in enumerate(tables) for _ in table.features],
                pooling_mode={"none": PoolingMode.NONE, "sum": PoolingMode.SUM, "mean": PoolingMode.MEAN}[tables[0].pooling],
                device=device,
                weights_precision=SparseType(dtype),
                **tbe_options(optimizer, dtype),
            )
        self.tbes = [self.tbe]
        self.slices = slices_of(self.tbe, [(table.name, 0, 0) for table in tables], optimizer, saves=saves)

    def start(self, features: KeyedJagged) -> KeyedJagged:
        """The columns of these tables; nothing has to travel."""
        return features if features.keys == self.keys else features.select(self.keys)

    def look_up(self, columns: KeyedJagged) -> dict[str, Tensor]:
        offsets = columns.offsets if self._piece is None else short_bags(columns, self._piece)
        vectors: Tensor = self.tbe(indices=columns.values, offsets=offsets)
        sizes = self._widths if self._pooled else [end - start for start, end in zip(columns.starts, columns.starts[1:])]
        return dict(zip(self.keys, torch.split(vectors, sizes, dim=1 if self._pooled else 0)))

    def finish(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        return found


def local_groups(
    tables: Sequence[TableSpec], optimizer: SparseOptimizer, device: torch.device, *, dtype: str, memory: Mapping[str, str], saves: bool = True
) -> list[LocalGroup]:
    """One group a pooling; without pooling one a width, since fbgemm returns the vectors in one tensor.

    Args:
        tables: the tables.
        optimizer: the update rule.
        device: where the tables live.
        dtype: of the stored rows.
        memory: where each table's rows lie.
        saves: whether this process hands its tables over to checkpoints.
    """
    groups: dict[tuple[str, int], list[TableSpec]] = {}
    for table in tables:
        groups.setdefault((table.pooling, table.dim if table.pooling == "none" else 0), []).append(table)
    return [LocalGroup(group, optimizer, device, dtype=dtype, memory=memory, saves=saves) for group in groups.values()]
