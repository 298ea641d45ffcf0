"""A server with the API's routes and no model behind them, on a real socket, that can misbehave on demand."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from tlserve.errors import ApiError, Overloaded
from tlserve.http import sse
from tlserve.http.limits import Limits
from tlserve.http.messages import ErrorRenderer, Reply, Request, Response
from tlserve.http.router import Router
from tlserve.http.serve import HttpServer

CHAT_OVERHEAD = 5  # tokens that its template puts around a prompt; a word is a token

# What a request gets: nothing of the kind, or one of the faults of FakeApi._fail.
Fate = Callable[[int], str | None]


@dataclass
class FakeApi:
    base_url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)  # of the requests for text, probes included
    headers: list[dict[str, str]] = field(default_factory=list)
    num_model_lists: int = 0
    fate: Fate = lambda index: None
    token: str = "w "  # the text of each

    async def models(self, request: Request, reply: Reply) -> None:
        self.num_model_lists += 1
        await reply.send(Response(200, b'{"object":"list","data":[{"id":"fake","object":"model"}]}'))

    async def text(self, request: Request, reply: Reply) -> None:
        body = json.loads(request.body)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        is_chat = "messages" in body
        prompt = body["messages"][0]["content"] if is_chat else body["prompt"]
        num_prompt = len(prompt.split()) + (CHAT_OVERHEAD if is_chat else 0)
        fate = self.fate(len(self.bodies) - 1)
        if fate == "busy":
            raise Overloaded("come back later")
        await reply.start(200, sse.SSE_HEADERS)
        if is_chat:
            await self._send(reply, choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        for number in range(body["max_tokens"]):
            if number == 1 and fate is not None:
                await self._fail(reply, fate)
                return
            choice = {"delta": {"content": self.token}} if is_chat else {"text": self.token}
            await self._send(reply, choices=[{"index": 0, "finish_reason": None} | choice], usage=None)
        usage = {"prompt_tokens": num_prompt, "completion_tokens": body["max_tokens"]}
        await self._send(reply, choices=[], usage=usage)
        await reply.write(sse.PING + sse.DONE)

    async def _send(self, reply: Reply, **fields: object) -> None:
        await reply.write(sse.event(json.dumps(fields).encode()))

    async def _fail(self, reply: Reply, fate: str) -> None:
        if fate == "error event":
            await self._send(reply, error={"message": "it broke"})
        elif fate == "nonsense":
            await reply.write(b"data: {]\n\n")
        elif fate == "hang":
            await trio.sleep_forever()
        else:
            assert fate == "cut short", fate


def _render(error: ApiError) -> Response:
    return Response(error.status, b'{"error":{}}')


@asynccontextmanager
async def fake_api() -> AsyncIterator[FakeApi]:
    api = FakeApi()
    router = Router()
    router.add("GET", "/v1/models", api.models)
    router.add("POST", "/v1/chat/completions", api.text)
    router.add("POST", "/v1/completions", api.text)
    errors = ErrorRenderer(response=_render, event=lambda error: b"")
    server = HttpServer(router, errors, Limits(), name="fake")
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, listeners)
        api.base_url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}/v1"
        yield api
        nursery.cancel_scope.cancel()
