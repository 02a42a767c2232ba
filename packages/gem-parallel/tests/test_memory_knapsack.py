"""The choice of a policy for each block is the best there is: against every choice, and quick where there are many blocks."""

import time
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.spec import RequestError
from gem_parallel.memory.knapsack import Option, choose

OPTION = st.builds(Option, bytes=st.integers(0, 40), seconds=st.integers(0, 30).map(lambda n: n / 8))
BLOCKS = st.lists(st.lists(OPTION, min_size=1, max_size=4), max_size=5)


def sums(blocks: list[list[Option]], chosen: tuple[int, ...] | list[int]) -> tuple[int, float]:
    picked = [options[index] for options, index in zip(blocks, chosen, strict=True)]
    return sum(option.bytes for option in picked), sum(option.seconds for option in picked)


@settings(max_examples=150, deadline=None)
@given(blocks=BLOCKS, budget=st.integers(0, 200))
def test_the_choice_is_the_best_of_all(blocks: list[list[Option]], budget: int) -> None:
    every = [sums(blocks, chosen) for chosen in product(*(range(len(options)) for options in blocks))]
    fitting = [seconds for held, seconds in every if held <= budget]
    if not fitting:
        with pytest.raises(RequestError, match=f"at least {min(held for held, _ in every):,} bytes"):
            choose(blocks, budget)
        return
    held, seconds = sums(blocks, choose(blocks, budget))
    assert held <= budget
    assert seconds == min(fitting)


def test_a_greedy_choice_would_be_worse() -> None:
    """By seconds a byte the first block looks better, but one block alone frees enough."""
    blocks = [[Option(10, 0.0), Option(4, 1.0)], [Option(10, 0.0), Option(0, 2.0)]]
    assert choose(blocks, 10) == [0, 1]
    assert choose(blocks, 20) == [0, 0]
    assert choose(blocks, 14) == [1, 0]


def test_no_blocks_take_nothing() -> None:
    assert choose([], 0) == []


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_sixty_blocks_of_odd_sizes_take_a_moment(share: float) -> None:
    """4 ** 60 choices. Bytes and seconds grow irregularly, as those of measured blocks do."""
    blocks = []
    for i in range(60):
        size, seconds = 10_000_019 + 7919 * (i * i % 97), 1e-3 * (1 + (i * 31 % 17) / 7)
        blocks.append(
            [Option(size, 0.0), Option(size // 9, seconds), Option(size // 2 + i, seconds * 0.4 + 1e-5 * (i % 5)), Option(size // 3, seconds * 0.7)]
        )
    least, most = (sum(pick(option.bytes for option in options) for options in blocks) for pick in (min, max))
    budget = int(least + share * (most - least))
    begun = time.process_time()
    held, _ = sums(blocks, choose(blocks, budget))
    assert time.process_time() - begun < 5
    assert 0.99 * budget < held <= budget
