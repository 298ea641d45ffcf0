"""Tokens to pieces: text, tokens told of once, and the word at the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.openai.fakes import EOS
from tlserve.engine.request import FinishReason, RequestId, TokenOut
from tlserve.openai.choice import Choice, Piece


def outs(data: bytes, *, finish: FinishReason) -> list[TokenOut]:
    """A token for each byte. With STOP an EOS token follows, with LENGTH the last byte is the last token."""
    tokens = [*data, EOS] if finish is FinishReason.STOP else list(data)
    last = len(tokens) - 1
    return [TokenOut(RequestId(0), token, finish if i == last else None) for i, token in enumerate(tokens)]


def pieces(choice: Choice, tokens: Iterable[TokenOut]) -> list[Piece]:
    found = []
    for out in tokens:
        if choice.finish_reason is not None:
            break
        piece = choice.push(out)
        if piece is not None:
            found.append(piece)
    return found


def byte(token: int) -> bytes:
    return bytes([token])


def texts(found: list[Piece]) -> list[str]:
    return [piece.text for piece in found]


@pytest.mark.parametrize(("finish", "word"), [(FinishReason.STOP, "stop"), (FinishReason.LENGTH, "length")])
def test_only_the_last_piece_has_a_finish_reason(finish: FinishReason, word: str) -> None:
    found = pieces(Choice(byte), outs(b"abc", finish=finish))
    assert "".join(texts(found)) == "abc"
    assert [piece.finish_reason for piece in found] == [None] * (len(found) - 1) + [word]


def test_the_token_that_stopped_the_request_is_counted_and_not_shown() -> None:
    choice = Choice(byte)
    assert texts(pieces(choice, outs(b"a", finish=FinishReason.STOP))) == ["a", ""]
    assert choice.num_tokens == 2


def test_a_token_without_text_yields_no_piece_except_as_the_last() -> None:
    choice = Choice(byte)
    found = pieces(choice, outs("😀x".encode() + "é".encode()[:1], finish=FinishReason.LENGTH))
    assert texts(found) == ["😀", "x", "�"]
    assert choice.num_tokens == 6


def test_text_held_back_for_a_stop_string_comes_with_the_end() -> None:
    for finish, word in ((FinishReason.STOP, "stop"), (FinishReason.LENGTH, "length")):
        found = pieces(Choice(byte, stop=["?!"]), outs(b"sky?", finish=finish))
        assert ("".join(texts(found)), found[-1].finish_reason) == ("sky?", word)


def test_a_stop_string_ends_the_choice_across_tokens() -> None:
    choice = Choice(byte, stop=["de"])
    found = pieces(choice, outs(b"bcdefgh", finish=FinishReason.LENGTH))
    assert texts(found) == ["b", "c", ""]
    assert choice.finish_reason == "stop"
    assert choice.num_tokens == 4


def test_a_stop_string_completed_by_the_last_allowed_token_is_stop() -> None:
    found = pieces(Choice(byte, stop=["de"]), outs(b"cde", finish=FinishReason.LENGTH))
    assert ("".join(texts(found)), found[-1].finish_reason) == ("c", "stop")


def test_a_stop_string_in_doubt_is_settled_at_the_end() -> None:
    """ "xyz" had begun before "y", and never ended: the earlier place is still the leftmost that did match."""
    found = pieces(Choice(byte, stop=["xyz", "y"]), outs(b"axy", finish=FinishReason.LENGTH))
    assert ("".join(texts(found)), found[-1].finish_reason) == ("ax", "stop")


def test_min_tokens_delays_stop_strings() -> None:
    """The text of the first tokens is neither matched nor held back; a match begins after it."""
    for min_tokens, text in ((0, ""), (1, "ab"), (2, "ab"), (4, "abab"), (5, "ababab")):
        choice = Choice(byte, stop=["ab"], min_tokens=min_tokens)
        found = pieces(choice, outs(b"abababab", finish=FinishReason.LENGTH))
        assert ("".join(texts(found)), choice.finish_reason) == (text, "stop")
        assert texts(found)[:min_tokens] == list(text[:min_tokens])


def test_min_tokens_in_the_middle_of_a_character_loses_nothing() -> None:
    choice = Choice(byte, stop=["é!"], min_tokens=1)
    found = pieces(choice, outs("ééé!".encode(), finish=FinishReason.LENGTH))
    assert ("".join(texts(found)), choice.finish_reason) == ("éé", "stop")


def test_every_token_is_told_of_once_with_the_place_of_its_text() -> None:
    choice = Choice(byte, stop=["zz"], keep_tokens=True)
    found = pieces(choice, outs("aé😀zb".encode(), finish=FinishReason.STOP))
    assert texts(found) == ["a", "é", "😀", "zb", ""]
    assert [[at.text_offset for at in piece.tokens] for piece in found] == [[0], [1, 1], [2, 2, 2, 2], [3, 4], [5]]
    tokens = [at.out.token for piece in found for at in piece.tokens]
    assert bytes(tokens) == "aé😀zb".encode() + bytes([EOS])


@given(
    data=st.binary(min_size=1, max_size=24) | st.text(alphabet="ab漢😀", min_size=1, max_size=12).map(str.encode),
    stop=st.lists(st.text(alphabet="ab漢", min_size=1, max_size=3), max_size=4),
    min_tokens=st.integers(0, 4),
    finish=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_pieces_keep_the_rules(data: bytes, stop: list[str], min_tokens: int, finish: FinishReason) -> None:
    choice = Choice(byte, stop=stop, min_tokens=min_tokens, keep_tokens=True)
    found = pieces(choice, outs(data, finish=finish))
    assert all(piece.text for piece in found[:-1])
    assert [piece.finish_reason for piece in found[:-1]] == [None] * (len(found) - 1)
    assert found[-1].finish_reason == choice.finish_reason is not None
    assert sum(len(piece.tokens) for piece in found) == choice.num_tokens
    text = "".join(texts(found))
    whole = data.decode("utf-8", "replace")
    assert whole.startswith(text)
    if text != whole:
        assert choice.finish_reason == "stop"
        assert any(whole[len(text) :].startswith(one) for one in stop)
    if not min_tokens:
        assert not any(one in text for one in stop)


def offsets(*tokens: bytes, finish: FinishReason = FinishReason.LENGTH) -> list[int]:
    """Where the tokens of these bytes begin; with STOP an EOS follows."""
    choice = Choice(lambda index: tokens[index], keep_tokens=True)
    last = len(tokens) - (finish is FinishReason.LENGTH)
    outs = [TokenOut(RequestId(0), index, finish if index == last else None) for index in range(last + 1)]
    return [at.text_offset for piece in pieces(choice, outs) for at in piece.tokens]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ((b"\xf0", b"\xf1", b"\xf2", b"\xf3"), [0, 1, 2, 3]),
        ((b"\xf0", b"A", b"B"), [0, 1, 2]),
        ((b"\xf0\x9f", b"\x98", b"\x80", b"A"), [0, 0, 0, 1]),
        ((b"\xf0\x9f", b"\xff", b"A"), [0, 1, 2]),
        ((b"\xf0", b"\x80", b"A"), [0, 1, 2]),  # an overlong form: no character has both
        ((b"a\xc3", b"\xa9\xc3", b"b"), [0, 1, 3]),
        ((b"\xef", b"\xbf", b"\xbd", b"A"), [0, 0, 0, 1]),  # U+FFFD itself, written by the model
        ((b"\xef", b"\xbf", b"A"), [0, 0, 1]),
        ((b"\xc3", b"", b"\xa9"), [0, 0, 0]),  # a control token in between
        ((b"\xc3", b""), [0, 1]),
    ],
)
def test_a_token_begins_behind_the_character_that_it_cuts_off(tokens: Sequence[bytes], expected: list[int]) -> None:
    assert offsets(*tokens) == expected


def test_the_token_that_ends_a_text_begins_at_its_end() -> None:
    for token, length in ((b"ab", 2), (b"\xf0\x9f", 1), (b"", 0)):
        assert offsets(token, finish=FinishReason.STOP) == [0, length]


@given(st.lists(st.binary(max_size=3) | st.sampled_from(["😀".encode()[:2], "😀".encode()[2:]]), max_size=8))
def test_offsets_are_places_in_the_text_where_tokens_can_begin(tokens: list[bytes]) -> None:
    """The text before a token is what its bytes alone decode to, but for a character that goes on."""
    whole = b"".join(tokens).decode("utf-8", "replace")
    places = offsets(*tokens, finish=FinishReason.STOP)
    assert places[-1] == len(whole)
    for index, token in enumerate(tokens):
        before = b"".join(tokens[:index])
        if token:
            is_continued = len((before + token[:1]).decode("utf-8", "replace")) == len(
                before.decode("utf-8", "replace")
            )
            assert places[index] == len(before.decode("utf-8", "replace")) - is_continued


@pytest.mark.parametrize(
    ("tokens", "stop", "min_tokens", "text", "reason"),
    [
        (b"\xf0A", "\ufffdA", 1, "\ufffdA", "length"),  # began in the free token
        (b"\xf0A", "\ufffd", 1, "\ufffdA", "length"),
        (b"\xf0A", "A", 1, "\ufffd", "stop"),
        (b"\xf0\xf1A", "\ufffd", 1, "\ufffd", "stop"),  # the second one began after it
        (b"\xf0", "\ufffd", 1, "\ufffd", "length"),  # flushed by the end
        ("é!".encode(), "é", 1, "é!", "length"),  # a real character split over the border
        ("é!".encode(), "é!", 1, "é!", "length"),
        ("é!".encode(), "!", 1, "é", "stop"),
        ("😀😀".encode(), "😀", 3, "😀", "stop"),
    ],
)
def test_a_character_that_begins_in_the_free_tokens_begins_no_stop_string(
    tokens: bytes, stop: str, min_tokens: int, text: str, reason: str
) -> None:
    choice = Choice(byte, stop=[stop], min_tokens=min_tokens)
    found = pieces(choice, outs(tokens, finish=FinishReason.LENGTH))
    assert ("".join(texts(found)), choice.finish_reason) == (text, reason)
