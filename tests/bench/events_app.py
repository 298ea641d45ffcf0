"""The same stream of events as our server's, from Starlette: what HTTP alone costs elsewhere.

Run by Hypercorn's trio worker. It computes nothing: every event is the same ready-made bytes.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

COMMON = {"id": "cmpl-0123456789abcdef01234567", "object": "text_completion", "created": 1_700_000_000, "model": "succ"}
DONE = b"data: [DONE]\n\n"


def event(**fields: object) -> bytes:
    document = COMMON | {"system_fingerprint": "fp_0123456789ab"} | fields
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


TOKEN = event(choices=[{"text": "a", "index": 0, "logprobs": None, "finish_reason": None}], usage=None)


async def completions(request: Request) -> Response:
    body = await request.json()

    async def events() -> AsyncIterator[bytes]:
        for _ in range(body["max_tokens"]):
            await trio.lowlevel.checkpoint()  # a token would be waited for; so are ours
            yield TOKEN
        usage = {"prompt_tokens": 1, "completion_tokens": body["max_tokens"], "total_tokens": body["max_tokens"] + 1}
        yield event(choices=[], usage=usage)
        yield DONE

    return StreamingResponse(events(), media_type="text/event-stream")


async def models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [{"id": "succ", "object": "model"}]})


app = Starlette(
    routes=[
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", models),
    ]
)
