"""Reading the events of an answer."""

from __future__ import annotations

from tlserve.conform.answer import Answer


def test_data_is_found_among_the_other_fields_of_an_event() -> None:
    body = b': hello\n\nevent: message\nid: 1\ndata: {"a":\ndata: 1}\n\ndata: {"a": 2}\r\n\r\n: bye\ndata: [DONE]\n\n'
    answer = Answer("GET /", 200, (), body)
    assert [event["a"].value for event in answer.events()] == [1, 2]
    assert answer.is_done
