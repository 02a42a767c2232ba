"""Id columns in the forms that encoders work on."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gem_core.spec import RequestError


def chunks(name: str, values: pa.Array | pa.ChunkedArray) -> Iterator[pa.Array]:
    """The parts of a column: int64, uint64 or string arrays, or dictionaries of them.

    Raises:
        RequestError: the ids are neither integers nor strings.
    """
    for chunk in values.chunks if isinstance(values, pa.ChunkedArray) else [values]:
        kind = chunk.type.value_type if pa.types.is_dictionary(chunk.type) else chunk.type
        if not _is_id(kind):
            do = (
                "Flatten lists first."
                if pa.types.is_list(kind) or pa.types.is_large_list(kind)
                else "Give integers or strings; a float cannot hold ids."
            )
            raise RequestError(f"ids of {name!r}", f"they are {kind}", do)
        if pa.types.is_dictionary(chunk.type) and chunk.dictionary.null_count:
            yield widen(chunk.dictionary_decode())  # the null among its values would not count as missing
        elif pa.types.is_dictionary(chunk.type):
            yield pa.DictionaryArray.from_arrays(chunk.indices, widen(chunk.dictionary))
        else:
            yield widen(chunk)


def _is_id(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or is_text(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind)


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == getattr(pa, "string_view", lambda: None)())


def widen(array: pa.Array) -> pa.Array:
    """Integers as int64, or uint64 where they are that; texts as large strings. Ids of no type, all missing, count as int64."""
    if is_text(array.type):
        return array.cast(pa.large_string())
    return array if array.type == pa.uint64() else array.cast(pa.int64())


def distinct(array: pa.Array) -> tuple[pa.Array, NDArray[np.int64]]:
    """``(values, index)``: the different values, and for each entry the place of its value, -1 where it is missing."""
    coded = array if pa.types.is_dictionary(array.type) else array.dictionary_encode()
    return coded.dictionary, pc.fill_null(coded.indices.cast(pa.int64()), -1).to_numpy(zero_copy_only=False)


def as_bits(integers: pa.Array) -> NDArray[np.uint64]:
    """``[values]`` uint64, the two's complement of negative ones; without missing values."""
    found: NDArray[np.uint64] = integers.to_numpy(zero_copy_only=False).view(np.uint64)
    return found
