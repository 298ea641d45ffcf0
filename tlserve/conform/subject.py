"""The server under test, as one case talks to it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import trio

from tlserve.conform.answer import Answer, parse_answer
from tlserve.conform.case import Failed, Skipped
from tlserve.conform.found import Found, short, shown
from tlserve.http.client import MAX_REPLY, ClientConnection, ConnectionFailed, Origin, connect, open_stream
from tlserve.http.limits import RECEIVE_SIZE
from tlserve.http.messages import Header

PROMPT = "Count from one to twenty."
CHAT, COMPLETIONS, EMBEDDINGS = "/chat/completions", "/completions", "/embeddings"
Body = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where the server is and how it wants to be asked; the same for all cases."""

    api: Origin  # what clients have as base_url: its path ends in /v1
    model: str
    health: Origin | None = None
    api_key: str | None = None

    @property
    def root(self) -> Origin:
        """The API port without the /v1."""
        return replace(self.api, path=self.api.path.removesuffix("/v1"))


class Subject:
    """Sends requests and reads answers. Whatever is no answer raises Failed.

    ``last_sent`` is the latest request, for a case that runs out of time while it waits for the answer.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.model = target.model
        self.last_sent = "nothing"

    # Bodies

    def chat_body(self, content: str = PROMPT, /, **fields: Any) -> Body:
        """A greedy request for 16 tokens; ``fields`` come first, so that a shortened body still shows them."""
        messages = [{"role": "user", "content": content}]
        return _filled(fields, {"max_tokens": 16, "temperature": 0, "messages": messages, "model": self.model})

    def text_body(self, prompt: object = PROMPT, /, **fields: Any) -> Body:
        return _filled(fields, {"max_tokens": 16, "temperature": 0, "prompt": prompt, "model": self.model})

    # Whole answers

    async def request(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: tuple[Header, ...] = (),
        *,
        origin: Origin | None = None,
        with_key: bool = True,
    ) -> Answer:
        """One request on a connection of its own. ``body`` is bytes, or anything that JSON can say."""
        async with self._asked(method, path, body, headers, origin or self.target.api, with_key) as (
            status,
            connection,
        ):
            return Answer(self.last_sent, status, connection.headers, await connection.read_all())

    async def get(self, path: str, headers: tuple[Header, ...] = ()) -> Answer:
        return await self.request("GET", path, headers=headers)

    async def post(self, path: str, body: object, headers: tuple[Header, ...] = ()) -> Answer:
        return await self.request("POST", path, body, headers)

    async def chat(self, content: str = PROMPT, /, **fields: Any) -> Found:
        """The document of one chat completion."""
        return _generated(await self.post(CHAT, self.chat_body(content, **fields)))

    async def complete(self, prompt: object = PROMPT, /, **fields: Any) -> Found:
        return _generated(await self.post(COMPLETIONS, self.text_body(prompt, **fields)))

    async def stream(self, path: str, body: Body, headers: tuple[Header, ...] = ()) -> Answer:
        """The whole of one streamed answer."""
        return (await self.post(path, {"stream": True} | body, headers)).has_status(200)

    async def embed(self, given: object, /, **fields: Any) -> Found:
        body = {**fields, "model": self.model, "input": given}
        return (await self.post(EMBEDDINGS, body)).has_status(200).document

    async def tokens(self, **what: Any) -> list[int]:
        """The ids of a text or of messages, by /tokenize."""
        answer = await self.post("/tokenize", {**what, "model": self.model})
        return [id.integer() for id in answer.has_status(200).document["tokens"].items()]

    async def context(self) -> int:
        """The longest context, by /tokenize."""
        answer = await self.post("/tokenize", {"model": self.model, "text": "a"})
        return answer.has_status(200).document["max_model_len"].integer(1)

    # The health port

    async def health(self, path: str, method: str = "GET") -> Answer:
        assert self.target.health is not None, "the case has needs_health"
        return await self.request(method, path, origin=self.target.health, with_key=False)

    async def gauge(self, name: str) -> float:
        """One sample of /metrics, labels included in its name."""
        page = (await self.health("/metrics")).has_status(200)
        for line in page.body.decode("utf-8", "replace").splitlines():
            key, _, value = line.rpartition(" ")
            if key == name:
                return float(value)
        page.fail(f"a sample {name}", "none")

    # Parts of answers, and bytes

    @asynccontextmanager
    async def started(self, path: str, body: Body) -> AsyncIterator[ClientConnection]:
        """A stream whose headers have come; leaving the block closes the connection, whatever is in flight."""
        asked = self._asked("POST", path, {"stream": True} | body, (), self.target.api, True)
        async with asked as (status, connection):
            if status != 200:
                raise Failed(sent=self.last_sent, expected="status 200", came=f"status {status}")
            yield connection

    async def raw(self, data: bytes, says: str) -> Answer:
        """Send bytes to the API port and read until the server ends the connection; ``says`` describes them."""
        stream = await self.opened(data, says)
        raw = bytearray()
        try:
            while piece := await stream.receive_some(RECEIVE_SIZE):
                raw += piece
                if len(raw) > MAX_REPLY:
                    raise Failed(sent=says, expected="an answer", came=f"more than {MAX_REPLY} bytes")
        except trio.BrokenResourceError:
            pass  # what came until then counts
        finally:
            await trio.aclose_forcefully(stream)
        return parse_answer(says, bytes(raw))

    async def opened(self, data: bytes, says: str) -> trio.abc.Stream:
        """A connection to the API port on which ``data`` has been sent; the caller closes it."""
        self.last_sent = says
        try:
            stream = await open_stream(self.target.api)
        except ConnectionFailed as error:
            raise Failed(sent=says, expected="a connection", came=str(error)) from None
        try:
            await stream.send_all(data)
        except trio.BrokenResourceError:
            pass  # an answer may have come before
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        return stream

    def head(self, path: str, *lines: str, method: str = "POST", version: str = "1.1") -> bytes:
        """Request line and headers by hand, for ``raw``."""
        api = self.target.api
        keys = [f"{name}: {value}" for name, value in self._key()]
        return "\r\n".join(
            [f"{method} {api.path}{path} HTTP/{version}", f"Host: {api.authority}", *keys, *lines, "", ""]
        ).encode()

    @asynccontextmanager
    async def _asked(
        self, method: str, path: str, body: object, headers: tuple[Header, ...], origin: Origin, with_key: bool
    ) -> AsyncIterator[tuple[int, ClientConnection]]:
        payload = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        self.last_sent = sent = _described(method, path, body, headers)
        fields = (*(self._key() if with_key else ()), *headers)
        if payload and all(name.lower() != "content-type" for name, _ in headers):
            fields = (*fields, ("Content-Type", "application/json"))
        try:
            connection = await connect(origin)
            try:
                yield await connection.request(method, path, fields, payload), connection
            finally:
                await connection.aclose()
        except ConnectionFailed as error:
            raise Failed(sent=sent, expected="an answer", came=str(error)) from None

    def _key(self) -> tuple[Header, ...]:
        return (("Authorization", f"Bearer {self.target.api_key}"),) if self.target.api_key else ()


def _generated(answer: Answer) -> Found:
    """The document of an answer that has a choice at the least."""
    document = answer.has_status(200).document
    document["choices"].check(bool(document["choices"].items()), "a choice")
    return document


def _filled(fields: Mapping[str, Any], defaults: Body) -> Body:
    return {**fields, **{key: value for key, value in defaults.items() if key not in fields}}


def _described(method: str, path: str, body: object, headers: tuple[Header, ...]) -> str:
    parts = [method, path, *(f"{name}: {short(value)}" for name, value in headers)]
    if isinstance(body, bytes):
        parts.append(short(body.decode("utf-8", "backslashreplace")))
    elif body is not None:
        parts.append(shown(body))
    return " ".join(parts)


def skip_unless(condition: bool, reason: str) -> None:
    if not condition:
        raise Skipped(reason)
