"""The served model, as the routes see it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import trio

from tlserve.engine.request import GenRequest, PooledOut, TokenOut
from tlserve.errors import InvalidRequest, KvHandleNotFound, ModelNotFound
from tlserve.http.messages import Request
from tlserve.openai.body import shown
from tlserve.text.chat import ChatEncoder
from tlserve.text.tokenizer import Tokenizer

T = TypeVar("T")

# Work on so little input takes a millisecond or two at the very most (text that is hard to tokenize), and
# usually less than the hop to a thread and back would add to the first token of every request.
INLINE_BYTES = 2 * 1024
# Beside the compute threads; more would only take turns at the interpreter lock.
MAX_THREADS = 2
# Bodies above this, which may keep a thread busy for seconds, wait for each other and for nobody else.
LARGE_BYTES = 256 * 1024

_PRIORITY = re.compile(r"[+-]?[0-9]{1,3}")


class Outputs(Protocol):
    """What the requests of one submission bring, as it comes: the place of a request in it, and its output."""

    @property
    def queue_time(self) -> float | None:
        """Seconds until the first of them began to run; None before that."""

    def __aiter__(self) -> Outputs: ...

    async def __anext__(self) -> tuple[int, TokenOut | PooledOut]: ...

    def take_ready(self, most: int) -> list[tuple[int, TokenOut | PooledOut]]:
        """Up to ``most`` of those that have come already."""


class Loop(Protocol):
    """All that the API needs of an EngineLoop."""

    def hold_place(self) -> AbstractContextManager[None]:
        """Hold a place for a request that is being prepared, or raise at once; leave the block to submit."""

    def submit(self, requests: Sequence[GenRequest]) -> AbstractAsyncContextManager[Outputs]:
        """Accept all of the requests or raise; leaving the block aborts what has not ended."""


@dataclass(kw_only=True)
class Service:
    """Made once, by the composition root, and shared by all handlers."""

    model_id: str
    created: int  # Unix seconds: when the model was loaded
    system_fingerprint: str  # of the weights and the numeric settings
    tokenizer: Tokenizer
    chat_encoder: ChatEncoder
    loop: Loop
    vocab_size: int  # width of the logits: token ids below it exist
    hidden_size: int  # length of an embedding
    max_model_len: int  # tokens of prompt and answer together
    stop_ids: frozenset[int]  # every EOS that the model's files name
    queue_capacity: int
    default_seed: int | None = None  # of requests that bring none; None = a fresh one each
    _limiter: trio.CapacityLimiter = field(init=False, default_factory=lambda: trio.CapacityLimiter(MAX_THREADS))
    _large_limiter: trio.CapacityLimiter = field(init=False, default_factory=lambda: trio.CapacityLimiter(1))

    async def off_loop(self, function: Callable[[], T], *, num_bytes: int, may_inline: bool = True) -> T:
        """Run pure work on ``num_bytes`` of input in a thread, or here when it is little; raises what it raises.

        ``may_inline`` is False for work that does not follow from the length of its input.

        Cancellation handling: the caller ends at once; the thread's result is dropped when it comes.
        """
        if may_inline and num_bytes <= INLINE_BYTES:
            return function()
        limiter = self._large_limiter if num_bytes > LARGE_BYTES else self._limiter
        return await trio.to_thread.run_sync(function, limiter=limiter, abandon_on_cancel=True)

    async def parse(self, parser: Callable[[bytes], T], body: bytes) -> T:
        return await self.off_loop(lambda: parser(body), num_bytes=len(body))

    def check_model(self, model: str) -> None:
        """Raises ModelNotFound unless ``model`` is the served id."""
        if model != self.model_id:
            raise ModelNotFound(
                f"the model {shown(model)} does not exist, this server has {self.model_id}", param="model"
            )


def read_priority(request: Request) -> int:
    """The request's X-TL-Priority, 0 without one. Raises InvalidRequest."""
    values = [value for name, value in request.headers if name == "x-tl-priority"]
    if not values:
        return 0
    if len(values) > 1:
        raise InvalidRequest(f"X-TL-Priority must be given once, got {len(values)} of it", param="X-TL-Priority")
    (value,) = values
    if not _PRIORITY.fullmatch(value) or abs(int(value)) > 100:
        raise InvalidRequest(
            f"X-TL-Priority must be an integer from -100 to 100, got {shown(value)}", param="X-TL-Priority"
        )
    return int(value)


def refuse_kv_handle(request: Request) -> None:
    """Raises KvHandleNotFound when the request names a KV handle: none exists before disaggregation."""
    if (handle := request.header("x-tl-kv-handle")) is not None:
        raise KvHandleNotFound(f"there is no KV handle {shown(handle)}", param="X-TL-KV-Handle")
