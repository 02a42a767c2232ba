"""Where in a text file double quotes enclose something, line ends among it."""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

QUOTE, FEED, RETURN = 34, 10, 13


@dataclass(frozen=True)
class Spans:
    """Quoted parts of a block, in order: the places of their opening quotes, -1 for one that an earlier block opened, and of what follows them.

    A doubled quote may part one into two that touch.
    """

    begin: NDArray[np.int64]
    end: NDArray[np.int64]

    def hold(self, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """``[places]``: whether each place, which is no quote itself, lies inside a quoted part."""
        if not self.begin.size:
            return np.zeros(places.size, np.bool_)
        part = np.searchsorted(self.begin, places) - 1
        return (part >= 0) & (places < self.end[np.maximum(part, 0)])


class Quotes:
    """Follows the quotes of a file block by block, as pyarrow's parser does: one opens a field only at the field's beginning, two inside are one.

    Args:
        separator: of fields, one byte.

    Attributes:
        open: whether the last block ended inside a quoted field.
    """

    def __init__(self, separator: bytes) -> None:
        self._separator = separator[0]
        self.open = False
        escaped = re.escape(separator)
        self._rest = re.compile(rb'[^"]*(?:""[^"]*)*("|\Z)')
        self._field = re.compile(rb"(?:^|[\n" + escaped + rb'])(")[^"]*(?:""[^"]*)*("|\Z)')

    def pass_over(self, raw: NDArray[np.uint8], block: bytes) -> Spans:
        """The quoted parts of the next block of whole lines, given as an array and as bytes."""
        at = np.flatnonzero(raw == QUOTE)
        first = int(self.open)
        opens, closes = at[first::2], at[1 - first :: 2]
        if not self._regular(raw, opens, closes):
            return self._slowly(block)
        begin = np.concatenate([[-1], opens]) if self.open else opens
        self.open = bool((at.size + first) % 2)
        end = np.concatenate([closes + 1, [raw.size]]) if self.open else closes + 1
        return Spans(begin, end)

    def _regular(self, raw: NDArray[np.uint8], opens: NDArray[np.int64], closes: NDArray[np.int64]) -> bool:
        """Whether every other quote opens and the rest close: then none of them stands inside an unquoted field."""
        before, after = raw[np.maximum(opens - 1, 0)], raw[np.minimum(closes + 1, raw.size - 1)]
        opening = (opens == 0) | np.isin(before, (self._separator, FEED, QUOTE))
        return bool(opening.all()) and bool(np.isin(after, (self._separator, FEED, RETURN, QUOTE)).all())

    def _slowly(self, block: bytes) -> Spans:
        spans = []
        at = 0
        if self.open:
            match = self._rest.match(block)
            assert match is not None  # the pattern ends at a quote or at the end
            spans.append((-1, match.end()))
            at, self.open = match.end(), not match[1]
        for match in self._field.finditer(block, at):
            spans.append((match.start(1), match.end()))
            self.open = not match[2]
        begin, end = np.array(spans, np.int64).reshape(-1, 2).T
        return Spans(begin, end)
