"""What servers of this API answer, as clients read it: bounded in size and depth, and of the types it should have."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct
from msgspec.json import Decoder

from tlserve.http.client import ClientConnection
from tlserve.http.sse import values_of_data

MAX_EVENT = 1 << 20  # bytes of one server-sent event, some thousand times those of a chunk
_ENDS = (b"\n\n", b"\n\r\n")  # of an event: the blank line after it
_LINE_FEED = 0x0A  # a number is looked for in bytes several times faster than bytes are

Count = Annotated[int, Meta(ge=0, le=2**53)]  # of tokens; floats hold it exactly
Document = TypeVar("Document")


class NotThisApi(Exception):
    """What came is nothing that a server of this API says."""


class PromptDetails(Struct):
    cached_tokens: Count | None = None


class Usage(Struct):
    prompt_tokens: Count
    completion_tokens: Count
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int:
        details = self.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0


class Delta(Struct):
    content: str | None = None


class Choice(Struct):
    delta: Delta | None = None  # of chat
    text: str | None = None  # of completions

    @property
    def content(self) -> str:
        return self.text or (self.delta is not None and self.delta.content) or ""


class Error(Struct):
    message: str
    code: Any = None  # a string of this API, a number of others


class Refusal(Struct):
    error: Error


class Chunk(Struct):
    """One event of a stream: choices, which may be none, or an error."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Error | None = None


class Model(Struct):
    id: str


class Models(Struct):
    data: Annotated[list[Model], Meta(min_length=1)]


_chunks, refusals, models = Decoder(Chunk), Decoder(Refusal), Decoder(Models)


def decode(decoder: Decoder[Document], data: bytes) -> Document:
    """Raises NotThisApi for what is no JSON, too deep, or of other types than a client uses."""
    try:
        return decoder.decode(data)
    except (ValueError, RecursionError) as error:
        raise NotThisApi(str(error)) from None


def decode_chunk(data: bytes) -> Chunk:
    """Raises NotThisApi, also for an object that has neither choices nor an error."""
    chunk = decode(_chunks, data)
    if chunk.choices is None and chunk.error is None:
        raise NotThisApi("no choices")
    return chunk


class SseParser:
    """Server-sent events from the pieces of a reply. What is kept is searched once, however many an event comes in."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that end with ``piece``; comments have none. Raises NotThisApi for one without end."""
        kept = self._kept
        searched = max(0, len(kept) - 2)  # an end may have begun there
        kept += piece
        end = len(kept) if piece.endswith(b"\n\n") else _end_of_last(kept, searched)
        if len(kept) - end > MAX_EVENT:
            raise NotThisApi(f"an event of more than {MAX_EVENT} bytes")
        if not end:
            return []
        *events, _ = bytes(kept[:end]).replace(b"\r\n", b"\n").split(b"\n\n")
        del kept[:end]
        found: list[bytes] = []
        for event in events:
            if event.startswith(b"data:") and _LINE_FEED not in event:  # nearly all: a call for each would be felt
                found.append(event[5:].lstrip(b" "))
            elif values := values_of_data(event):
                found.append(b"\n".join(values))
        return found


async def sse_events(connection: ClientConnection) -> AsyncGenerator[bytes, None]:
    """The data of each server-sent event of a reply. Raises NotThisApi."""
    parser = SseParser()
    while piece := await connection.read():
        for data in parser.feed(piece):
            yield data


def _end_of_last(kept: bytearray, searched: int) -> int:
    """How many bytes whole events take; 0: what came since ``searched`` ends none."""
    return max((at + len(end) for end in _ENDS if (at := kept.rfind(end, searched)) >= 0), default=0)
