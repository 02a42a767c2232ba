"""On a machine with a GPU batches lie in pinned memory and reach the device unchanged."""

from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_are_pinned_and_copied_asynchronously(kit: ModuleType, tmp_path: Path) -> None:
    table = kit.make_table(60)
    kit.write_folder(tmp_path, {"train.parquet": table, "test.parquet": table})
    for batch in kit.open_source(tmp_path, workers=2).batches("train", batch_size=16, seed=0):
        assert batch.ids.values.is_pinned()
        assert batch.ids.offsets.is_pinned()
        assert all(value.is_pinned() for value in (*batch.dense.values(), *batch.labels.values(), *batch.event_time.values()))
        moved = batch.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        kit.check(moved.to("cpu"), table)
