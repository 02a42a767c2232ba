"""Managed ids with tables on a CUDA device: the ids of the CPU to the bit, and rows that change hands are reset on the device."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gem_core.config.load import LoadedConfig
from gem_core.train.checkpoint.saved import find_checkpoint
from gem_core.train.log import read_log
from gem_core.train.run import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
RULE = 'embedding.ids=[{pattern="item",rows=9,buckets=3,evict_every=2,admit_after=2}]'


def test_a_gpu_gives_the_ids_and_rows_of_the_cpu(configure: Callable[..., LoadedConfig], tmp_path: Path) -> None:
    for device in ("cpu", "cuda"):
        train(configure("train.log_every=1", "train.checkpoint_every=4", RULE, f"run.device={device}", out=device))
    tables = [find_checkpoint(tmp_path / device).read()["tables"]["item"] for device in ("cpu", "cuda")]
    for name in ("id", "id_row", "id_count", "id_used"):
        assert torch.equal(tables[0][name], tables[1][name]), name
    for name in ("weight", "state"):
        assert torch.allclose(tables[0][name], tables[1][name], atol=1e-4), name
    told = [[record["ids"] for record in read_log(tmp_path / device) if record["event"] == "train"] for device in ("cpu", "cuda")]
    assert told[0] == told[1]
    assert sum(record["tables"]["item"]["evicted"] for record in told[1]) > 0
