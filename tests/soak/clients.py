"""Clients who mean well: some are slow, some come in crowds. Each exchange gives the recorded answer or a refusal.

Rule 1: one function is one exchange of one kind of client; it returns what came of it in a few words.
Rule 2: what must not happen raises; the run counts it as a fault of the server under the kind's name.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from tests.client import DONE, Address
from tests.http.client import RawClient, RawResponse
from tests.soak.tally import Tally
from tests.soak.workload import Case, of_document, of_events

REFUSALS = {429: "rate_limit_exceeded", 503: "no_capacity"}
NARROW_BUFFER = 4096  # bytes the kernel keeps for a client that hardly reads
SIP, SIP_PAUSE = 256, 0.002  # bytes and seconds of a slow reader; a streamed token is about 250 bytes
PIECES = 20  # of a slow sender's request
SLOW_SENDER = "slow-sender"  # the id of its requests, whose time on the server is mostly its own
BURST = 24  # requests at once: more than run and wait together


class WrongAnswer(Exception):
    """An answer that differs from the one that was recorded."""


@dataclass
class Rig:
    """What all clients of a run share. ``answers`` holds the recorded answer of each case, by its place."""

    api: Address
    health: Address
    cases: list[Case]
    draw: random.Random
    send_timeout: float  # seconds that a head or a body may take, as the server was told
    idle_timeout: float  # seconds that a connection may idle, likewise
    tally: Tally = field(default_factory=Tally)
    answers: list[Any] = field(default_factory=list)

    def pick(self, *, generation: bool = False) -> int:
        """The place of a random case."""
        places = [place for place, case in enumerate(self.cases) if case.is_generation or not generation]
        return self.draw.choice(places)

    def check(self, place: int, found: Any) -> None:
        if found != self.answers[place]:
            body = self.cases[place].raw().decode()[:300]
            raise WrongAnswer(f"{body} was answered {found}, recorded is {self.answers[place]}")


async def plain(rig: Rig) -> str:
    """Some requests on one connection."""
    async with connected(rig.api) as client:
        for _ in range(rig.draw.randint(1, 4)):
            outcome = await ask(rig, client)
    return outcome


async def streaming(rig: Rig) -> str:
    async with connected(rig.api) as client:
        return await _ask_for_stream(rig, client)


async def slow_reader(rig: Rig) -> str:
    """Takes a stream in sips, out of a socket with hardly any buffer."""
    sock = trio.socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NARROW_BUFFER)
    async with _Sipping(trio.SocketStream(sock)) as stream:
        await sock.connect(rig.api)
        return await _ask_for_stream(rig, RawClient(stream))


async def slow_sender(rig: Rig) -> str:
    """Sends a request in small pieces, in half of the time that it has; a busy machine may make it late anyway."""
    place = rig.pick()
    data = request_bytes(rig.cases[place].path, rig.cases[place].raw(), f"X-Request-Id: {SLOW_SENDER}\r\n")
    size = len(data) // PIECES + 1
    began = trio.current_time()
    async with connected(rig.api) as client:
        for start in range(0, len(data), size):
            await client.send(data[start : start + size])
            await trio.sleep(rig.send_timeout / 2 / PIECES)
        was_late = trio.current_time() - began > 0.6 * rig.send_timeout  # the server may have read it later still
        response = await client.response()
        return "408, was late" if response.status == 408 and was_late else judge(rig, place, response, began=None)


async def burst(rig: Rig) -> str:
    """More than fits, at once: each gets the recorded answer or a refusal."""

    async def one() -> None:
        async with connected(rig.api) as client:
            rig.tally.outcomes["one of a burst", await ask(rig, client)] += 1

    async with trio.open_nursery() as nursery:
        for _ in range(BURST):
            nursery.start_soon(one)
    return "all answered"


async def idle_keep_alive(rig: Rig) -> str:
    """A request, and then a connection held for longer than the server holds it."""
    async with connected(rig.api) as client:
        outcome = await ask(rig, client)
        with trio.fail_after(rig.idle_timeout + 5):
            rest = await client.rest()
    if rest:
        raise AssertionError(f"an idle connection brought {rest!r}")
    return f"{outcome}, then closed"


async def pipelining(rig: Rig) -> str:
    """The next request is there before the answer to the last: they come in order."""
    places = [rig.pick() for _ in range(2)]
    async with connected(rig.api) as client:
        await client.send(b"".join(request_bytes(rig.cases[place].path, rig.cases[place].raw()) for place in places))
        outcomes = [judge(rig, place, await client.response(), began=None) for place in places]
    return outcomes[-1]


async def operator(rig: Rig) -> str:
    """Reads all that the health port has."""
    async with connected(rig.health) as client:
        for path in ("/healthz", "/readyz", "/metrics"):
            await client.send(f"GET {path} HTTP/1.1\r\nHost: soak\r\n\r\n".encode())
            if (status := (await client.response()).status) != 200:
                raise AssertionError(f"{path} gave {status}")
    return "200"


@asynccontextmanager
async def connected(address: Address) -> AsyncIterator[RawClient]:
    async with await trio.open_tcp_stream(*address) as stream:
        yield RawClient(stream)


async def ask(rig: Rig, client: RawClient) -> str:
    """One plain request; what came of it."""
    place = rig.pick()
    began = trio.current_time()
    await client.send(request_bytes(rig.cases[place].path, rig.cases[place].raw()))
    return judge(rig, place, await client.response(), began)


async def _ask_for_stream(rig: Rig, client: RawClient) -> str:
    place = rig.pick(generation=True)
    case = rig.cases[place]
    began = trio.current_time()
    await client.send(request_bytes(case.path, case.raw(stream=True, stream_options={"include_usage": True})))
    return judge(rig, place, await client.response(), began)


def judge(rig: Rig, place: int, response: RawResponse, began: float | None) -> str:
    """Raises WrongAnswer, or AssertionError for an answer that a good request must not get.

    ``began``: the trio time when the request was sent, where that took no time of its own.
    """
    if response.status == 200:
        is_stream = (response.header("content-type") or "").startswith("text/event-stream")
        case = rig.cases[place]
        rig.check(
            place, of_events(case, events_in(response)) if is_stream else of_document(case, json.loads(response.body))
        )
        return "right, streamed" if is_stream else "right"
    code = json.loads(response.body)["error"]["code"]
    if REFUSALS.get(response.status) != code or response.header("retry-after") != "1":
        raise AssertionError(f"a good request got {response.status} {response.body!r}")
    if response.status == 429 and began is not None:
        rig.tally.refusal_seconds.append(trio.current_time() - began)
    return f"{response.status} {code}"


def events_in(response: RawResponse) -> list[Any]:
    *events, rest = response.body.decode().split("\n\n")
    if rest:
        raise AssertionError(f"a stream ends inside an event: {rest!r}")
    found = [event.removeprefix("data: ") for event in events if event.startswith("data: ")]
    return [event if event == DONE else json.loads(event) for event in found]


def request_bytes(path: str, body: bytes, headers: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: soak\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


class _Sipping(trio.abc.Stream):
    """A stream whose reader has time."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.sleep(SIP_PAUSE)
        return bytes(await self._stream.receive_some(SIP))

    async def aclose(self) -> None:
        await self._stream.aclose()
