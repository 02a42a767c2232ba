"""Following quotes block by block, against a parser that goes from character to character."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_data.formats.quotes import Quotes

PIECES = ['"', '""', ",", "\n", "\r\n", "a", '",', ',"', '"\n', '\n"', "ab"]
LINES = st.lists(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), min_size=1, max_size=5).map(lambda parts: [f"{p}\n" for p in parts])


def quoted(text: str) -> list[bool]:
    """For each character that is no quote, whether it lies in a quoted field; False for quotes."""
    state, out = "begin", []
    for char in text:
        if state == "closing" and char == '"':
            state = "quoted"  # the second of two: a quote of the field
            out.append(False)
            continue
        if state == "quoted":
            out.append(char != '"')
            state = "closing" if char == '"' else state
            continue
        out.append(False)
        state = "quoted" if char == '"' and state == "begin" else "begin" if char in ",\n" else "plain"
    return out


def followed(blocks: list[str]) -> list[bool]:
    quotes, out = Quotes(b","), []
    for block in blocks:
        raw = np.frombuffer(block.encode(), np.uint8)
        spans = quotes.pass_over(raw, block.encode())
        out += (spans.hold(np.arange(raw.size)) & (raw != ord('"'))).tolist()
    return out


@settings(max_examples=150, deadline=None)
@given(LINES)
def test_blocks_are_followed_as_characters_are(lines: list[str]) -> None:
    blocks = [line for part in lines for line in part.splitlines(keepends=True)]
    text = "".join(blocks)
    expected, found = quoted(text), followed(blocks)
    assert found == followed([text]) == expected


@pytest.mark.parametrize("lines", [['a,"b\n', "\n", 'c",d\n'], ['x"y,z\n', '"q\n', "\n", 'r",2\n'], ['"a""\n', "\n", 'b",1\n'], ['"a"b\n', "\n"]])
def test_known_shapes(lines: list[str]) -> None:
    assert followed(lines) == quoted("".join(lines))


def test_a_field_that_is_open_at_the_end_of_a_block_stays_open() -> None:
    quotes = Quotes(b"\t")
    states = []
    for block in (b'a\t"b\n', b"c\n", b'd""e\n', b'f"\tg\n', b"h\n"):
        quotes.pass_over(np.frombuffer(block, np.uint8), block)
        states.append(quotes.open)
    assert states == [True, True, True, False, False]


def test_the_comparison_notices_a_parser_that_only_counts_quotes() -> None:
    text = 'x"y\n\n'
    counted = [text[:at].count('"') % 2 == 1 for at in range(len(text))]
    assert [counted[at] for at in (3, 4)] == [True, True]
    assert [quoted(text)[at] for at in (3, 4)] == [False, False] == [followed([text])[at] for at in (3, 4)]
