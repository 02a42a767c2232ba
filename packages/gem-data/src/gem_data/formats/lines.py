"""Text of any encoding as blocks of whole UTF-8 lines, checked, with one byte between fields."""

import codecs
import re
from collections.abc import Iterator
from typing import Any

from gem_core.spec import RequestError
from gem_data.formats.files import Location, open_bytes

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
        blank_lines: whether blank lines stay; those left out are counted in ``blanks``, except in quotes.
        quote: whether double quotes may enclose line ends.
    """

    def __init__(self, place: Location, encoding: str, separator: str = ",", *, blank_lines: bool = True, quote: bool = False) -> None:
        self._place, self._encoding, self._quote = place, encoding, quote
        self._separator = separator.encode()
        self.keep_blank_lines = blank_lines
        self.stand_in = separator if len(self._separator) == 1 else next(s for s in STAND_INS if s not in separator)
        self.number = 0
        """Whole lines passed so far, blank ones included."""
        self.blanks: list[int] = []
        """Numbers of the blank lines left out, from 1."""
        self._open_quote = False
        try:
            self._decoder = codecs.getincrementaldecoder(encoding)()
        except LookupError as error:
            raise RequestError(place.asked, f"{encoding!r} is no encoding", "Name one, such as utf-8 or latin-1.") from error

    def blocks(self) -> Iterator[bytes]:
        """Parts of about 1 MiB of whole lines.

        Raises:
            RequestError: a byte is not of the encoding, a line is longer than 16 MiB, or the compressed file is damaged.
        """
        rest = b""
        for text in self._texts():
            data = rest + text
            end = data.rfind(b"\n") + 1
            rest = data[end:]
            if len(rest) > LONGEST_LINE:
                so = f"line {self.number + data.count(10) + 1} is longer than {LONGEST_LINE} bytes"
                raise RequestError(self._place.asked, so, "Check the file and its line ends.")
            if end:
                yield self._lines(data[:end])
        if rest:
            yield self._lines(rest + b"\n")

    def original(self, number: int) -> int:
        """The number in the file of the line that is the ``number``-th of those that ``blocks`` gave."""
        for blank in self.blanks:
            number += blank <= number
        return number

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
        first = self.number + 1
        self.number += data.count(10)
        if len(self._separator) > 1:
            at = data.find(self.stand_in.encode())
            if at >= 0:
                so = f"line {first + data.count(10, 0, at)} holds the character {self.stand_in!r}, which stands for its separator while it is parsed"
                raise RequestError(self._place.asked, so, "Remove that character.")
            data = data.replace(self._separator, self.stand_in.encode())
        if not self.keep_blank_lines:
            data = self._without_blanks(data, first)
        return data

    def _without_blanks(self, data: bytes, first: int) -> bytes:
        if not re.search(rb"(^|\n)\r?\n", data):
            if self._quote:
                self._open_quote ^= data.count(b'"') % 2 == 1
            return data
        kept = []
        for number, line in enumerate(data.splitlines(keepends=True) if b"\r" not in data else re.findall(rb"[^\n]*\n", data), start=first):
            if not self._open_quote and not line.strip(b"\r\n"):
                self.blanks.append(number)
                continue
            if self._quote:
                self._open_quote ^= line.count(b'"') % 2 == 1
            kept.append(line)
        return b"".join(kept)


class LineFile:
    """Blocks as the readable file that pyarrow's parsers take; an error is kept for the caller, since parsers wrap it."""

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
