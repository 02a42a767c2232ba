"""A 64-bit hash of ids that is the same on every platform, in every run and for every way an id was stored.

Mixing is SplitMix64's (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", figure 17):
``mix(x) = m(m(x ^ x >> 30, C1) ^ .. >> 27, C2) ^ .. >> 31`` with ``m`` the product modulo 2^64. The key of

- an integer from -2^63 to 2^64 - 1 is ``mix(v + GAMMA)``, with ``v`` its 64 bits;
- a text is that of its UTF-8 bytes: start from ``h`` = number of bytes, then for each eight bytes ``w`` (little-endian, the last filled up with
  zeros) ``h = mix((h ^ w) + GAMMA)``;
- a text that is an integer's own decimal form, such as ``"42"`` but not ``"042"`` or ``"+42"``, is the integer's: an id hashes alike from a text file
  and from Parquet.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gem_core.spec import RequestError
from gem_data.ids.values import as_bits, is_text, widen

Keys = NDArray[np.uint64]
GAMMA = np.uint64(0x9E3779B97F4A7C15)
C1, C2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix(x: Keys) -> Keys:
    """``[n]`` uint64 to the same shape; a bijection."""
    x = (x ^ (x >> np.uint64(30))) * C1
    x = (x ^ (x >> np.uint64(27))) * C2
    return np.asarray(x ^ (x >> np.uint64(31)))


def hash_keys(values: pa.Array) -> Keys:
    """``[values]`` uint64 keys of an array of integers or texts.

    Raises:
        RequestError: a value is missing; a key would be made up.
    """
    if values.null_count:
        raise RequestError("hash of ids", f"{values.null_count} values are missing", "Fill or drop missing values first.")
    values = widen(values)
    if not is_text(values.type):
        return mix(as_bits(values) + GAMMA)
    keys = text_keys(values)
    for kind, chosen in _decimal_texts(values):
        at = np.flatnonzero(chosen.to_numpy(zero_copy_only=False))
        if at.size:
            keys[at] = mix(as_bits(values.take(pa.array(at)).cast(kind)) + GAMMA)
    return keys


def _decimal_texts(values: pa.Array) -> list[tuple[pa.DataType, pa.Array]]:
    """Which texts are the decimal form of a uint64 and which of a negative int64. Equally long decimals compare as texts."""
    out = []
    for kind, pattern, most in ((pa.uint64(), r"^(0|[1-9][0-9]{0,19})$", str(2**64 - 1)), (pa.int64(), r"^-[1-9][0-9]{0,18}$", str(-(2**63)))):
        fits = pc.or_(pc.less(pc.binary_length(values), len(most)), pc.less_equal(values, pa.scalar(most, values.type)))
        out.append((kind, pc.and_(pc.match_substring_regex(values, pattern), fits)))
    return out


def text_keys(values: pa.Array) -> Keys:
    """``[values]`` uint64 hashes of the bytes of a large string array without missing values; one pass for each eight bytes of the longest."""
    offsets = np.frombuffer(values.buffers()[1], np.int64)[values.offset : values.offset + len(values) + 1] if len(values) else np.zeros(1, np.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    data = values.buffers()[2] if len(values) else None
    body = b"" if data is None else bytes(memoryview(data)[first:last])
    # Any eight bytes of the body, from any place on; the filling keeps the last ones inside.
    words = np.ndarray(max(len(body), 1), "<u8", buffer=body + bytes(8), strides=(1,))
    start, lengths = offsets[:-1] - first, np.diff(offsets)
    hashes = lengths.astype(np.uint64)
    active = np.flatnonzero(lengths > 0)
    done = 0
    while active.size:
        left = np.minimum(lengths[active] - done, 8)
        mask = np.uint64(2**64 - 1) >> ((8 - left) * 8).astype(np.uint64)
        word = words[start[active] + done].astype(np.uint64) & mask
        hashes[active] = mix((hashes[active] ^ word) + GAMMA)
        done += 8
        active = active[lengths[active] > done]
    return hashes
