"""Text of any encoding as blocks of whole UTF-8 lines, checked, with one byte between fields."""

import codecs
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gem_core.spec import RequestError
from gem_data.formats.files import Location, open_bytes
from gem_data.formats.quotes import FEED, RETURN, Quotes, Spans

READ = 1 << 20
LONGEST_LINE = 16 << 20
STAND_INS = ("\x1f", "\x1e", "\x1d", "\x1c")
"""Bytes that may stand for a separator of several; one that the file holds itself is refused."""


class Lines:
    """The lines of a text file, from its beginning, once.

    Args:
        place: the file.
        encoding: of the file.
        separator: replaced by ``stand_in`` if it is longer than one byte.
        blank_lines: whether blank lines outside quotes stay; those left out are counted in ``blanks``.
        quote: whether double quotes may enclose line ends.
    """

    def __init__(self, place: Location, encoding: str, separator: str = ",", *, blank_lines: bool = True, quote: bool = False) -> None:
        self._place, self._encoding = place, encoding
        self._separator = separator.encode()
        self._keep_blank_lines = blank_lines
        self.stand_in = separator if len(self._separator) == 1 else next(s for s in STAND_INS if s not in separator)
        self.blanks = 0
        self._number = self._records = self._sought = self._found = 0
        self._quotes = Quotes(self.stand_in.encode()) if quote else None
        try:
            self._decoder = codecs.getincrementaldecoder(encoding)()
        except LookupError as error:
            raise RequestError(place.asked, f"{encoding!r} is no encoding", "Name one, such as utf-8 or latin-1.") from error

    def blocks(self) -> Iterator[bytes]:
        """Parts of about 1 MiB of whole lines; a quoted field is never cut.

        Raises:
            RequestError: a byte is not of the encoding, a line is longer than 16 MiB, or the compressed file is damaged.
        """
        rest = block = b""
        for text in self._texts():
            data = rest + text
            end = data.rfind(b"\n") + 1
            rest = data[end:]
            if end:
                block += self._lines(data[:end])
            if len(rest) + len(block) > LONGEST_LINE:
                so = f"line {self._number + 1}, or a quoted field that ends there, is longer than {LONGEST_LINE} bytes"
                raise RequestError(self._place.asked, so, "Check the file, its line ends and its quotes.")
            if end and not (self._quotes and self._quotes.open):  # parsers take whole records
                yield block
                block = b""
        if rest:
            block += self._lines(rest + b"\n")
        if block:
            yield block

    def line_of(self, record: int) -> int:
        """The number in the file, from 1, of the line where the ``record``-th record that ``blocks`` gives begins. Reads the file anew."""
        again = Lines(self._place, self._encoding, self._separator.decode(), blank_lines=self._keep_blank_lines, quote=self._quotes is not None)
        again._sought = record
        for _ in again.blocks():
            if again._found:
                break
        return again._found

    def _texts(self) -> Iterator[bytes]:
        fed = lines = 0
        first = True
        with open_bytes(self._place) as file:
            while True:
                raw = self._read(file)
                fed += len(raw)
                try:
                    text = self._decoder.decode(raw, final=not raw)
                except UnicodeDecodeError as error:
                    before = error.object[: error.start].decode(self._encoding, "replace").count("\n")
                    byte, offset = error.object[error.start], fed - len(error.object) + error.start
                    so = f"byte {byte:#04x} at offset {offset}, in line {lines + before + 1}, is not {self._encoding}"
                    raise RequestError(self._place.asked, so, "Name its encoding, such as latin-1, or convert the file.") from error
                lines += text.count("\n")
                if first and text:
                    first, text = False, text.removeprefix("\ufeff")
                if text:
                    yield text.encode()
                if not raw:
                    return

    def _read(self, file: Any) -> bytes:
        try:
            return bytes(file.read(READ))
        except (OSError, EOFError) as error:
            raise RequestError(self._place.asked, f"it cannot be read to its end ({error})", "Check that the file is whole.") from error

    def _lines(self, data: bytes) -> bytes:
        if len(self._separator) > 1:
            at = data.find(self.stand_in.encode())
            if at >= 0:
                so = f"holds the character {self.stand_in!r}, which stands for its separator while it is parsed"
                raise self._wrong_line(data, at, so, "Remove that character.")
            data = data.replace(self._separator, self.stand_in.encode())
        raw = np.frombuffer(data, np.uint8)
        if self._quotes is None and (raw == RETURN).any():
            lone = np.flatnonzero((raw[:-1] == RETURN) & (raw[1:] != FEED))
            if lone.size:
                do = "End lines with a line feed, and put no carriage return into fields."
                raise self._wrong_line(data, int(lone[0]), "holds a carriage return that ends no line", do)
        quoted = self._quotes.pass_over(raw, data) if self._quotes else None
        return self._without_blanks(data, raw, quoted)

    def _wrong_line(self, data: bytes, at: int, so: str, do: str) -> RequestError:
        return RequestError(self._place.asked, f"line {self._number + 1 + data.count(10, 0, at)} {so}", do)

    def _without_blanks(self, data: bytes, raw: NDArray[np.uint8], quoted: Spans | None) -> bytes:
        ends = np.flatnonzero(raw == FEED)
        starts = np.concatenate([[0], ends[:-1] + 1])
        blank = (ends == starts) | ((ends == starts + 1) & (raw[starts] == RETURN))
        inside = np.zeros(starts.size, np.bool_) if quoted is None else quoted.hold(starts)
        blank &= ~inside & (not self._keep_blank_lines)
        self._count(~blank & ~inside)
        if not blank.any():
            return data
        self.blanks += int(blank.sum())
        kept = np.ones(raw.size, np.bool_)
        kept[starts[blank]] = kept[ends[blank]] = False
        return raw[kept].tobytes()

    def _count(self, begins: NDArray[np.bool_]) -> None:
        """Add the lines of a block, ``[lines]`` True where a record begins, and note the line of the record that is sought."""
        records = int(begins.sum())
        if self._records < self._sought <= self._records + records:
            self._found = self._number + int(np.flatnonzero(begins)[self._sought - self._records - 1]) + 1
        self._records += records
        self._number += begins.size


class LineFile:
    """Blocks as the readable file that pyarrow's parsers take. One read gives at most one block, so that a parser's blocks end with whole records."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._held, self._at = blocks, b"", 0
        self.closed = False

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def writable(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True

    def read(self, size: int = -1) -> bytes:
        while self._at == len(self._held):
            block = next(self._blocks, None)
            if block is None:
                return b""
            self._held, self._at = block, 0
        end = len(self._held) if size < 0 else self._at + size
        part = self._held[self._at : end]
        self._at += len(part)
        return part
