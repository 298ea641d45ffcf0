"""A generation to a reply, whole or streamed; what chat and completions share.

Rule 1: the reply starts only when the first token is there, so that every refusal (400, 429, 503) is a plain
        response, for a stream too. Only a wait longer than PING_INTERVAL starts it without one.
Rule 2: the submit block is left, which gives the blocks back, before the last bytes wait for the client.
Rule 3: a token goes out as soon as it is there; those that came while the last ones went out share a write.
Rule 4: a fault after the start is raised like any other; the connection writes it as the stream's last event.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import trio

from tlserve.engine.request import FinishReason, GenRequest, PooledOut, TokenOut
from tlserve.errors import ShuttingDown
from tlserve.http import sse
from tlserve.http.messages import Note, Reply, Request, Response
from tlserve.http.trace import Trace
from tlserve.openai import schema
from tlserve.openai.choice import Choice, Piece, TokenAt
from tlserve.openai.parse import GenSpec
from tlserve.openai.service import Outputs, Service
from tlserve.openai.stream import ChunkEncoder, EventWriter, encode_event
from tlserve.openai.traces import Timeline, describe_generation

# Events that go out in one write when more than one token is there, which is when the event loop is what is short.
MAX_TOGETHER = 64
ENTRY_BYTES = 64  # of one token with its log-probability in JSON, roughly


@dataclass(frozen=True, slots=True)
class Head:
    """What every document of one answer begins with."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def new(cls, prefix: str, service: Service) -> Head:
        return cls(f"{prefix}-{secrets.token_hex(12)}", int(time.time()), service.model_id, service.system_fingerprint)


@dataclass(slots=True)
class Whole:
    """One choice when it has ended."""

    pieces: list[str] = field(default_factory=list)  # of its text
    tokens: list[TokenAt] = field(default_factory=list)
    finish_reason: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def num_bytes(self) -> int:
        """About how long its JSON is."""
        return sum(map(len, self.pieces)) + ENTRY_BYTES * sum(1 + len(at.out.top_logprobs) for at in self.tokens)


class Form(Protocol):
    """How one endpoint writes its documents."""

    @property
    def head(self) -> Head: ...

    def document(self, choices: Sequence[Whole], usage: schema.Usage) -> msgspec.Struct: ...

    def opening(self) -> Sequence[msgspec.Struct]:
        """Chunks before the first piece."""

    def chunk(self, index: int, piece: Piece) -> msgspec.Struct: ...

    def usage_chunk(self, usage: schema.Usage) -> msgspec.Struct: ...


class Answer:
    """Follows the requests of one generation and writes the reply."""

    def __init__(self, service: Service, spec: GenSpec, requests: Sequence[GenRequest], form: Form) -> None:
        self._service = service
        self._spec = spec
        self._requests = requests
        self._form = form
        self._choices = [
            Choice(
                service.tokenizer.token_bytes,
                stop=spec.stop,
                min_tokens=spec.min_tokens,
                keep_tokens=spec.params.num_logprobs is not None,
            )
            for _ in requests
        ]
        self._num_open = len(requests)
        self._outputs: Outputs | None = None  # once the requests are accepted
        self._began = trio.current_time()
        self._first_token_time: float | None = None  # seconds from accepting the requests
        self._last_token_time = 0.0

    async def send(self, request: Request, reply: Reply) -> None:
        """Answer ``request``. Raises what the engine raises: Overloaded, InvalidRequest, NoCapacity, Unavailable.

        Cancellation handling: the requests are aborted.
        """
        try:
            await (self._stream(reply) if self._spec.stream else self._whole(reply))
        finally:
            request.notes.update(self._notes())
            if request.trace is not None:
                self._tell(request.trace)

    async def _whole(self, reply: Reply) -> None:
        wholes = [Whole() for _ in self._requests]
        async with self._submit() as outputs:
            while self._num_open:
                index, piece = self._piece(await anext(outputs))
                if piece is not None:
                    whole = wholes[index]
                    whole.pieces.append(piece.text)
                    whole.tokens += piece.tokens
                    whole.finish_reason = piece.finish_reason or ""
        body = await self._service.off_loop(
            lambda: msgspec.json.encode(self._form.document(wholes, self._usage())),
            num_bytes=sum(whole.num_bytes for whole in wholes),
        )
        await reply.send(Response(200, body))

    async def _stream(self, reply: Reply) -> None:
        events = EventWriter(reply, b"".join(map(encode_event, self._form.opening())))
        encoder = ChunkEncoder(self._form.chunk)
        data = b""
        async with self._submit() as outputs:
            while self._num_open:
                if data:
                    await events.write(data)
                data = sse.PING  # unless something comes
                with trio.CancelScope() as silence:
                    data = await self._relay(outputs, encoder, events, silence)
        if self._spec.include_usage:
            data += encode_event(self._form.usage_chunk(self._usage()))
        await events.write(data + sse.DONE)

    async def _relay(
        self, outputs: Outputs, encoder: ChunkEncoder, events: EventWriter, silence: trio.CancelScope
    ) -> bytes:
        """Write what comes until the choices have ended or ``silence`` has; gives the events that are left to write.

        ``silence`` is cancelled when the stream has been silent for too long. One scope for many waits, as a scope
        for each would cost more than all else that is done for a token.
        """
        while True:
            silence.deadline = events.ping_at
            data = self._encoded(encoder, await anext(outputs))
            silence.deadline = math.inf
            if self._num_open:
                data += b"".join(self._encoded(encoder, output) for output in outputs.take_ready(MAX_TOGETHER))
            if not self._num_open or silence.cancel_called:  # the latter at the very moment when something came
                return data
            if data:
                await events.write(data)

    @asynccontextmanager
    async def _submit(self) -> AsyncIterator[Outputs]:
        self._began = trio.current_time()
        async with self._service.loop.submit(self._requests) as self._outputs:
            yield self._outputs

    def _encoded(self, encoder: ChunkEncoder, output: tuple[int, TokenOut | PooledOut]) -> bytes:
        index, piece = self._piece(output)
        return b"" if piece is None else encoder.encode(index, piece)

    def _piece(self, output: tuple[int, TokenOut | PooledOut]) -> tuple[int, Piece | None]:
        index, out = output
        assert isinstance(out, TokenOut)
        choice = self._choices[index]
        if choice.finish_reason is not None:
            return index, None  # of the step that was under way when a stop string ended the choice
        if out.finish is FinishReason.ABORT:
            raise ShuttingDown("the server ended the request before its answer was complete")
        self._last_token_time = trio.current_time() - self._began
        if self._first_token_time is None:
            self._first_token_time = self._last_token_time
        piece = choice.push(out)
        if choice.finish_reason is not None:
            self._num_open -= 1
        return index, piece

    def _usage(self) -> schema.Usage:
        num_prompt_tokens = sum(len(request.prompt) for request in self._requests)
        num_tokens = sum(choice.num_tokens for choice in self._choices)
        return schema.Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_tokens,
            total_tokens=num_prompt_tokens + num_tokens,
            prompt_tokens_details=schema.PromptTokensDetails(sum(choice.num_cached_tokens for choice in self._choices)),
            completion_tokens_details=schema.CompletionTokensDetails(),
        )

    def _notes(self) -> dict[str, Note]:
        """For the request's line in the log; it says nothing of a time that did not come."""
        usage = self._usage()
        notes: dict[str, Note] = {
            "queue_seconds": self._outputs.queue_time if self._outputs else None,
            "first_token_seconds": self._first_token_time,
            "token_seconds": self._token_time(),
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "completion_tokens": sum(choice.num_tokens for choice in self._choices),
            "finish": ",".join(choice.finish_reason or "none" for choice in self._choices),
        }
        return {name: note for name, note in notes.items() if note is not None}

    def _tell(self, trace: Trace) -> None:
        describe_generation(trace, self._spec, self._requests, self._form.head.id)
        if self._outputs is not None:
            end_time = trio.current_time() - self._began if self._num_open else self._last_token_time
            Timeline(self._began, self._outputs.queue_time, self._first_token_time, end_time).add_to(trace)

    def _token_time(self) -> float | None:
        """Mean seconds between two tokens, at the pace of the longest choice."""
        num_gaps = max(choice.num_tokens for choice in self._choices) - 1
        if self._first_token_time is None or num_gaps < 1:
            return None
        return (self._last_token_time - self._first_token_time) / num_gaps
