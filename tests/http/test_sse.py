from __future__ import annotations

import json

import pytest

from tlserve.http import sse


def test_an_event_is_one_data_line_and_a_blank_line() -> None:
    assert sse.event(b'{"a":1}') == b'data: {"a":1}\n\n'


def test_the_last_event_and_the_ping_are_the_ones_clients_know() -> None:
    assert sse.DONE == b"data: [DONE]\n\n"
    assert sse.PING == b": ping\n\n"


@pytest.mark.parametrize("character", ["\u0085", "\u2028", "\u2029"])
def test_characters_that_end_a_line_in_unicode_are_escaped_and_mean_the_same(character: str) -> None:
    document = {"text": f"é{character}漢"}
    line = sse.event(json.dumps(document, ensure_ascii=False).encode())
    assert len(line.decode().splitlines()) == 2
    assert json.loads(line.removeprefix(b"data: ")) == document
