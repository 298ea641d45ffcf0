"""A small HTTP client for tests: one connection, JSON in and out, server-sent events one by one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import h11
import trio

Address = tuple[str, int]
TIMEOUT = 60.0  # seconds; a reply that takes longer is a hang
DONE = "[DONE]"


@dataclass
class Reply:
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes = b""

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Client:
    """One keep-alive connection. Leaving ``connect`` closes it whatever state it is in."""

    stream: trio.SocketStream
    connection: h11.Connection = field(default_factory=lambda: h11.Connection(h11.CLIENT))

    async def request(self, method: str, path: str, body: Any = None, headers: Sequence[tuple[str, str]] = ()) -> Reply:
        """Send one request and read its whole reply. ``body`` is bytes, or anything that JSON can say."""
        with trio.fail_after(TIMEOUT):
            reply = await self.start(method, path, body, headers)
            reply.body = b"".join([chunk async for chunk in self.chunks()])
            return reply

    async def start(self, method: str, path: str, body: Any = None, headers: Sequence[tuple[str, str]] = ()) -> Reply:
        """Send one request and read as far as the headers of its reply."""
        if self.connection.states == {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}:
            self.connection.start_next_cycle()
        payload = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        fields = [("Host", "test"), *headers]
        if payload or method == "POST":
            fields.append(("Content-Length", str(len(payload))))
        await self._send(h11.Request(method=method, target=path, headers=fields))
        if payload:
            await self._send(h11.Data(data=payload))
        await self._send(h11.EndOfMessage())
        event = await self._next()
        while isinstance(event, h11.InformationalResponse):
            event = await self._next()
        assert isinstance(event, h11.Response), event
        return Reply(event.status_code, {name.decode().lower(): value.decode() for name, value in event.headers})

    async def chunks(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)
        assert isinstance(event, h11.EndOfMessage), event

    async def events(self) -> AsyncIterator[Any]:
        """The events of a started stream: a decoded document each, and "[DONE]" as itself."""
        buffer = b""
        async for chunk in self.chunks():
            buffer += chunk
            while b"\n\n" in buffer:
                event, buffer = buffer.split(b"\n\n", 1)
                if event.startswith(b"data: "):
                    data = event.removeprefix(b"data: ").decode()
                    yield DONE if data == DONE else json.loads(data)
        assert not buffer, buffer

    async def _send(self, event: h11.Event) -> None:
        await self.stream.send_all(self.connection.send(event) or b"")

    async def _next(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        while (event := self.connection.next_event()) is h11.NEED_DATA:
            self.connection.receive_data(await self.stream.receive_some())
        return event


@asynccontextmanager
async def connect(address: Address) -> AsyncIterator[Client]:
    stream = await trio.open_tcp_stream(*address)
    async with stream:
        yield Client(stream)


async def get(address: Address, path: str, headers: Sequence[tuple[str, str]] = ()) -> Reply:
    async with connect(address) as client:
        return await client.request("GET", path, headers=headers)


async def post(address: Address, path: str, body: Any, headers: Sequence[tuple[str, str]] = ()) -> Reply:
    async with connect(address) as client:
        return await client.request("POST", path, body, headers)


async def stream_events(address: Address, path: str, body: dict[str, Any]) -> list[Any]:
    """All the events of one streamed answer; asserts that it is one."""
    async with connect(address) as client:
        with trio.fail_after(TIMEOUT):
            reply = await client.start("POST", path, body | {"stream": True})
            assert reply.status == 200, b"".join([chunk async for chunk in client.chunks()])
            assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
            return [event async for event in client.events()]


def joined(events: Sequence[Any]) -> str:
    """The text of a chat stream: its content deltas in order."""
    choices = [choice for event in events if event != DONE for choice in event["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def metric(address: Address, name: str) -> float:
    """One sample of the metrics page, labels included in its name."""
    page = (await get(address, "/metrics")).body.decode()
    return next(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(f"{name} "))


async def wait_for_metric(address: Address, name: str, value: float, *, within: float = 2.0) -> None:
    """Return once the metric has that value; fail when it has not within that many seconds."""
    with trio.fail_after(within):
        while await metric(address, name) != value:  # noqa: ASYNC110 the page is all there is to watch
            await trio.sleep(0.01)
