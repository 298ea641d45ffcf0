"""TextStream against a reference that sees the whole output at once.

Invariant: any bytes, split anywhere, with any stop strings, give the text of the whole, and hold no more than
must be held.
"""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlserve.text.text_stream import TextStream


def whole_text(data: bytes, stops: list[str]) -> tuple[str, bool]:
    """What must have been sent in the end, and whether a stop string ended it."""
    text = data.decode("utf-8", "replace")
    places = [place for place in map(text.find, stops) if place >= 0]
    return (text[: min(places)], True) if places else (text, False)


def stream(pieces: list[bytes], stops: list[str]) -> tuple[list[str], bool]:
    text_stream = TextStream(stops)
    deltas = [text_stream.push(piece) for piece in pieces]
    deltas.append(text_stream.finish())
    return deltas, text_stream.stopped


def split_at(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(places), len(data)]
    return [data[first:last] for first, last in itertools.pairwise(edges)]


def all_splits(data: bytes) -> list[list[bytes]]:
    """Every way to cut `data` into pieces that are not empty."""
    if not data:
        return [[]]
    return [[data[:size], *rest] for size in range(1, len(data) + 1) for rest in all_splits(data[size:])]


@pytest.mark.parametrize(
    ("data", "stops"),
    [
        ("a😀ď".encode(), []),
        ("ab😀c".encode(), ["😀"]),
        (b"a\xf0\x9f\x98b", []),
        (b"\xe0\x80\xed\xa0\x80\xff", []),
        (b"\xf4\x90\x80\x80\xc3", ["\ufffd\ufffd"]),
        (b"abcd", ["bc", "abcd"]),
        (b"xabcey", ["bc", "abcd"]),
        (b"aabaab", ["aabaac", "baa"]),
        (b"\n\n\nab", ["\n\nb", "\na"]),
        (b"aaaaab", ["aab"]),
    ],
)
def test_every_split_of_the_bytes_gives_the_text_of_the_whole(data: bytes, stops: list[str]) -> None:
    """Concatenated deltas, and the stop, never depend on token borders."""
    for pieces in all_splits(data):
        deltas, stopped = stream(pieces, stops)
        assert ("".join(deltas), stopped) == whole_text(data, stops), pieces


@given(
    st.text(alphabet="ab😀", max_size=30).map(str.encode) | st.binary(max_size=30),
    st.lists(st.text(alphabet="ab😀\ufffd", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(0, 30), max_size=30),
)
def test_any_split_of_any_bytes_gives_the_text_of_the_whole(data: bytes, stops: list[str], places: list[int]) -> None:
    pieces = split_at(data, [min(place, len(data)) for place in places])
    deltas, stopped = stream(pieces, stops)
    assert ("".join(deltas), stopped) == whole_text(data, stops)


@given(
    st.text(alphabet="abé", max_size=20),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=5), max_size=4),
)
def test_held_text_is_the_longest_end_that_begins_a_stop_string(text: str, stops: list[str]) -> None:
    """Nothing is delayed without need, and nothing that may begin a stop string is sent."""
    text_stream, sent = TextStream(stops), ""
    for place, char in enumerate(text):
        sent += text_stream.push(char.encode())
        seen = text[: place + 1]
        if any(stop in seen for stop in stops):
            break
        held = max((n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0)
        assert sent == seen[: len(seen) - held]


def test_ascii_before_a_split_character_is_not_delayed() -> None:
    """B054: one byte per token; whole characters leave at once and no U+FFFD appears."""
    text = "a😀ď漢👨‍👩‍👧é"
    text_stream = TextStream()
    deltas = [text_stream.push(bytes([byte])) for byte in text.encode()]
    assert deltas[0] == "a"
    assert deltas[1:5] == ["", "", "", "😀"]
    assert "".join(deltas) == text
    assert text_stream.finish() == ""


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_a_character_cut_off_at_the_end_is_one_replacement(num_bytes: int) -> None:
    """B055: the pending bytes are neither dropped nor multiplied."""
    text_stream = TextStream()
    assert text_stream.push(b"ok" + "😀".encode()[:num_bytes]) == "ok"
    assert text_stream.finish() == "\ufffd"
    assert text_stream.finish() == ""


def test_held_prefix_is_sent_when_generation_ends_otherwise() -> None:
    """B002: `?` begins `?!`, and no `!` comes."""
    deltas, stopped = stream([b"sky", b"?"], ["?!"])
    assert deltas == ["sky", "", "?"]
    assert not stopped


@pytest.mark.parametrize(("stop", "text"), [("E", "D"), ("EF", "D"), ("FG", "DE")])
def test_stop_string_inside_or_across_tokens_is_cut_off(stop: str, text: str) -> None:
    """B059."""
    deltas, stopped = stream([b"DEF", b"GH"], [stop])
    assert ("".join(deltas), stopped) == (text, True)


def test_stop_string_that_never_begins_delays_nothing() -> None:
    """B060: a long stop string holds back only what matches it."""
    text_stream = TextStream(["z" * 30])
    assert [text_stream.push(piece) for piece in (b"abc", b"dz", b"e")] == ["abc", "d", "ze"]


def test_the_earliest_place_wins_over_all_stop_strings() -> None:
    """B064."""
    for pieces in ([b"xyz"], [b"x", b"y", b"z"]):
        deltas, stopped = stream(pieces, ["yz", "xy"])
        assert ("".join(deltas), stopped) == ("", True)


def test_newline_and_emoji_stop_strings_match_when_their_bytes_are_split() -> None:
    """B065."""
    assert stream([b"a\n", b"b"], ["\n"])[0] == ["a", "", ""]
    emoji = "😀".encode()
    assert stream([b"a" + emoji[:1], emoji[1:3], emoji[3:] + b"b"], ["😀"]) == (["a", "", "", ""], True)


def test_a_stop_string_waits_while_an_earlier_one_may_still_complete() -> None:
    """`bc` is found inside what may become `abcd`; which of them ends the output is settled by what follows."""
    text_stream = TextStream(["bc", "abcd"])
    assert text_stream.push(b"abc") == ""
    assert not text_stream.stopped
    assert text_stream.push(b"d") == ""
    assert text_stream.stopped

    text_stream = TextStream(["bc", "abcd"])
    text_stream.push(b"abc")
    assert text_stream.finish() == "a"
    assert text_stream.stopped


def test_nothing_comes_after_the_stop() -> None:
    text_stream = TextStream(["de"])
    assert [text_stream.push(piece) for piece in (b"b", b"c", b"d", b"e")] == ["b", "c", "", ""]
    assert text_stream.stopped
    assert text_stream.push(b"more") == ""
    assert text_stream.finish() == ""


def test_nothing_comes_after_finish() -> None:
    text_stream = TextStream()
    text_stream.push(b"a")
    text_stream.finish()
    assert text_stream.push(b"b") == ""


def test_long_stop_strings_and_long_outputs_take_linear_time() -> None:
    """A megabyte of stop string that almost matches, token by token: quadratic work would take minutes."""
    stops = ["a" * 1_000_000 + end for end in "bcd"]
    text_stream = TextStream(stops)
    start = time.perf_counter()
    for _ in range(50_000):
        assert text_stream.push(b"aaaa") == ""
    assert text_stream.push(b"e") == "a" * 200_000 + "e"
    assert time.perf_counter() - start < 5
