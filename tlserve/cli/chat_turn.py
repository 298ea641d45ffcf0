"""One question to a server and its streamed answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import trio

from tlserve.cli.refusal import MAX_SHOWN, refusal
from tlserve.cli.replies import Chunk, NotThisApi, Usage, decode_chunk, sse_events
from tlserve.http.client import ClientConnection, ConnectionFailed, Origin, connect
from tlserve.http.messages import Header

REFUSAL_TIMEOUT = 30.0  # seconds for the body of an answer that is an error


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
    usage: Usage | None = None  # None: the server does not count

    def summary(self) -> str:
        """Tokens, their rate, and the time to the first, in a line."""
        if self.first is None:
            return "no text came"
        count = self.num_pieces if self.usage is None else self.usage.completion_tokens
        seconds = self.end - self.first
        rate = f"{(count - 1) / seconds:.1f} tokens/s" if count > 1 and seconds > 0 else "one token"
        line = f"{count} tokens, {rate}, first after {self.first - self.start:.2f} s"
        if self.usage is None:
            return line
        return f"{line}; prompt {self.usage.prompt_tokens} tokens, {self.usage.cached_tokens} of them cached"


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
    except (ConnectionFailed, NotThisApi) as error:
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
        raise ChatFailed(await _refused(connection, status))
    async with aclosing(sse_events(connection)) as events:
        async for data in events:
            if data == b"[DONE]":
                return
            try:
                piece = _take(decode_chunk(data), turn)
            except NotThisApi:
                raise ChatFailed(f"not a chunk of this API: {data[:MAX_SHOWN].decode(errors='replace')}") from None
            if piece:
                show(piece)
    raise ChatFailed("the answer was cut short")


async def _refused(connection: ClientConnection, status: int) -> str:
    """Why there is no answer, in the server's words where they come in time."""
    with trio.move_on_after(REFUSAL_TIMEOUT):
        return refusal(status, await connection.read_all())
    return refusal(status, b"no reason came")


def _take(chunk: Chunk, turn: Turn) -> str:
    """The text of a chunk, noted in ``turn``."""
    if chunk.error is not None:
        raise ChatFailed(chunk.error.message)
    turn.usage = chunk.usage or turn.usage
    text = "".join(choice.content for choice in chunk.choices or ())
    if text:
        turn.text += text
        turn.num_pieces += 1
        turn.end = trio.current_time()
        turn.first = turn.end if turn.first is None else turn.first
    return text
