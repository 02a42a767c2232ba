"""Numbers addressed by their purpose, Zipf ranks and the permutation that takes no memory."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_data.generate.draws import Draws, mix, permute, zipf


def splitmix(word: int) -> int:
    mask = (1 << 64) - 1
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & mask
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & mask
    return word ^ (word >> 31)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20))
@settings(max_examples=25)
def test_mix_is_the_published_finaliser(words: list[int]) -> None:
    assert mix(np.array(words, np.uint64)).tolist() == [splitmix(word) for word in words]


def test_known_words_on_every_machine() -> None:
    """Pinned: another value would silently be another data set."""
    assert Draws(1).words("click", np.array([0, 1, 2])).tolist() == [11023117707130367454, 7511126624565389387, 8002282860525702109]


def test_a_number_depends_on_seed_purpose_and_keys_and_not_on_its_neighbours() -> None:
    keys = np.arange(1000)
    whole = Draws(3).uniform("click", keys, keys[::-1])
    assert np.array_equal(Draws(3).uniform("click", keys[400:500], keys[::-1][400:500]), whole[400:500])
    for other in (
        Draws(4).uniform("click", keys, keys[::-1]),
        Draws(3).uniform("time", keys, keys[::-1]),
        Draws(3).uniform("click", keys[::-1], keys),
    ):
        assert (other == whole).mean() < 0.01


@pytest.mark.parametrize("purpose", ["click", "candidate"])
def test_uniform_and_normal_have_their_moments(purpose: str) -> None:
    keys = np.arange(200_000)
    drawn = Draws(0).uniform(purpose, keys)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 4 * np.sqrt(1 / 12 / keys.size)
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 4 / np.sqrt(keys.size)
    normal = Draws(0).normal(purpose, keys)
    assert abs(normal.mean()) < 4 / np.sqrt(keys.size)
    assert abs(normal.var() - 1) < 4 * np.sqrt(2 / keys.size)
    assert np.bincount(Draws(0).integers(purpose, 7, keys), minlength=7).min() > keys.size / 7 * 0.97


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.05, 2.5])
@pytest.mark.parametrize("count", [1, 2, 30, 10**9])
def test_zipf_ranks_follow_the_stated_law(exponent: float, count: int) -> None:
    uniform = (np.arange(100_000) + 0.5) / 100_000
    ranks = zipf(uniform, count, exponent)
    assert ranks.min() >= 1
    assert ranks.max() <= count
    edges = np.arange(1.0, min(count, 30) + 2)
    integral = np.log if exponent == 1.0 else lambda x: x ** (1 - exponent) / (1 - exponent)
    law = np.diff(integral(edges)) / (integral(count + 1.0) - integral(1.0))
    found = np.bincount(ranks[ranks < edges[-1]], minlength=edges.size)[1:] / uniform.size
    np.testing.assert_allclose(found, law, atol=3e-5)


@given(st.integers(1, 3000), st.integers(0, 2**63))
@settings(max_examples=25, deadline=None)
def test_permute_is_a_permutation_at_any_place(count: int, key: int) -> None:
    word = np.array([key], np.uint64)
    order = permute(np.arange(count), count, word)
    assert np.array_equal(np.sort(order), np.arange(count))
    assert np.array_equal(permute(np.arange(count // 2, count), count, word), order[count // 2 :])


def test_permute_mixes_and_differs_by_key() -> None:
    first, second = (permute(np.arange(10_000), 10_000, np.array([key], np.uint64)) for key in (1, 2))
    assert (first == second).mean() < 0.01
    for order in (first, second):
        assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert permute(np.arange(3), 10**12, np.array([1], np.uint64)).max() < 10**12
