"""docs/kernels.md is executed and compared with the declarations."""

import re
from pathlib import Path

import pytest

from gem_core.builtin.kernels import OPS
from gem_core.ops.activations import ACTIVATIONS, GELU_FAST_MAX_ERROR, GELU_FAST_RANGE

PAGE = (Path(__file__).parents[4] / "docs" / "kernels.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
OPS_SECTION = PAGE.partition("## The ops")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", OPS_SECTION, flags=re.MULTILINE)


def documented(words: str) -> set[str]:
    spelt = set(words.strip("`").split()) - {"none"}
    return spelt - {"act_*"} | ({f"act_{name}" for name in ACTIVATIONS} if "act_*" in spelt else set())


def test_every_op_has_a_row_with_its_feature_words():
    table = {name: documented(words) for name, words in ROWS}
    assert table == {op.name: set(op.features) for op in OPS}


def test_a_planted_wrong_word_would_show():
    assert documented("`cross causal`") != documented("`cross casual`")
    assert documented("none") == set()


def test_activations_and_their_numbers_are_as_written():
    sentence = re.search(r"^Activations .*?\n\n", PAGE, flags=re.MULTILINE | re.DOTALL).group()
    assert [name for name in re.findall(r"`(\w+)`", sentence) if name in ACTIVATIONS][: len(ACTIVATIONS)] == list(ACTIVATIONS)
    assert f"{GELU_FAST_RANGE}" in sentence
    assert "7.7e-3" in sentence
    assert GELU_FAST_MAX_ERROR == 7.7e-3


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_block_runs(number):
    exec(compile(BLOCKS[number].replace('backend="acme"', 'backend="reference"'), f"docs/kernels.md block {number}", "exec"), {})


def test_there_are_blocks_to_run():
    assert len(BLOCKS) == 4
