"""Stand-ins for what surrounds the API: an engine loop that follows a script, and a reply that records."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import trio

from tlserve.engine.request import FinishReason, GenRequest, PooledOut, RequestId, TokenOut
from tlserve.errors import ApiError, Overloaded
from tlserve.http.messages import Header, Request, Response
from tlserve.http.router import Router
from tlserve.openai.app import add_routes
from tlserve.openai.errors import ERRORS
from tlserve.openai.service import Outputs, Service
from tlserve.text.byte_tokenizer import ByteTokenizer
from tlserve.text.chat import ChatEncoder
from tlserve.text.template import Template

EOS = 255  # a byte that no UTF-8 text holds
MAX_MODEL_LEN = 64
HIDDEN_SIZE = 4
CONTENTS = "{% for m in messages %}{{ m.content }}{% endfor %}"  # the template of the worked example

QUEUE_TIME = 0.125  # seconds that every submission is said to have waited


class PieceTokenizer(ByteTokenizer):
    """Bytes, and above them tokens that spell ``pieces``, as bytes of any length."""

    def __init__(self, pieces: Sequence[bytes] = ()) -> None:
        super().__init__(frozenset({EOS}))
        self._pieces = list(pieces)
        self.vocab_size = 256 + len(self._pieces)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == EOS:
            return b""
        return bytes([token_id]) if token_id < 256 else self._pieces[token_id - 256]

    def token_text(self, token_id: int) -> str:
        return "<eos>" if token_id == EOS else self.token_bytes(token_id).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Pause:
    """In a script: seconds before the next token."""

    seconds: float


Script = Sequence[int | Pause | ApiError | Exception]


class ScriptedLoop:
    """Each request gets the tokens that ``script`` has for it, until one of them ends it as the engine would."""

    def __init__(self, script: Callable[[GenRequest], Script]) -> None:
        self.script = script
        self.requests: list[GenRequest] = []
        self.groups: list[int] = []  # sizes of the submissions
        self.num_inside = 0  # submit blocks not left yet
        self.is_full = False  # no place can be held
        self.num_held = 0
        self.num_tokens = 0  # given out
        self.refusals: list[ApiError] = []  # raised by the next submissions, one each
        self.paused = trio.Event()  # a script has come to a Pause

    @asynccontextmanager
    async def _submitted(self, requests: Sequence[GenRequest]) -> AsyncIterator[Outputs]:
        if self.refusals:
            raise self.refusals.pop(0)
        self.requests += requests
        self.groups.append(len(requests))
        self.num_inside += 1
        try:
            yield _Generation(self, requests)
        finally:
            self.num_inside -= 1

    @contextmanager
    def hold_place(self) -> Iterator[None]:
        if self.is_full:
            raise Overloaded("no place")
        self.num_held += 1
        try:
            yield
        finally:
            self.num_held -= 1

    def submit(self, requests: Sequence[GenRequest]) -> AbstractAsyncContextManager[Outputs]:
        return self._submitted(requests)


class _Generation:
    """Takes one output of each request in turn. A class, so that a cancelled wait loses nothing."""

    def __init__(self, loop: ScriptedLoop, requests: Sequence[GenRequest]) -> None:
        self.queue_time: float | None = None
        self._loop = loop
        self._open = [(index, request, _run(loop.script, request)) for index, request in enumerate(requests)]
        self._turn = 0
        self._until: float | None = None

    def __aiter__(self) -> _Generation:
        return self

    def take_ready(self, most: int) -> list[tuple[int, TokenOut | PooledOut]]:
        return []

    async def __anext__(self) -> tuple[int, TokenOut | PooledOut]:
        while True:
            if self._until is not None:
                await trio.sleep_until(self._until)
                self._until = None
            await trio.lowlevel.checkpoint()
            if not self._open:
                raise StopAsyncIteration
            self.queue_time = QUEUE_TIME
            self._turn %= len(self._open)
            index, _, outputs = self._open[self._turn]
            output = next(outputs)
            if isinstance(output, Pause):
                self._until = trio.current_time() + output.seconds
                self._loop.paused.set()
                continue
            if isinstance(output, Exception):
                raise output
            self._loop.num_tokens += 1
            if output.finish is not None:
                del self._open[self._turn]
            else:
                self._turn += 1
            return index, output


def _run(script: Callable[[GenRequest], Script], request: GenRequest) -> Any:
    if request.is_pooling:
        vector = np.arange(1, HIDDEN_SIZE + 1, dtype=np.float32) * np.float32(len(request.prompt))
        yield PooledOut(RequestId(0), vector / np.float32(np.linalg.norm(vector)))
        return
    num_tokens = 0
    for item in script(request):
        if not isinstance(item, int):
            yield item
            continue
        num_tokens += 1
        finish = None
        if item in request.stop_ids and num_tokens > request.min_tokens:
            finish = FinishReason.STOP
        elif num_tokens == request.max_tokens:
            finish = FinishReason.LENGTH
        k = request.params.num_logprobs
        top = tuple((token, -0.5 * (rank + 1)) for rank, token in enumerate(range(97, 97 + (k or 0))))
        yield TokenOut(
            RequestId(0), item, finish, num_cached_tokens=2, logprob=None if k is None else -0.25, top_logprobs=top
        )
        if finish is not None:
            return
    raise AssertionError("the script ended before the request did")


@dataclass
class RecordedReply:
    """Keeps what a handler answers with; ``on_write`` sees each write first."""

    status: int = 0
    headers: tuple[Header, ...] = ()
    body: bytes = b""
    writes: list[bytes] = field(default_factory=list)
    on_write: Callable[[bytes], None] = lambda data: None

    @property
    def is_started(self) -> bool:
        return self.status != 0

    async def send(self, response: Response) -> None:
        await self.start(response.status, response.headers)
        self.body = response.body

    async def start(self, status: int, headers: tuple[Header, ...]) -> None:
        assert not self.is_started, "a reply is started once"
        self.status, self.headers = status, headers

    async def write(self, data: bytes) -> None:
        assert self.is_started
        self.on_write(data)
        await trio.lowlevel.checkpoint()
        self.writes.append(data)
        self.body += data

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The documents of a stream's events, and ``[DONE]`` or comments as they are."""
        assert self.body.endswith(b"\n\n")
        found: list[Any] = []
        for event in self.body.decode().split("\n\n")[:-1]:
            assert "\n" not in event
            data = event.removeprefix("data: ")
            found.append(json.loads(data) if data.startswith("{") else data)
        return found


class Api:
    """The routes over a scripted loop, as the HTTP layer would call them."""

    def __init__(
        self,
        script: Callable[[GenRequest], Script] = lambda request: succ(request),
        *,
        pieces: Sequence[bytes] = (),
        template: str = CONTENTS,
        default_seed: int | None = None,
        queue_capacity: int = 64,
    ) -> None:
        self.loop = ScriptedLoop(script)
        tokenizer = PieceTokenizer(pieces)
        self.service = Service(
            model_id="succ",
            created=1_700_000_000,
            system_fingerprint="fp_test",
            tokenizer=tokenizer,
            chat_encoder=ChatEncoder(Template.parse(template), tokenizer),
            loop=self.loop,
            vocab_size=tokenizer.vocab_size,
            hidden_size=HIDDEN_SIZE,
            max_model_len=MAX_MODEL_LEN,
            stop_ids=frozenset({EOS}),
            queue_capacity=queue_capacity,
            default_seed=default_seed,
        )
        self._router = Router()
        add_routes(self._router, self.service)

    async def call(
        self,
        path: str,
        body: object = None,
        *,
        headers: dict[str, str] | None = None,
        reply: RecordedReply | None = None,
    ) -> RecordedReply:
        """POST ``body`` (bytes as they are, anything else as JSON), or GET without one."""
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        self.request = Request(
            method="GET" if body is None else "POST",
            path=path,
            query="",
            headers=tuple((headers or {}).items()),
            body=raw,
            request_id="test",
        )
        reply = reply or RecordedReply()
        try:
            await self._router(self.request, reply)
        except ApiError as error:
            if reply.is_started:
                await reply.write(ERRORS.event(error))
            else:
                await reply.send(ERRORS.response(error))
        return reply

    async def chat(self, content: str = "a", **fields: object) -> RecordedReply:
        messages = [{"role": "user", "content": content}]
        return await self.call("/v1/chat/completions", {"model": "succ", "messages": messages, **fields})

    async def complete(self, prompt: object = "a", **fields: object) -> RecordedReply:
        return await self.call("/v1/completions", {"model": "succ", "prompt": prompt, **fields})


def succ(request: GenRequest) -> list[int]:
    """After byte i, byte i + 1: the model of the worked example."""
    return [(request.prompt[-1] + 1 + step) % 256 for step in range(request.max_tokens)]


def fixed(*items: int | bytes | Pause | Exception) -> Callable[[GenRequest], Script]:
    """The same tokens for every request; ``bytes`` stand for one token each."""
    script: list[Any] = []
    for item in items:
        script += list(item) if isinstance(item, bytes) else [item]
    return lambda request: script
