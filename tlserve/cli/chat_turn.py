"""One question to a server and its streamed answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import trio

from tlserve.cli.load_target import sse_events
from tlserve.cli.refusal import MAX_SHOWN, refusal
from tlserve.http.client import ClientConnection, ConnectionFailed, Origin, connect
from tlserve.http.messages import Header


class ChatFailed(Exception):
    """There is no answer, or no more of it; the message is one line for people."""


@dataclass(slots=True)
class Turn:
    """What has come of an answer, also when it was stopped. Times are of trio's clock."""

    text: str = ""
    start: float = 0.0
    first: float | None = None  # when the first text came
    end: float = 0.0
    num_pieces: int = 0
    usage: dict[str, Any] | None = None

    def summary(self) -> str:
        """Tokens, their rate, and the time to the first, in a line."""
        if self.first is None:
            return "no text came"
        usage = self.usage or {}
        count = usage.get("completion_tokens", self.num_pieces)
        seconds = self.end - self.first
        rate = f"{(count - 1) / seconds:.1f} tokens/s" if count > 1 and seconds > 0 else "one token"
        line = f"{count} tokens, {rate}, first after {self.first - self.start:.2f} s"
        if self.usage is None:
            return line
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return f"{line}; prompt {usage.get('prompt_tokens')} tokens, {cached} of them cached"


async def ask(
    origin: Origin, headers: tuple[Header, ...], body: dict[str, Any], turn: Turn, show: Callable[[str], None]
) -> None:
    """Stream the answer to a chat request into ``turn``, showing each piece. Raises ChatFailed.

    Cancellation closes the connection, which ends the request in the server.
    """
    turn.start = turn.end = trio.current_time()
    try:
        connection = await connect(origin)
        try:
            await _stream(connection, headers, body, turn, show)
        finally:
            await connection.aclose()
    except ConnectionFailed as error:
        raise ChatFailed(str(error)) from None
    finally:
        turn.end = trio.current_time()


async def _stream(
    connection: ClientConnection,
    headers: tuple[Header, ...],
    body: dict[str, Any],
    turn: Turn,
    show: Callable[[str], None],
) -> None:
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    fields = (*headers, ("Content-Type", "application/json"))
    status = await connection.request("POST", "/chat/completions", fields, json.dumps(asked).encode())
    if status != 200:
        raise ChatFailed(refusal(status, await connection.read_all()))
    async with aclosing(sse_events(connection)) as events:
        async for data in events:
            if data == b"[DONE]":
                return
            try:
                piece = _take(json.loads(data), turn)
            except (ValueError, LookupError, TypeError, AttributeError):
                raise ChatFailed(f"not a chunk of this API: {data[:MAX_SHOWN].decode(errors='replace')}") from None
            if piece:
                show(piece)
    raise ChatFailed("the answer was cut short")


def _take(chunk: dict[str, Any], turn: Turn) -> str:
    """The text of a chunk, noted in ``turn``."""
    if "error" in chunk:
        raise ChatFailed(chunk["error"]["message"])
    turn.usage = chunk.get("usage") or turn.usage
    text = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    if text:
        turn.text += text
        turn.num_pieces += 1
        turn.end = trio.current_time()
        turn.first = turn.end if turn.first is None else turn.first
    return text
