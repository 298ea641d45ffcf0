"""Running cases against servers that hang, break off or send nonsense: each case ends, and says what came."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio

from tlserve.conform.case import Case, Failed, Skipped
from tlserve.conform.catalogue import ALL_CASES
from tlserve.conform.run import NUM_AT_ONCE, Result, run_case, run_cases
from tlserve.conform.subject import Subject, Target
from tlserve.http.client import MAX_REPLY, Origin

Handler = Callable[[trio.SocketStream], Awaitable[None]]
NOWHERE = Target(api=Origin.parse("http://127.0.0.1:1/v1"), model="m")
OK = b"HTTP/1.1 200 OK\r\n"


def answer(body: bytes, content_type: bytes = b"application/json") -> bytes:
    return (
        OK + b"Content-Type: %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (content_type, len(body)) + body
    )


def says(data: bytes) -> Handler:
    """A server that reads something, sends ``data`` and closes."""

    async def handler(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(data)
        await stream.send_eof()

    return handler


async def hangs(stream: trio.SocketStream) -> None:
    await trio.sleep_forever()


async def hangs_within_a_stream(stream: trio.SocketStream) -> None:
    await stream.send_all(OK + b"Content-Type: text/event-stream\r\n\r\ndata: {")
    await trio.sleep_forever()


async def never_ends(stream: trio.SocketStream) -> None:
    await stream.send_all(OK + b"Content-Type: application/json\r\n\r\n")
    while True:
        await stream.send_all(b"[" * 65_536)


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[Target]:
    async def serve(stream: trio.SocketStream) -> None:
        with contextlib.suppress(trio.BrokenResourceError):  # of a client that has heard enough
            await handler(stream)

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        origin = Origin.parse(f"http://127.0.0.1:{port}")
        yield Target(api=Origin.parse(f"http://127.0.0.1:{port}/v1"), model="m", health=origin)
        nursery.cancel_scope.cancel()


def case(check: Callable[[Subject], Awaitable[None]], *, is_alone: bool = False, id: str = "a.b") -> Case:
    return Case(id=id, rule="a rule", page="api.md", level="core", check=check, is_alone=is_alone)


async def passes(server: Subject) -> None: ...


def named(id: str) -> Case:
    return next(case for case in ALL_CASES if case.id == id)


LYING: list[tuple[Handler, str]] = [
    (says(b""), "server closed the connection|not valid HTTP"),
    (says(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), "not valid HTTP"),
    (says(answer(b"<html>hello</html>", b"text/html")), "as text/html"),
    (says(answer(b"\xff\xfe")), "application/json"),
    (says(answer(b"[" * 100_000)), "[[[["),
    (says(answer(b'{"object": NaN}')), "NaN is not JSON"),
    (says(answer(b"[]")), "[]"),
    (says(answer(b'{"choices": "none"}')), '"none"'),
    (says(answer(b'{"choices": [1]}')), "no such key"),
    (says(answer(b"1" * 5_000)), "1111"),
    (says(answer(b"{}")[:-1]), "broke off the answer"),
    (says(b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\nsorr"), "status 500 sorr"),
    (never_ends, f"the reply is longer than {MAX_REPLY} bytes"),
    (hangs, "none within 0.2 s"),
    (hangs_within_a_stream, "none within 0.2 s"),
]


@pytest.mark.parametrize(("handler", "came"), LYING, ids=range(len(LYING)))
async def test_an_answer_that_is_none_fails_the_case_and_is_shown(handler: Handler, came: str) -> None:
    patience = 0.2 if "within" in came else 30.0
    async with server(handler) as target:
        result = await run_case(named("chat.shape"), target, patience)
    assert result.status == "failed"
    assert "POST /chat/completions" in result.sent
    assert any(text in result.came for text in came.split("|")), result.came


@pytest.mark.parametrize("handler", [hangs_within_a_stream, says(answer(b"{}")), says(b"\x00\xff\r\n\r\n")])
async def test_every_case_ends_whatever_the_server_says(handler: Handler) -> None:
    """None passes but the few that a 200 is enough for, and none meets what it cannot read."""
    async with server(handler) as target:
        results = await run_cases(ALL_CASES, target, patience=0.05, on_result=lambda result: None)
    assert [result.case for result in results] == list(ALL_CASES)
    assert sum(result.status == "passed" for result in results) <= 4
    assert [result.detail for result in results if "that the case can read" in result.expected] == []


async def test_a_server_that_is_not_there_fails_the_case() -> None:
    result = await run_case(named("models.list"), NOWHERE, 30.0)
    assert (result.status, result.sent) == ("failed", "GET /models")
    assert "cannot connect to 127.0.0.1:1" in result.came


async def test_a_case_that_needs_the_health_port_is_skipped_without_one() -> None:
    result = await run_case(named("health.ready"), NOWHERE, 30.0)
    assert (result.status, result.reason) == ("skipped", "needs --health-url")


async def test_a_case_may_say_that_it_cannot_be_tried() -> None:
    async def check(server: Subject) -> None:
        raise Skipped("no such thing here")

    result = await run_case(case(check), NOWHERE, 30.0)
    assert (result.status, result.detail) == ("skipped", "no such thing here")


async def test_a_failure_in_one_of_several_tasks_of_a_case_is_the_cases_failure() -> None:
    async def fail() -> None:
        raise Failed(sent="a", expected="b", came="c")

    async def check(server: Subject) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)
            nursery.start_soon(trio.sleep_forever)

    result = await run_case(case(check), NOWHERE, 30.0)
    assert (result.status, result.sent, result.expected, result.came) == ("failed", "a", "b", "c")


async def test_a_fault_of_a_case_fails_it_and_leaves_the_others_alone() -> None:
    async def broken(server: Subject) -> None:
        raise KeyError("x")

    cases = [case(broken, id="a"), case(passes, id="b")]
    results = await run_cases(cases, NOWHERE, patience=30.0, on_result=lambda result: None)
    assert [result.status for result in results] == ["failed", "passed"]
    assert results[0].came == "KeyError: 'x'"


async def test_a_case_without_an_end_is_ended(autojump_clock: trio.testing.MockClock) -> None:
    async def check(server: Subject) -> None:
        server.last_sent = "POST /x"
        await trio.sleep_forever()

    result = await run_case(case(check), NOWHERE, 60.0)
    assert (result.status, result.sent, result.came) == ("failed", "POST /x", "none within 60 s")
    assert result.seconds == 60.0


async def test_cases_run_a_few_at_a_time_and_those_that_must_be_alone_are(
    autojump_clock: trio.testing.MockClock,
) -> None:
    running: set[str] = set()
    crowds: dict[str, int] = {}

    def watched(id: str, *, is_alone: bool) -> Case:
        async def check(server: Subject) -> None:
            running.add(id)
            await trio.sleep(1)
            crowds[id] = len(running)
            await trio.sleep(1)
            running.remove(id)

        return case(check, is_alone=is_alone, id=id)

    cases = [watched(f"case.{number}", is_alone=number % 3 == 0) for number in range(18)]
    ended: list[Result] = []
    results = await run_cases(cases, NOWHERE, patience=30.0, on_result=ended.append)
    assert [result.case.id for result in results] == [case.id for case in cases]
    assert {crowds[case.id] for case in cases if case.is_alone} == {1}
    assert {crowds[case.id] for case in cases if not case.is_alone} == {NUM_AT_ONCE}
    assert len(ended) == 18


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a.b.c", True),
        ("a", True),
        ("a.b", True),
        ("a.*", True),
        ("*.c", True),
        ("a.b.", False),
        ("b", False),
        ("a.bc", False),
    ],
)
def test_a_pattern_is_an_id_the_parts_it_begins_with_or_a_glob(pattern: str, names: bool) -> None:
    assert case(passes, id="a.b.c").is_named_by(pattern) is names


def test_no_two_cases_have_one_id() -> None:
    ids = [case.id for case in ALL_CASES]
    assert len(set(ids)) == len(ids)


def test_cases_of_level_core_need_no_health_port() -> None:
    assert not [case.id for case in ALL_CASES if case.level == "core" and case.needs_health]


def test_the_ids_that_others_know_are_there() -> None:
    """They stand in the settings of other projects."""
    ids = {case.id for case in ALL_CASES}
    first = (
        "chat.stream.equals_nonstream chat.stream.framing chat.seed chat.stop chat.usage chat.logprobs err.400 err.404 "
        "err.405 err.413 cancel.disconnect concurrency.16 models.list embeddings.base64 health.ready metrics.gauges"
    )
    assert set(first.split()) <= ids
    assert [id for id in ids if id.startswith("err.422.")]
