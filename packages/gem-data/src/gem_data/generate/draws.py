"""Random numbers addressed by what they are for, so that any row can be computed alone, in any order, on any machine.

A number is a hash of (seed, purpose, keys): the 64-bit finaliser of SplitMix64 (Steele, Lea and Flood 2014) applied once for each key.
"""

import zlib

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
HALF_ROUNDS = 4


def mix(words: Words) -> Words:
    """SplitMix64's finaliser, a bijection of 64-bit words."""
    words = words ^ (words >> np.uint64(30))
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


class Draws:
    """Numbers that depend on the seed, a purpose and integer keys, and on nothing else."""

    def __init__(self, seed: int) -> None:
        self._seed = np.uint64(seed)

    def words(self, purpose: str, *keys: Ints) -> Words:
        """One word for each element of the broadcast ``keys``."""
        start = mix(np.array([self._seed, zlib.crc32(purpose.encode())], np.uint64) + GOLDEN)
        state = start[0] ^ start[1]
        for key in keys:
            state = chain(state, key)
        return np.asarray(state, np.uint64)

    def uniform(self, purpose: str, *keys: Ints) -> Floats:
        """Uniform on [0, 1)."""
        return unit(self.words(purpose, *keys))

    def normal(self, purpose: str, *keys: Ints) -> Floats:
        """Standard normal, by Box and Muller."""
        radius = np.sqrt(-2.0 * np.log1p(-self.uniform(purpose, *keys)))
        return np.asarray(radius * np.cos(2 * np.pi * self.uniform(purpose + " angle", *keys)))

    def integers(self, purpose: str, below: int, *keys: Ints) -> Ints:
        """Uniform on ``0 .. below - 1``."""
        return floor(self.uniform(purpose, *keys) * below)


def chain(state: Words | np.uint64, key: Ints) -> Words:
    """The state after one more key."""
    with np.errstate(over="ignore"):
        return mix(np.atleast_1d(np.asarray(state + (np.asarray(key).astype(np.uint64) + np.uint64(1)) * GOLDEN)))


def unit(words: Words) -> Floats:
    """The upper 53 bits as a number of [0, 1)."""
    return np.asarray((words >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def floor(values: Floats) -> Ints:
    return np.asarray(np.floor(values).astype(np.int64))


def zipf(uniform: Floats, count: int, exponent: float) -> Ints:
    """Ranks ``1 .. count``: ``P(k)`` is the integral of ``x ** -exponent`` over ``[k, k + 1]``, normalised; a table of the ranks is not needed."""
    power = 1.0 - exponent
    scale = np.log1p(float(count))
    place = np.exp(uniform * scale) if abs(power) < 1e-9 else (1.0 + uniform * np.expm1(power * scale)) ** (1.0 / power)
    return np.clip(floor(place), 1, count)


def permute(index: Ints, count: int, key: Words) -> Ints:
    """A permutation of ``0 .. count - 1`` chosen by ``key`` and evaluated at ``index`` alone, in constant memory.

    A Feistel network over the next even number of bits; numbers outside are sent through again until they fall inside (cycle walking,
    Black and Rogaway 2002), four times at most on average.
    """
    half = np.uint64(max(1, (max(count - 1, 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    out = index.astype(np.uint64)
    walking = np.arange(out.size)
    while walking.size:
        left, right = out[walking] >> half, out[walking] & mask
        for turn in range(HALF_ROUNDS):
            left, right = right, left ^ (chain(chain(key, np.array([turn])), right.astype(np.int64)) & mask)
        out[walking] = (left << half) | right
        walking = walking[out[walking] >= np.uint64(count)]
    return out.astype(np.int64)
