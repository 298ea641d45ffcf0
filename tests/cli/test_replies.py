"""What clients read of a server: chunks of the right types, events of bounded size, and nothing that ends a command."""

from __future__ import annotations

import io
import json
from collections.abc import Awaitable, Callable, Sequence

import pytest
import trio
import trio.testing

from tests.cli.typed import typed
from tlserve.__main__ import main
from tlserve.cli import chat_turn
from tlserve.cli.chat_session import Session
from tlserve.cli.load_target import Answer, Target, TargetError, find_model
from tlserve.cli.refusal import refusal
from tlserve.cli.replies import MAX_EVENT, NotThisApi, SseParser, decode_chunk, sse_events
from tlserve.cli.terminal import Terminal
from tlserve.http.client import ClientConnection, Origin, connect

DEEP = b"[" * 200_000
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
DONE = b"data: [DONE]\n\n"


COUNTS = {"completion_tokens": 1, "prompt_tokens": 1}


def chunk(content: object = "a", **fields: object) -> bytes:
    return json.dumps({"choices": [{"delta": {"content": content}}]} | fields).encode()


HOSTILE_CHUNKS = {
    "deep": DEEP,
    "deep inside": b'{"choices":[],"x":' + DEEP,
    "a list": b"[1]",
    "no choices": b"{}",
    "text that is a number": chunk(5),
    "counts in words": chunk(usage={"completion_tokens": "many", "prompt_tokens": 1}),
    "counts in a list": chunk(usage=[1]),
    "details in a list": chunk(usage=COUNTS | {"prompt_tokens_details": [3]}),
    "a count of 4,001 digits": chunk(usage=COUNTS).replace(b": 1", b": " + b"1" * 4001),
    "a count below 0": chunk(usage=COUNTS | {"prompt_tokens": -1}),
    "not a number": chunk(usage=COUNTS).replace(b": 1", b": NaN"),
    "an error without words": b'{"error":{"message":[1]}}',
    "half a surrogate pair": chunk("a\ud83d"),
    "no UTF-8": b'{"choices":[{"delta":{"content":"\xff"}}]}',
}  # fmt: skip
HOSTILE = pytest.mark.parametrize("data", HOSTILE_CHUNKS.values(), ids=HOSTILE_CHUNKS)


@HOSTILE
def test_a_chunk_of_other_types_is_one_kind_of_error(data: bytes) -> None:
    with pytest.raises(NotThisApi):
        decode_chunk(data)


def test_what_a_client_does_not_use_may_be_anything() -> None:
    read = decode_chunk(chunk("a", id=[1], created="x", error=None, usage=None, model={"a": {}}))
    assert read.choices is not None
    assert [choice.content for choice in read.choices] == ["a"]


# A server that says what it is told to, on a real socket


Answering = Callable[..., Awaitable[Origin]]


@pytest.fixture
async def answering(nursery: trio.Nursery) -> Answering:
    """Starts a server that answers every request with these bytes, the last of them for ever where it is told to."""

    async def start(*pieces: bytes, for_ever: bool = False) -> Origin:
        async def handle(stream: trio.SocketStream) -> None:
            async with stream:
                await stream.receive_some()
                try:
                    for piece in pieces:
                        await stream.send_all(piece)
                    while for_ever:
                        await stream.send_all(pieces[-1])
                except trio.BrokenResourceError:
                    pass  # the client has had enough

        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, handle, listeners)
        return Origin("127.0.0.1", listeners[0].socket.getsockname()[1], False, "/v1")

    return start


async def talk(origin: Origin, *lines: str) -> tuple[str, str]:
    """What a session shows and what it complains of."""
    shown, said = io.StringIO(), io.StringIO()
    session = Session(origin, (), {"model": "m"}, Terminal(shown), Terminal(said))
    await trio.to_thread.run_sync(session.talk, typed(*lines))
    return shown.getvalue(), said.getvalue()


@HOSTILE
async def test_a_hostile_chunk_is_one_line_and_the_conversation_goes_on(answering: Answering, data: bytes) -> None:
    origin = await answering(HEAD + b"data: " + chunk("hi") + b"\n\ndata: " + data + b"\n\n" + DONE)
    shown, said = await talk(origin, "one", "/stats", "two", "/stats")
    assert said.count("\n") == said.count("not a chunk of this API: ") == 2
    assert shown.count("hi\n") == shown.count("1 tokens, one token") == 2


async def test_an_event_without_an_end_is_given_up(answering: Answering) -> None:
    origin = await answering(HEAD + b"data: ", b"x" * 65_536, for_ever=True)
    assert (await talk(origin, "one"))[1] == f"an event of more than {MAX_EVENT} bytes\n"


async def test_a_reason_without_an_end_is_given_up(answering: Answering) -> None:
    origin = await answering(b"HTTP/1.1 500 No\r\n\r\n", b"x" * 65_536, for_ever=True)
    assert (await talk(origin, "one"))[1] == "the reply is longer than 8388608 bytes\n"


async def test_a_reason_that_does_not_come_is_not_waited_for(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def begin(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 503 No\r\n\r\nbecause")
        await trio.sleep_forever()

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, begin, listeners)
    monkeypatch.setattr(chat_turn, "REFUSAL_TIMEOUT", 0.1)
    origin = Origin("127.0.0.1", listeners[0].socket.getsockname()[1], False, "/v1")
    assert (await talk(origin, "one"))[1] == "503: no reason came\n"


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (HEAD + b"data: " + DEEP + b"\n\n", "not a chunk of this API"),
        (HEAD + b"data: " + b"x" * (MAX_EVENT + 1), "not a chunk of this API"),
        (b"HTTP/1.1 500 No\r\nConnection: close\r\n\r\n" + DEEP, "500"),
    ],
    ids=["deep", "long", "deep error"],
)
async def test_a_measured_server_may_say_anything(answering: Answering, data: bytes, error: str) -> None:
    origin = await answering(data)
    answer = Answer(start=trio.current_time())
    connection = await connect(origin)
    await Target(origin=origin, endpoint="chat", model="m").ask(connection, answer, "a", 1)
    await connection.aclose()
    assert answer.error == error


async def test_a_measured_server_whose_reason_has_no_end_is_told_so(
    answering: Answering, capsys: pytest.CaptureFixture[str]
) -> None:
    origin = await answering(b"HTTP/1.1 500 No\r\n\r\n", b"x" * 65_536, for_ever=True)
    command = ["load", "--base-url", f"http://{origin.authority}/v1", "--model", "m"]
    assert await trio.to_thread.run_sync(main, command) == 1
    assert capsys.readouterr().err.endswith("1 token failed: the reply is longer than 8388608 bytes\n")


@pytest.mark.parametrize("body", [DEEP, b'{"data":[]}', b'{"data":[{"id":5}]}', b"", b"\xff"])
async def test_a_list_of_models_that_is_none_is_said_to_be_so(answering: Answering, body: bytes) -> None:
    with pytest.raises(TargetError, match=r"^GET /v1/models names no model; name it with --model$"):
        await find_model(await answering(HEAD + body), patience=60)


async def test_a_list_of_models_without_an_end_is_given_up(answering: Answering) -> None:
    with pytest.raises(TargetError, match="longer than 8388608 bytes"):
        await find_model(await answering(HEAD, b" " * 65_536, for_ever=True), patience=60)


async def test_a_list_of_models_that_does_not_come_is_waited_for_so_long(nursery: trio.Nursery) -> None:
    async def never(stream: trio.SocketStream) -> None:
        await trio.sleep_forever()

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, never, listeners)
    port = listeners[0].socket.getsockname()[1]
    with pytest.raises(TargetError, match=f"^127.0.0.1:{port} gave no answer within 0.1 s$"):
        await find_model(Origin("127.0.0.1", port, False, "/v1"), patience=0.1)


def test_a_refusal_that_is_no_document_is_quoted_and_cut() -> None:
    assert refusal(500, DEEP) == "500: " + "[" * 300
    assert refusal(400, b'{"error":{"message":"no","code":7}}') == "400: no"


# Events, however they are cut


async def events_of(pieces: Sequence[bytes]) -> list[bytes]:
    ours, theirs = trio.testing.memory_stream_pair()
    connection = ClientConnection(ours, Origin("a", 80, False, ""))

    async def serve() -> None:
        await theirs.send_all(HEAD)
        for piece in pieces:
            await theirs.send_all(piece)
            await trio.testing.wait_all_tasks_blocked()
        await theirs.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        await connection.request("GET", "/")
        found = [event async for event in sse_events(connection)]
    return found


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
async def test_events_are_the_same_however_they_are_cut(end: bytes) -> None:
    stream = b"data: a||: ping||data:b|data: c|||data: [DONE]||data: cut".replace(b"|", end)
    expected = [b"a", b"b\nc", b"[DONE]"]
    assert await events_of([stream]) == expected
    for at in range(1, len(stream)):
        assert await events_of([stream[:at], stream[at:]]) == expected
    assert await events_of([stream[at : at + 1] for at in range(len(stream))]) == expected


EVENTS = {
    "other fields before": (b"event: message|id: 1|data: a", [b"a"]),
    "other fields after": (b"data: a|retry: 5", [b"a"]),
    "a comment before": (b": ping|data: a", [b"a"]),
    "data on both sides": (b"data: a|id: 1|data:b", [b"a\nb"]),
    "data without a value": (b"data|data: a", [b"\na"]),
    "no data": (b"event: data|id: 1|: data: a", []),
    "a field that begins like data": (b"database: a", []),
    "blank lines before": (b"||id: 1|data: a", [b"a"]),
}


@pytest.mark.parametrize(("event", "data"), EVENTS.values(), ids=EVENTS)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
def test_the_data_of_an_event_may_stand_among_other_fields(event: bytes, data: list[bytes], end: bytes) -> None:
    assert SseParser().feed(event.replace(b"|", end) + 2 * end) == data


ESCAPES = "a\x1b[2J\x9b31m\u202e\u200f\u061cb"


async def test_conform_and_load_show_what_a_server_hides(
    answering: Answering, capsys: pytest.CaptureFixture[str]
) -> None:
    body = json.dumps({"error": {"message": ESCAPES}}, ensure_ascii=False).encode()
    origin = await answering(b"HTTP/1.1 400 No\r\nConnection: close\r\n\r\n" + body)
    url = f"http://{origin.authority}/v1"
    commands = (
        ["load", "--base-url", url],
        ["load", "--base-url", url, "--model", "m"],
        ["conform", "--base-url", url],
        ["conform", "--base-url", url, "--model", "m", "--only", "models.list"],
    )
    for command in commands:
        assert await trio.to_thread.run_sync(main, command) != 0
        printed = "".join(capsys.readouterr())
        assert "\\x9b31m\\u202e\\u200f\\u061cb" in printed
        assert not set("\x1b\x9b\u202e\u200f\u061c") & set(printed)
