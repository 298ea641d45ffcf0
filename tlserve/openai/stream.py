"""Chunks to the bytes of events: what never changes within a stream is encoded once."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec
import trio

from tlserve.http import sse
from tlserve.http.messages import Reply
from tlserve.openai.choice import Piece

PING_INTERVAL = 15.0  # seconds without an event after which a stream gets a comment


def encode_event(chunk: msgspec.Struct) -> bytes:
    return sse.event(msgspec.json.encode(chunk))


class ChunkEncoder:
    """The events of one stream.

    Nearly all chunks of a stream differ in one string. Such a chunk is encoded once for each choice with a mark
    in its place and cut there; an event is then three byte strings joined.
    """

    def __init__(self, chunk: Callable[[int, Piece], msgspec.Struct]) -> None:
        """``chunk`` makes the document of a piece of the choice with that index."""
        self._chunk = chunk
        self._encode = msgspec.json.Encoder().encode
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # by index: what stands before and after the text

    def encode(self, index: int, piece: Piece) -> bytes:
        if piece.finish_reason is not None or piece.tokens:
            return sse.event(self._encode(self._chunk(index, piece)))
        frame = self._frames.get(index) or self._make_frame(index)
        return sse.event(self._encode(piece.text).join(frame))

    def _make_frame(self, index: int) -> tuple[bytes, bytes]:
        mark = secrets.token_hex(16)  # so that nothing a client or operator chose can hold it
        before, after = self._encode(self._chunk(index, Piece(mark))).split(self._encode(mark))
        self._frames[index] = before, after
        return before, after


class EventWriter:
    """Writes the events of one stream; the first write starts the response and brings ``opening`` along."""

    def __init__(self, reply: Reply, opening: bytes) -> None:
        self._reply = reply
        self._opening = opening
        self.ping_at = trio.current_time() + PING_INTERVAL  # when the stream will have been silent for too long

    async def write(self, data: bytes) -> None:
        if not self._reply.is_started:
            await self._reply.start(200, sse.SSE_HEADERS)
            data = self._opening + data
        await self._reply.write(data)
        self.ping_at = trio.current_time() + PING_INTERVAL
