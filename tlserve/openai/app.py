"""The API's routes."""

from __future__ import annotations

from functools import partial

import trio

from tlserve.http.messages import Reply, Request, Response
from tlserve.http.router import Router
from tlserve.openai.chat import chat_completions
from tlserve.openai.completions import completions
from tlserve.openai.embeddings import embeddings
from tlserve.openai.models import get_model, list_models
from tlserve.openai.openapi import document_bytes
from tlserve.openai.service import Service
from tlserve.openai.tokenize import detokenize, tokenize

ROUTES = (
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/embeddings", embeddings),
    ("POST", "/v1/tokenize", tokenize),
    ("POST", "/v1/detokenize", detokenize),
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{id:path}", get_model),
)


def add_routes(router: Router, service: Service) -> None:
    """Serve the API of ``service`` on ``router``; its errors are rendered by ``errors.ERRORS``."""
    for method, pattern, handler in ROUTES:
        router.add(method, pattern, partial(handler, service))


def add_document(router: Router) -> None:
    """Serve the description of all that ``router`` has and ``add_routes`` gives it, also before it does."""
    router.add("GET", "/openapi.json", partial(openapi, router))


def all_routes(router: Router) -> frozenset[tuple[str, str]]:
    """What ``router`` serves once it has all of ``ROUTES``."""
    return frozenset(router.routes) | {(method, pattern) for method, pattern, _ in ROUTES}


async def openapi(router: Router, request: Request, reply: Reply) -> None:
    # In a thread: the first time takes some 30 ms.
    await reply.send(Response(200, await trio.to_thread.run_sync(document_bytes, all_routes(router))))
