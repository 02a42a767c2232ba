"""Types of text columns by their values, such that no value changes: ids keep their leading zeros and their last digits."""

import pyarrow as pa
import pyarrow.compute as pc

INTEGER = r"^(0|-?[1-9][0-9]*)$"
NUMBER = r"^-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
PADDED = r"^-?0[0-9]"
LONG = r"[0-9]{16}"


def guess_type(values: pa.Array) -> pa.DataType:
    """int64 or uint64 where every text is the plain form of one, float64 where every text is a number, else string.

    Texts with leading zeros, and columns that mix fractions with integers too long for a float, stay strings.
    """
    present = values.drop_null()
    if not len(present):
        return pa.string()
    if pc.all(pc.match_substring_regex(present, INTEGER)).as_py():
        for kind in (pa.int64(), pa.uint64()):
            try:
                present.cast(kind)
            except pa.ArrowInvalid:
                continue
            return kind
        return pa.string()
    padded = pc.any(pc.match_substring_regex(present, PADDED)).as_py()
    long = pc.any(pc.and_(pc.match_substring_regex(present, INTEGER), pc.match_substring_regex(present, LONG))).as_py()
    if not padded and not long and pc.all(pc.match_substring_regex(present, NUMBER)).as_py():
        return pa.float64()
    return pa.string()
