"""Weights of lowered layers under ``fsdp`` travel in their format: bits are those of one process, bytes those of the formula, refusals are clear."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the ranks' script

from ranks_low_weights import CASES, HIDDEN, WIDTH, WORLD, batch, lowered, train

SCRIPT = Path(__file__).with_name("ranks_low_weights.py")
UP, DOWN, STEM = HIDDEN // WORLD, WIDTH // WORLD, WIDTH // WORLD
"""Rows that a rank has of the layers: 128, 48 and 48."""
REST = 4 * (3 * DOWN + UP)
"""Bytes of a rank's part of a block's biases and norm, which travel as they are."""
ROOT = 4 * (STEM + WIDTH + 1)
"""The same of the stem's bias and of the heads: the one row of their weight and their bias are padded to a row on each rank."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder, env = tmp_path_factory.mktemp("low"), {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(SCRIPT), str(folder)], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [torch.load(folder / f"rank{r}.pt") for r in range(WORLD)]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_every_bit_is_that_of_one_process(ranks: list[dict[str, Any]], case: tuple[str, str]) -> None:
    """Micro-batches, activation checkpointing, scoring between steps and on other weights; forward, both gradients and the optimiser."""
    model, _ = lowered(case[0])
    want = train(model, None, 0, 1)
    for rank in ranks:
        got = rank["trained"][case]
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            assert torch.equal(got[name], tensor), name


def test_the_comparison_sees_a_format(ranks: list[dict[str, Any]]) -> None:
    assert not torch.equal(ranks[0]["trained"]["high", "default"]["step 0.0"], ranks[0]["trained"]["fp8_block", "default"]["step 0.0"])


@pytest.mark.parametrize(
    ("recipe", "up", "down", "stem"),
    [
        # elements, and a byte a scale; parts of 48 rows share blocks of 128, so a part may touch two rows of blocks
        ("fp8_block", UP * WIDTH + 1, DOWN * HIDDEN + 2 * 2, STEM * WIDTH + 2),
        # both ways: 32 along the inputs, and along the outputs, where parts of 48 rows touch up to three
        ("mxfp8", 2 * UP * WIDTH + 3 * UP + 4 * WIDTH, 2 * DOWN * HIDDEN + 8 * DOWN + 3 * HIDDEN, 2 * STEM * WIDTH + 3 * STEM + 3 * WIDTH),
        ("fp8_rowwise", 2 * UP * WIDTH + 4 * (UP + WIDTH), 2 * DOWN * HIDDEN + 4 * (DOWN + HIDDEN), 2 * STEM * WIDTH + 4 * (STEM + WIDTH)),
        ("mxfp4_mlp", UP * WIDTH + 3 * UP + 4 * WIDTH, DOWN * HIDDEN + 8 * DOWN + 3 * HIDDEN, STEM * WIDTH + 3 * STEM + 3 * WIDTH),
    ],
)
def test_bytes_equal_the_formula(ranks: list[dict[str, Any]], recipe: str, up: int, down: int, stem: int) -> None:
    """Of a scoring: two blocks, and the stem, which is lowered as well; the heads are not."""
    for rank in ranks:
        assert rank["sent"][recipe, "default"]["dense: weights"] == (WORLD - 1) * (2 * (up + down + REST) + stem + ROOT)


def test_scales_are_agreed_on_where_parts_share_blocks(ranks: list[dict[str, Any]]) -> None:
    """A float for each of two blocks of ``down`` and one of the stem, reduced and spread in a ring; none for ``up``, whose parts end with blocks."""
    blocks = 2 * 2 + 1
    assert ranks[0]["sent"]["fp8_block", "default"]["dense: scales of weights"] == 2 * (WORLD - 1) * 4 * blocks // WORLD


def test_the_other_weights_go_by_the_payload(ranks: list[dict[str, Any]]) -> None:
    """Biases, norms and the heads in fewer bytes; all ranks compute alike, and not as with float32."""
    plain = ranks[0]["sent"]["fp8_block", "default"]["dense: weights"]
    assert ranks[0]["sent"]["bf16"]["dense: weights"] == plain - (WORLD - 1) * (2 * REST + ROOT) // 2
    for payload in ("bf16", "fp8"):
        outputs = [rank["trained"][payload] for rank in ranks]
        exact = lowered("fp8_block")[0](batch(0)).detach()
        assert all(torch.equal(output, outputs[0]) for output in outputs)
        assert not torch.equal(outputs[0], exact)
        assert torch.allclose(outputs[0], exact, atol=0.3)


def test_the_strategy_tells_what_travels_low_and_what_cannot_is_refused(ranks: list[dict[str, Any]]) -> None:
    told = ranks[0]["facts"]["fp8_block", "default"]["low_weights"]
    assert {each["block"]: each["weights"] for each in told} == {"layers.0": 2, "layers.1": 2, "the rest": 1}
    assert ranks[0]["facts"]["fp8_block", "replicas"]["low_weights"] == [], "a shard is the whole weight"
    assert "turns 32 outputs together, and a rank has 48 of 96" in ranks[0]["refused"]
