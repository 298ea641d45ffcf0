"""What is measured: one endpoint of an OpenAI-compatible server, and what came when of each streamed answer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import trio

from tlserve.cli.refusal import refusal
from tlserve.cli.replies import NotThisApi, SseParser, decode, decode_chunk, models
from tlserve.http.client import ClientConnection, ConnectionFailed, Origin, connect
from tlserve.http.messages import Header

Endpoint = Literal["chat", "completions"]
PATHS: dict[Endpoint, str] = {"chat": "/chat/completions", "completions": "/completions"}


class TargetError(Exception):
    """The server cannot be measured at all; the message says why."""


@dataclass(slots=True)
class Answer:
    """One request as its client saw it. Times are of the run's own clock, in seconds."""

    start: float
    end: float = 0.0
    events: list[float] = field(default_factory=list)  # when each event that carried text came
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None  # "429", "connection", "timeout", ...; None: complete
    detail: str = ""  # of a status that is not 200 what the server said, of a connection what broke it

    @property
    def ttft(self) -> float:
        """Seconds to the first text."""
        return self.events[0] - self.start

    @property
    def gaps(self) -> list[float]:
        """Seconds between one event with text and the next."""
        return [later - earlier for earlier, later in pairwise(self.events)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    origin: Origin
    endpoint: Endpoint
    model: str
    temperature: float = 0.0
    headers: tuple[Header, ...] = ()
    timeout: float = 600.0  # seconds for one answer

    async def ask(self, connection: ClientConnection, answer: Answer, prompt: str, max_tokens: int) -> None:
        """Ask for exactly ``max_tokens`` tokens as a stream, and write down what came when."""
        with trio.move_on_after(self.timeout) as deadline:
            try:
                await self._stream(connection, answer, self.body(prompt, max_tokens))
            except ConnectionFailed as error:
                answer.error, answer.detail = "connection", str(error)
            except NotThisApi:
                answer.error = "not a chunk of this API"
        if deadline.cancelled_caught:
            answer.error = "timeout"
        answer.end = trio.current_time()

    def body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        asked: dict[str, Any] = (
            {"messages": [{"role": "user", "content": prompt}]} if self.endpoint == "chat" else {"prompt": prompt}
        )
        return asked | {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "ignore_eos": True,  # an extension that this server, llama-server and vLLM share
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def _stream(self, connection: ClientConnection, answer: Answer, body: dict[str, Any]) -> None:
        path = PATHS[self.endpoint]
        headers = (*self.headers, ("Content-Type", "application/json"))
        status = await connection.request("POST", path, headers, json.dumps(body).encode())
        if status != 200:
            answer.error = str(status)
            answer.detail = refusal(status, await connection.read_all())
            return
        answer.error = "cut short"  # until [DONE] says otherwise
        parser = SseParser()
        while arrivals := await connection.read_late():
            for time, piece in arrivals:
                for data in parser.feed(piece):
                    if not take_event(data, answer, time):
                        return


def take_event(data: bytes, answer: Answer, time: float) -> bool:
    """Note what an event says, which came at ``time``: text, usage or an end. False after an error: nothing follows."""
    if data == b"[DONE]":
        answer.error = None
        return True
    chunk = decode_chunk(data)
    if chunk.error is not None:
        answer.error = "error event"
        return False
    for choice in chunk.choices or ():
        if choice.content:
            answer.events.append(time)
    if chunk.usage is not None:
        answer.prompt_tokens = chunk.usage.prompt_tokens
        answer.completion_tokens = chunk.usage.completion_tokens
    return True


async def find_model(origin: Origin, headers: tuple[Header, ...] = (), *, patience: float) -> str:
    """The first model that the server names within ``patience`` seconds. Raises TargetError."""
    with trio.move_on_after(patience):
        return await _first_model(origin, headers)
    raise TargetError(f"{origin.authority} gave no answer within {patience:g} s")


async def _first_model(origin: Origin, headers: tuple[Header, ...]) -> str:
    try:
        connection = await connect(origin)
        try:
            status = await connection.request("GET", "/models", headers)
            body = await connection.read_all()
        finally:
            await connection.aclose()
    except ConnectionFailed as error:
        raise TargetError(str(error)) from None
    if status != 200:
        raise TargetError(refusal(status, body))
    try:
        return decode(models, body).data[0].id
    except NotThisApi:
        raise TargetError(f"GET {origin.path}/models names no model; name it with --model") from None
